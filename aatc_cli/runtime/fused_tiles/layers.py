"""The layers of a fused cache of tiles: codecs and records of each, and on a GPU the tables of both kernels."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from aatc_cli.artifacts.brought import brought
from aatc_cli.core import SIDES, Side
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.runtime.fused_tiles.encode import EncodeTables, FusedTileLayer
from aatc_cli.runtime.fused_tiles.forms import TileRoom
from aatc_cli.runtime.fused_tiles.records import RecordTiles
from aatc_cli.runtime.fused_tiles.shared import FusedTiles
from aatc_cli.runtime.fused_tiles.tables import TileTables

# layers whose tables are made at once: large products of torch, which leave other threads alone
_THREADS = 8

Biases = Mapping[Side, Tensor | None]
Pair = dict[Side, TileCodec]


def fused_layers(
    layers: Sequence[int],
    codecs: Sequence[Mapping[Side, TileCodec]],
    biases: Sequence[Biases],
    order: Tensor | None,
    like: Tensor,
) -> tuple[FusedTiles, ...]:
    """Layers of a model whose parameters are as ``like``, numbered as it numbers them, on the device of those.

    Every kv head is a head group of its own; ``order`` is as of `FusedTiles`. What there is to make is made on the
    host, where codecs and biases may be, and goes to the device in one copy.
    """
    dtype, device = torch.promote_types(like.dtype, torch.float32), like.device
    host: list[Pair] = [{side: pair[side].to("cpu", dtype) for side in SIDES} for pair in codecs]
    records = [RecordTiles(pair, pair["k"].rule, pair["k"].codec.groups) for pair in host]
    none: list[None] = [None] * len(host)
    tables = _tables(host, records, *brought((list(biases), order), "cpu")) if device.type == "cuda" else (none, none)
    placed, (decoding, encoding), near = brought((host, tables, list(biases)), device)
    made = []
    for layer, pair, bias, held, packing in zip(layers, placed, near, records, encoding, strict=True):
        scaled = None if packing is None else packing.scaled(device)
        whole = FusedTileLayer(layer, pair, bias, held.rule, held.heads, held.on(pair))
        made.append(whole.by_kernel(scaled))
    return tuple(FusedTiles(layer, reading, order) for layer, reading in zip(made, decoding, strict=True))


def _tables(
    codecs: Sequence[Pair], records: Sequence[RecordTiles], biases: Sequence[Biases], order: Tensor | None
) -> tuple[Sequence[TileTables | None], Sequence[EncodeTables | None]]:
    """What the kernels need of every layer, such that one compiled kernel serves them all.

    The one that packs computes in float32: nothing for it where codecs are of float64.
    """
    room = TileRoom.of(records)
    whole = zip(codecs, records, biases, strict=True)
    decoding = [TileTables.of(pair, held, bias, order, room) for pair, held, bias in whole]
    if codecs[0]["k"].codec.encode.dtype != torch.float32:
        return decoding, [None] * len(records)
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        return decoding, list(pool.map(EncodeTables.of, records))
