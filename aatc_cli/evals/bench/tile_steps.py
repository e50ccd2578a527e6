"""Whole decode steps over a fused cache of tiles: a synthetic plan on a random model, and full caches of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from aatc_cli.config import Geometry, Window
from aatc_cli.core.layout import packed_tokens
from aatc_cli.core.tiles import TILE
from aatc_cli.evals.bench.attention import Timing
from aatc_cli.evals.bench.model_steps import decode_timing
from aatc_cli.evals.bench.tile_plan import synthetic_codecs, synthetic_tiles
from aatc_cli.evals.bench.whole_model import memory_row, start_over
from aatc_cli.evals.speed.result import SpeedMemory
from aatc_cli.models.adapter import attention_layers
from aatc_cli.runtime.batch import Group
from aatc_cli.runtime.fused_tiles.store import FusedTileStore
from aatc_cli.runtime.spec import CacheSpec
from aatc_cli.runtime.state import CompressedState
from aatc_cli.runtime.tiles.form import tiles_spec

_DISTINCT, _FLUSHES = 64, 5


def tile_spec(model: Any, geometry: Geometry, window: Window, bits: float) -> CacheSpec:
    """The fused caches of a synthetic plan of tiles on a random ``model``: the same codecs in every layer.

    Tables of every layer are tensors of their own, as those of a real plan are.
    """
    codecs = synthetic_codecs(geometry, bits, torch.device("cpu"))
    spec = tiles_spec(model, attention_layers(model)[:1], [codecs], window, None, "fused")
    form: Any = spec.form
    [first] = form.layers
    more = [replace(first, tables=_copied(first.tables)) for _ in range(geometry.layers - 1)]
    return replace(spec, form=replace(form, layers=(first, *more)), windows=(None,) * geometry.layers)


def tile_steps(
    model: Any, spec: CacheSpec, geometry: Geometry, context: int, batch: int, repeats: int
) -> tuple[Timing, SpeedMemory]:
    """Time and memory of decode steps over a fused cache of tiles of ``context`` tokens.

    What packing a tile takes is shared out over the steps that there are for each.
    """
    start_over(spec.device)
    state, stores = full_tiles(spec, batch, context)
    timing = decode_timing(model, state, batch, repeats)
    stores[0].shared.steady = False
    flush = _flush_seconds(stores) / TILE
    timing = Timing("fused-tiles", [seconds + flush for seconds in timing.seconds], timing.bytes_moved)
    rows = spec.window.sinks + spec.window.recent
    law = sum(store.pages.nbytes + store.received.held.nbytes for store in stores)
    law += batch * rows * 2 * geometry.layers * geometry.channels * spec.dtype.itemsize
    return timing, memory_row(model, state, timing.backend, (context, batch), law)


def full_tiles(spec: CacheSpec, batch: int, context: int) -> tuple[CompressedState, list[FusedTileStore]]:
    """A cache with the tiles of ``context`` random tokens a sequence, and a window as it is after one was packed."""
    window, count = spec.window, packed_tokens(context, spec.window) // TILE
    tokens = window.sinks + TILE * count + window.recent - TILE
    spec = spec.with_room(context + 2 * TILE)
    state, made = CompressedState(spec), spec.stores(batch)
    stores = [store for store in made if isinstance(store, FusedTileStore)]
    state.columns, state.batch, state.steady = tokens, batch, True
    state.groups = [Group(list(range(batch)), 0, tokens, made)]
    generator = torch.Generator(spec.device).manual_seed(0)
    held: Any = stores[0].layer.held
    distinct = synthetic_tiles(stores[0].layer.codecs, held, _DISTINCT, generator)
    for store in stores:
        for row in range(batch):
            drawn = torch.randint(_DISTINCT, (store.pages.capacity,), device=spec.device, generator=generator)
            torch.index_select(distinct, 0, drawn, out=store.pages.data[row])
        store.exact.keys.normal_(generator=generator)
        store.exact.values.normal_(generator=generator)
        store.exact.shorten(tokens)
        store.received.show(window.recent)
        store.tokens, store.pages.count = tokens, count
    stores[0].shared.move(tokens, count, stores[0].pages.capacity, 0)
    stores[0].shared.steady = True
    return state, stores


def _flush_seconds(stores: Sequence[FusedTileStore]) -> float:
    """Seconds of packing a tile in every layer: the median of some times, each of the same tokens."""
    found: list[float] = []
    count = stores[0].pages.count
    for _ in range(_FLUSHES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for store in stores:
            store.flush()
            store.pages.count = count
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return sorted(found)[_FLUSHES // 2]


def _copied(tables: Any) -> Any:
    """The same tables elsewhere in memory; none on a CPU."""
    if tables is None:
        return None
    parts = {one.name: getattr(tables, one.name) for one in fields(tables)}
    return replace(tables, **{name: part.clone() for name, part in parts.items() if isinstance(part, Tensor)})
