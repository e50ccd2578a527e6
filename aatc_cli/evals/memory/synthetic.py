"""Stores of random widths with a budget's mean, filled with random vectors, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from aatc_cli.config import Budget, Geometry, HeadGroups, Window
from aatc_cli.console import progress
from aatc_cli.core import SIDES, Side
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.layout import CacheLayout
from aatc_cli.evals.memory.peak import Peak, storage_bytes
from aatc_cli.evals.memory.result import MemoryRow
from aatc_cli.evals.memory.settings import Settings
from aatc_cli.methods.recipe import Recipe
from aatc_cli.profiles import ModelProfile
from aatc_cli.runtime.packed.site import SiteCodec
from aatc_cli.runtime.packed.store import PackedStore
from aatc_cli.runtime.sliding import SlidingStore

# random vectors written into a store at once, of all sequences
_ROWS = 4096


def synthetic_rows(
    profile: ModelProfile, recipe: Recipe, budget: Budget, settings: Settings, device: str
) -> tuple[dict[str, float], list[MemoryRow]]:
    """Bits of the widths that were drawn, and a row per size."""
    geometry, window = profile.geometry, recipe.window
    groups = recipe.head_groups(geometry.kv_heads, HeadGroups.both(profile.head_groups))
    generator = torch.Generator().manual_seed(0)
    bits: list[dict[Side, list[int]]] = [
        {
            side: random_widths(geometry.channels, budget.value, recipe.min_bits, recipe.max_bits, generator)
            for side in SIDES
        }
        for _ in range(geometry.layers)
    ]
    layout = CacheLayout.of_bits(geometry, window, groups, bits, recipe.scale_bits)
    rows = []
    stores = geometry.layers + geometry.sliding_layers
    with progress(f"eval memory of {profile.name}", stores * len(settings.sizes)) as ticker:
        for context, batch in settings.sizes:
            peak = Peak(device)
            base = peak.restart()
            held: list[Tensor] = []
            for store in _stores(geometry, window, groups, bits, recipe.scale_bits, batch, device):
                _fill(store, geometry.channels, context, batch, device)
                held += store.tensors().values()
                ticker.advance()
            live, half = storage_bytes(held), layout.reference_bytes(context, batch)
            rows.append(
                MemoryRow(
                    context=context,
                    batch=batch,
                    bytes_live=live,
                    bytes_predicted=layout.bytes(context, batch),
                    bytes_fp16=half,
                    ratio=half / live,
                    base_bytes=base,
                    peak_bytes=peak.read(),
                )
            )
    drawn = sum(sum(layer[side]) for layer in bits for side in SIDES) / (2 * geometry.layers * geometry.channels)
    return {"bits": drawn, "bits_packed": layout.bits_packed}, rows


def _stores(
    geometry: Geometry,
    window: Window,
    groups: HeadGroups,
    bits: Sequence[dict[Side, list[int]]],
    scale_bits: int,
    batch: int,
    device: str,
) -> Iterator[PackedStore | SlidingStore]:
    """Empty stores, one at a time: the matrices of one layer are gone when the next one's are made."""
    for layer in bits:
        keys, values = (
            SiteCodec(side, _plain_codec(layer[side], groups.of(side), scale_bits, device), None, window.flush)
            for side in SIDES
        )
        yield PackedStore(keys, values, window, batch, torch.float16)
    for _ in range(geometry.sliding_layers):
        assert geometry.sliding_window is not None
        yield SlidingStore(geometry.sliding_window, geometry.channels, batch, torch.float16, torch.device(device))


def _plain_codec(bits: list[int], groups: int, scale_bits: int, device: str) -> TransformCodec:
    """A codec that transforms nothing and scales nothing, of these widths."""
    unit = torch.eye(len(bits) // groups).expand(groups, -1, -1)
    ones = torch.ones(len(bits))
    return TransformCodec(unit, unit, ones, torch.tensor(bits), ones, scale_bits=scale_bits).to(device)


def _fill(store: PackedStore | SlidingStore, channels: int, context: int, batch: int, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = max(_ROWS // batch, 1)

    def draw(count: int) -> Tensor:
        return torch.randn(batch, count, channels, generator=generator).to(device, torch.float16)

    for start in range(0, context, rows):
        count = min(rows, context - start)
        store.append(draw(count), draw(count))


def random_widths(channels: int, bits: float, low: int, high: int, generator: torch.Generator) -> list[int]:
    """Widths [C] between ``low`` and ``high`` whose sum is the integer nearest to C * ``bits``; the same for a seed."""
    spread = min(high, 2 * round(bits) + 1)
    widths: list[int] = torch.randint(low, max(spread, low) + 1, (channels,), generator=generator).tolist()
    missing = round(channels * bits) - sum(widths)
    step, end = (1, high) if missing > 0 else (-1, low)
    assert low * channels <= round(channels * bits) <= high * channels
    while missing:
        for channel in torch.randperm(channels, generator=generator).tolist():
            if missing and widths[channel] != end:
                widths[channel] += step
                missing -= step
    return widths
