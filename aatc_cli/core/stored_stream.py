"""Codes of a layer of a chunk as bytes of variable size: cells under an entropy code.

    layer = classes of every tile | model of every unit and class (1 byte each) | plain bits | entropy-coded words
    head of the last two: bytes of the plain bits (uint32)

Every unit of a class has the model, out of eight scales, under which its codes of the chunk are shortest: text that is
louder than the calibration, or quieter, costs a model and not a mismatch. Symbols of one resolution and model follow
one another over all units, so that the coder is called a few times a layer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aatc_cli.core.entropy_coder import Decoder, Symbols, code_lengths, encoded
from aatc_cli.core.stepped_tables import MODELS, MOST, plain_bits
from aatc_cli.core.stored_layer import LayerCodes, StoredLayer
from aatc_cli.core.stored_tags import Tags
from aatc_cli.core.unit_code import Coded
from aatc_cli.errors import AatcError

_WRONG = "these bytes are no layer of this plan"


@dataclass(frozen=True)
class _Run:
    """Channels of one resolution of one unit in one class. place: which of the coded units and classes it is."""

    place: int
    unit: int
    k: int
    width: int
    channels: Tensor

    def count(self, tiles: int, quota: int) -> int:
        """Codes of so many tiles."""
        return tiles * quota * self.channels.numel()


class LayerStream:
    """How one layer's codes lie in a chunk. ``heads``: kv heads, which may rank tokens each by itself."""

    def __init__(self, layer: StoredLayer, heads: int) -> None:
        self.rule, self.tags = layer.rule, Tags(layer.rule, heads)
        self.device = layer.codes[0].encode.device
        self.sizes = [int(code.encode.shape[0]) for code in layer.codes]
        self.runs = list(_runs(layer))
        self.places = 1 + max((run.place for run in self.runs), default=-1)
        self.coded = {(run.unit, run.k) for run in self.runs}

    def pack(self, codes: LayerCodes, classes: Tensor) -> bytes:
        """Bytes of the codes and classes [orders, T] of a chunk; raises `AatcError` without the coder."""
        split = [_split(self._of(run, codes), run.width) for run in self.runs]
        models = self._models(split)
        plain = b"".join(_packed(low, plain_bits(run.width)) for run, (_, low) in zip(self.runs, split, strict=True))
        streams = {run: high for run, (high, _) in zip(range(len(split)), split, strict=True)}
        parts = [
            (table, np.concatenate([streams[place] for place in places]))
            for table, places in self._by_table(models).items()
        ]
        head = self.tags.pack(classes) + models.tobytes() + struct.pack("<I", len(plain))
        return head + plain + encoded(parts)

    def bits(self, codes: LayerCodes, tokens: int) -> float:
        """Bits that `pack` takes, but for the coder's last words."""
        split = [_split(self._of(run, codes), run.width)[0] for run in self.runs]
        lengths = self._lengths(split).min(1).sum()
        plain = sum(plain_bits(run.width) * high.size for run, high in zip(self.runs, split, strict=True))
        return float(lengths) + plain + 8 * (self.tags.nbytes(tokens // self.rule.tile) + self.places + 8)

    def unpack(self, data: bytes, tokens: int) -> tuple[LayerCodes, Tensor]:
        """Codes and classes [orders, T]; raises `AatcError` for bytes that are no layer, or without the coder."""
        tiles = tokens // self.rule.tile
        start = self.tags.nbytes(tiles)
        stop = start + self.places + 4
        if len(data) < stop:
            raise AatcError(_WRONG, "store the prefix again")
        classes = self.tags.unpack(data[:start], tiles).to(self.device)
        models = np.frombuffer(data[start : stop - 4], dtype=np.uint8)
        (size,) = struct.unpack("<I", data[stop - 4 : stop])
        counts = [run.count(tiles, self.rule.quotas[run.k]) for run in self.runs]
        plain = [-(-plain_bits(run.width) * count // 8) for run, count in zip(self.runs, counts, strict=True)]
        if size != sum(plain) or len(data) < stop + size or (len(data) - stop - size) % 4 or (models >= MODELS).any():
            raise AatcError(_WRONG, "store the prefix again")
        high = self._decoded(data[stop + size :], models, counts)
        found = [self._empty(place, k, tiles) for place in range(len(self.sizes)) for k in range(self.rule.classes)]
        at = stop
        for run, count, nbytes, symbols in zip(self.runs, counts, plain, high, strict=True):
            low = _unpacked(data[at : at + nbytes], plain_bits(run.width), count)
            codes = ((symbols.astype(np.int64) - (MOST + 1)) << plain_bits(run.width)) + low
            target = found[run.unit * self.rule.classes + run.k]
            assert target is not None
            target[0][..., run.channels] = torch.from_numpy(codes).view(tiles, -1, run.channels.numel()).to(self.device)
            at += nbytes
        units = [found[start : start + self.rule.classes] for start in range(0, len(found), self.rule.classes)]
        return LayerCodes(units), classes

    def _of(self, run: _Run, codes: LayerCodes) -> NDArray[np.int64]:
        coded = codes.units[run.unit][run.k]
        assert coded is not None
        found: NDArray[np.int64] = coded[0][..., run.channels].flatten().cpu().numpy()
        return found

    def _models(self, split: list[tuple[Symbols, NDArray[np.int64]]]) -> NDArray[np.uint8]:
        """The model of every unit and class under which its codes are shortest."""
        found: NDArray[np.uint8] = self._lengths([high for high, _ in split]).argmin(1).astype(np.uint8)
        return found

    def _lengths(self, high: list[Symbols]) -> NDArray[np.float64]:
        """Bits of every unit and class under every model: [places, MODELS]."""
        lengths = np.zeros((self.places, MODELS))
        for run, symbols in zip(self.runs, high, strict=True):
            lengths[run.place] += code_lengths(run.width, np.bincount(symbols, minlength=2 * MOST + 2))
        return lengths

    def _by_table(self, models: NDArray[np.uint8]) -> dict[tuple[int, int], list[int]]:
        """Runs by resolution and model, in an order of their own."""
        found: dict[tuple[int, int], list[int]] = {}
        for place, run in enumerate(self.runs):
            found.setdefault((run.width, int(models[run.place])), []).append(place)
        return dict(sorted(found.items()))

    def _decoded(self, data: bytes, models: NDArray[np.uint8], counts: list[int]) -> list[Symbols]:
        """The symbols of every run."""
        decoder = Decoder(data)
        found: dict[int, Symbols] = {}
        for table, places in self._by_table(models).items():
            symbols = decoder.take(table, sum(counts[place] for place in places))
            ends = np.cumsum([counts[place] for place in places])[:-1]
            found |= dict(zip(places, np.split(symbols, ends), strict=True))
        if not decoder.empty:
            raise AatcError(_WRONG, "store the prefix again")
        return [found[place] for place in range(len(self.runs))]

    def _empty(self, unit: int, k: int, tiles: int) -> Coded | None:
        """Codes of one unit in one class, all zero; None where it has none."""
        if (unit, k) not in self.coded:
            return None
        quota, size = self.rule.quotas[k], self.sizes[unit]
        codes = torch.zeros(tiles, quota, size, dtype=torch.int64, device=self.device)
        return codes, torch.zeros(tiles, quota, dtype=torch.float16, device=self.device)


def _runs(layer: StoredLayer) -> Iterator[_Run]:
    """Runs of a layer, unit by unit, class by class, resolutions rising."""
    place = 0
    for unit, code in enumerate(layer.codes):
        for k, quantizer in enumerate(code.quantizers):
            if quantizer is None:
                continue
            for width in sorted(set(quantizer.bits.tolist()) - {0}):
                yield _Run(place, unit, k, width, (quantizer.bits == width).nonzero()[:, 0])
            place += 1


def _split(codes: NDArray[np.int64], width: int) -> tuple[Symbols, NDArray[np.int64]]:
    """Symbols that are entropy-coded, and the lowest bits."""
    shift = plain_bits(width)
    return ((codes >> shift) + MOST + 1).astype(np.int32), codes & ((1 << shift) - 1)


def _packed(low: NDArray[np.int64], bits: int) -> bytes:
    """Numbers of ``bits`` bits, the lowest first."""
    if not bits:
        return b""
    places = (low[:, None] >> np.arange(bits)) & 1
    return np.packbits(places.astype(np.uint8).ravel(), bitorder="little").tobytes()


def _unpacked(data: bytes, bits: int, count: int) -> NDArray[np.int64]:
    """Inverse of `_packed`."""
    if not bits:
        return np.zeros(count, dtype=np.int64)
    places = np.unpackbits(np.frombuffer(data, dtype=np.uint8), count=bits * count, bitorder="little")
    found: NDArray[np.int64] = places.reshape(count, bits).astype(np.int64) @ (1 << np.arange(bits))
    return found
