"""The entropy coder: asymmetric numeral systems of `LANES` interleaved lanes, under tables of 4096 shares.

A stream is the states of its lanes (uint32 each), then words of 16 bits in the order in which a reader asks for them.
Symbol n belongs to lane n mod `LANES`, so a reader has that many chains of arithmetic under way. Here a row of lanes is
one step, over all streams at once, on any device; `runtime.kernels.cell_symbols` goes symbol by symbol in machine code.

Source: Duda, "Asymmetric numeral systems" (2013); lanes as in Giesen, "Interleaved entropy coders" (2014).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aatc_cli.core.stepped_tables import MODELS, SYMBOLS, TOTAL, TOTAL_BITS, WIDEST, likelihoods
from aatc_cli.errors import AatcError

LANES = 8
WORD = 16
LOW = 1 << WORD
# of a slot's entry: its symbol, where the symbol begins, and the symbol's share
SYMBOL_BITS = 7
STATE_BYTES = 4 * LANES

Symbols = NDArray[np.uint8]
Rows = NDArray[np.int32]


def table_row(width: int, model: int) -> int:
    """Row of a resolution and a model in the tables; row 0 says nothing of a symbol that is sure."""
    return 1 + (width - 1) * MODELS + model


@lru_cache
def entries() -> NDArray[np.uint32]:
    """What a reader finds at a slot: share << 19 | (slot - begin) << 7 | symbol, [rows, TOTAL]."""
    found = np.zeros((1 + WIDEST * MODELS, TOTAL), dtype=np.uint32)
    slots = np.arange(TOTAL)
    found[0] = (TOTAL << (TOTAL_BITS + SYMBOL_BITS)) | (slots << SYMBOL_BITS)
    for row, (shares, begins) in enumerate(zip(*_shares(), strict=True)):
        if not row:
            continue
        symbol = np.repeat(np.arange(SYMBOLS), shares)
        inside = slots - begins[symbol]
        found[row] = (shares[symbol] << (TOTAL_BITS + SYMBOL_BITS)) | (inside << SYMBOL_BITS) | symbol
    return found


@lru_cache
def _shares() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Share and begin of every symbol, [rows, SYMBOLS] each."""
    sure = np.zeros(SYMBOLS, dtype=np.int64)
    sure[0] = TOTAL
    rows = [sure, *(likelihoods(width, model) for width in range(1, WIDEST + 1) for model in range(MODELS))]
    shares = np.stack(rows)
    return shares, shares.cumsum(1) - shares


@lru_cache
def shares() -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Share and begin of every symbol, [rows, SYMBOLS] each."""
    share, begin = _shares()
    return share.astype(np.uint32), begin.astype(np.uint32)


@lru_cache
def has_share() -> NDArray[np.bool_]:
    """Whether a symbol can be written under a row, [rows, SYMBOLS]."""
    return _shares()[0] > 0


@lru_cache
def tables_digest() -> int:
    """A checksum of all likelihoods: who has others would read other symbols."""
    return crc32(_shares()[0].astype("<i8").tobytes())


def encoded(symbols: Symbols, rows: Rows) -> bytes:
    """The stream of symbols [n] under the ``rows`` [n] of the tables; every symbol must have a share there.

    A row of lanes at a time, from the last one on.
    """
    shares, begins = _shares()
    share, begin = shares[rows, symbols], begins[rows, symbols]
    count = share.size
    blocks = -(-count // LANES)
    pad = blocks * LANES - count
    # under a share of all nothing changes
    share = np.concatenate([share, np.full(pad, TOTAL)]).reshape(blocks, LANES)
    begin = np.concatenate([begin, np.zeros(pad, dtype=np.int64)]).reshape(blocks, LANES)
    state = np.full(LANES, LOW, dtype=np.int64)
    words = []
    for f, b in zip(share[::-1], begin[::-1], strict=True):
        full = state >= f << (32 - TOTAL_BITS)
        words.append((state[full] & (LOW - 1))[::-1])
        state = np.where(full, state >> WORD, state)
        state = ((state // f) << TOTAL_BITS) + state % f + b
    found = np.concatenate(words)[::-1] if words else np.zeros(0, dtype=np.int64)
    return state.astype("<u4").tobytes() + found.astype("<u2").tobytes()


def decoded(streams: Sequence[bytes], rows: Sequence[Rows], device: torch.device | str = "cpu") -> list[Symbols]:
    """Symbols of streams, all together in torch; raises `AatcError` for one that is not what was written."""
    sizes = [part.size for part in rows]
    steps = -(-max(sizes, default=0) // LANES)
    kept = np.zeros((len(streams), steps * LANES), dtype=np.int64)
    words = np.zeros((len(streams), max((len(data) // 2 for data in streams), default=0) + 1), dtype=np.int64)
    for index, (data, mine) in enumerate(zip(streams, rows, strict=True)):
        check(data)
        kept[index, : mine.size] = mine
        words[index, : len(data) // 2] = np.frombuffer(data, dtype="<u2")
    held = torch.from_numpy(words).to(device)
    state = (held[:, : 2 * LANES : 2] | (held[:, 1 : 2 * LANES : 2] << WORD)).clone()
    found, state, place = _read(state, held, torch.from_numpy(kept).to(device), steps)
    ends = torch.tensor([len(data) // 2 for data in streams], device=held.device)
    if not bool((state == LOW).all() & (place[:, 0] == ends).all()):
        raise wrong()
    out = found.to(torch.uint8).cpu().numpy()
    return [out[index, :size] for index, size in enumerate(sizes)]


def _read(state: Tensor, words: Tensor, rows: Tensor, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Symbols [S, steps * LANES], the states and the places behind them; words and rows are int64."""
    flat = torch.from_numpy(entries().astype(np.int64)).to(words.device).flatten()
    bases = rows.view(rows.shape[0], steps, LANES).transpose(0, 1) * TOTAL
    place = torch.full_like(state[:, :1], 2 * LANES)
    last = words.shape[1] - 1
    found = []
    for base in bases:
        entry = flat[base + (state & (TOTAL - 1))]
        found.append(entry & ((1 << SYMBOL_BITS) - 1))
        state = (entry >> (TOTAL_BITS + SYMBOL_BITS)) * (state >> TOTAL_BITS) + ((entry >> SYMBOL_BITS) & (TOTAL - 1))
        wants = state < LOW
        after = place + wants.cumsum(1)
        word = words.gather(1, (after - 1).clamp(max=last))
        state = torch.where(wants, (state << WORD) | word, state)
        place = after[:, -1:]
    whole = torch.cat(found, 1) if found else rows
    return whole, state, place


def check(data: bytes) -> None:
    """Raise `AatcError` for bytes that are no stream."""
    if len(data) < STATE_BYTES or len(data) % 2:
        raise wrong()


def wrong() -> AatcError:
    """The error for a stream that is not what was written."""
    return AatcError("these bytes are no layer of this plan", "store the prefix again")
