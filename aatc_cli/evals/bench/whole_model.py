"""Whole decode steps of a geometry with random weights: their time, and the device memory they take."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from aatc_cli.config import Geometry
from aatc_cli.console import say
from aatc_cli.core.layout import fp16_bytes
from aatc_cli.evals.bench.attention import Timing
from aatc_cli.evals.bench.model_steps import InPlaceState, decode_timing, full_state
from aatc_cli.evals.memory.peak import storage_bytes
from aatc_cli.evals.speed.result import SpeedMemory
from aatc_cli.runtime.fused.form import FusedForm
from aatc_cli.runtime.fused_tiles.form import FusedTilesForm
from aatc_cli.runtime.spec import CacheSpec
from aatc_cli.runtime.state import CompressedState

# steps beside the repeats: two that warm up, one that is captured, two replays that are not counted
_EXTRA_STEPS = 5
_LEAST_ROOM = 64
# of free memory that an uncompressed cache may take, beside buffers and a captured step
_OF_FREE = 0.95


def fused_steps(
    model: Any, spec: CacheSpec, geometry: Geometry, context: int, batch: int, repeats: int
) -> tuple[Timing, SpeedMemory]:
    """Time and memory of decode steps over a fused cache of ``context`` tokens with room for those that are timed."""
    start_over(spec.device)
    room = max(_LEAST_ROOM, repeats + _EXTRA_STEPS)
    state = full_state(spec, batch, context, room)
    assert spec.layout is not None
    law = spec.layout.bytes(context + room, batch)
    timing = decode_timing(model, state, batch, repeats)
    return timing, memory_row(model, state, timing.backend, (context, batch), law)


def uncompressed_steps(
    model: Any, geometry: Geometry, context: int, batch: int, repeats: int, device: torch.device
) -> tuple[list[Timing], list[SpeedMemory]]:
    """The same over an uncompressed cache in place, by every attention torch has for it; none where it does not fit."""
    start_over(device)
    timings: list[Timing] = []
    memory: list[SpeedMemory] = []
    try:
        like = torch.empty((), device=device, dtype=torch.bfloat16)
        state = InPlaceState(geometry, batch, context, SDPBackend.FLASH_ATTENTION, like)
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            state.backend = backend
            timings.append(decode_timing(model, state, batch, repeats))
            law = fp16_bytes(geometry, context, batch)
            memory.append(memory_row(model, state, timings[-1].backend, (context, batch), law))
    except torch.cuda.OutOfMemoryError:
        say(f"eval: the uncompressed cache of {batch} x {context} tokens does not fit this device")
    return timings, memory


def largest_batch(model: Any, geometry: Geometry, context: int) -> int:
    """Sequences of ``context`` tokens whose uncompressed cache fits beside ``model`` and what a step takes."""
    start_over(next(model.parameters()).device)
    free, _ = torch.cuda.mem_get_info(next(model.parameters()).device)
    return int(_OF_FREE * free) // fp16_bytes(geometry, context, 1)


def memory_of(state: CompressedState | InPlaceState) -> tuple[int, int, int]:
    """Bytes of a cache's tensors: those that hold tokens, static ones of its layers, and all others."""
    if isinstance(state, InPlaceState):
        return state.nbytes, 0, storage_bytes(tensors_in(state)) - state.nbytes
    live, form = state.bytes_live(), state.spec.form
    static = storage_bytes(tensors_in(form.layers)) if isinstance(form, FusedForm | FusedTilesForm) else 0
    return live, static, storage_bytes(tensors_in(state)) - live - static


def tensors_in(thing: object) -> Iterator[Tensor]:
    """Every tensor that containers and objects of this package hold, some of them more than once."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, dict):
        for part in thing.values():
            yield from tensors_in(part)
    elif isinstance(thing, list | tuple):
        for part in thing:
            yield from tensors_in(part)
    elif type(thing).__module__.startswith("aatc_cli."):
        yield from tensors_in(vars(thing))


def start_over(device: torch.device) -> None:
    """Give back what earlier caches held, and forget how much that was."""
    # a hosted cache and its layers point at each other: only a collection frees its tensors
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)


def memory_row(
    model: Any, state: CompressedState | InPlaceState, backend: str, size: tuple[int, int], law: int
) -> SpeedMemory:
    """Device memory since the last `start_over`, of decoding at one (context, batch), and what it is made of."""
    live, static, buffers = memory_of(state)
    weights = storage_bytes([*model.parameters(), *model.buffers()])
    peak = torch.cuda.max_memory_allocated(next(model.parameters()).device)
    return SpeedMemory(
        context=size[0],
        batch=size[1],
        backend=backend,
        peak_bytes=peak,
        weight_bytes=weights,
        law_bytes=law,
        live_bytes=live,
        static_bytes=static,
        buffer_bytes=buffers,
        ratio=peak / (weights + law),
    )
