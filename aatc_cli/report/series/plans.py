"""What plans are made of: widths by layer and channel, and bytes by cause and by context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from aatc_cli.core import SIDES, Side
from aatc_cli.core.layout import CacheLayout
from aatc_cli.report.data.run import PlanView
from aatc_cli.report.text import number, size

CAUSES = {
    "codes_keys": "key codes",
    "codes_values": "value codes",
    "padding": "padding",
    "token_scales": "scales, outliers",
    "sinks": "sinks",
    "window": "window",
}


@dataclass(frozen=True)
class Widths:
    """Mean bits per layer and counts per width of one plan, by side."""

    name: str
    protected: int
    layers: Mapping[Side, list[float]]
    histogram: Mapping[Side, list[float]]


@dataclass(frozen=True)
class Bar:
    """One plan's cache in percent of the float16 cache, by cause, with its total in words."""

    name: str
    shares: Mapping[str, float]
    label: str


def widths_series(plans: Sequence[PlanView]) -> list[Widths]:
    """Layer means and width histogram of every plan."""
    return [
        Widths(plan.name, plan.protected, {side: plan.layer_means(side) for side in SIDES}, plan.histogram())
        for plan in plans
    ]


def bytes_series(plans: Sequence[PlanView], context: int) -> list[Bar]:
    """Bytes by cause in percent of the float16 cache at ``context`` tokens."""
    bars: list[Bar] = []
    for plan in plans:
        parts, whole = causes(plan.layout, context), plan.layout.reference_bytes(context)
        shares = {CAUSES[cause]: 100.0 * parts[cause] / whole for cause in CAUSES}
        label = f"{size(plan.layout.bytes(context))}, {number(plan.layout.ratio(context))}x"
        bars.append(Bar(plan.name, shares, label))
    return bars


def causes(layout: CacheLayout, context: int) -> dict[str, int]:
    """Live bytes at ``context`` tokens by the keys of `CAUSES`.

    All that a method keeps beside its codes goes with the token scales, sliding layers with the window.
    """
    parts = layout.breakdown(context)
    named = {cause: parts.pop(cause, 0) for cause in CAUSES}
    named["window"] += parts.pop("sliding_layers", 0)
    named["token_scales"] += sum(parts.values())
    return named


@dataclass(frozen=True)
class BitMap:
    """Widths of every channel of one plan, by side and layer: runs (first channel, channels, width) of equal ones."""

    name: str
    channels: int
    runs: Mapping[Side, list[list[tuple[int, int, int]]]]

    @property
    def layers(self) -> int:
        """Layers of the plan."""
        return len(self.runs["k"])


def bit_maps(plans: Sequence[PlanView]) -> list[BitMap]:
    """The widths of every plan as runs; with classes of tokens those of every class in turn."""
    return [
        BitMap(plan.name, len(plan.bits[0]["k"]), {side: [_runs(layer[side]) for layer in plan.bits] for side in SIDES})
        for plan in plans
    ]


def _runs(widths: Sequence[int]) -> list[tuple[int, int, int]]:
    found, start = [], 0
    for width, members in groupby(widths):
        count = len(list(members))
        found.append((start, count, width))
        start += count
    return found


@dataclass(frozen=True)
class MemoryLine:
    """Live bytes over the context of plans that take the same; ``measured`` are those of memory evaluations.

    bits: packed bits, which name the line; the float16 cache has none.
    """

    recipes: tuple[str, ...]
    bits: float | None
    contexts: tuple[int, ...]
    bytes: tuple[int, ...]
    share: tuple[float, ...]
    measured: tuple[tuple[int, int], ...] = ()

    def with_plan(self, recipe: str, measured: Sequence[tuple[int, int]]) -> MemoryLine:
        """The same line, of another plan too."""
        recipes = tuple(dict.fromkeys((*self.recipes, recipe)))
        return replace(self, recipes=recipes, measured=(*self.measured, *measured))


def memory_series(
    plans: Sequence[PlanView], contexts: Sequence[int], measured: Mapping[str, Sequence[tuple[int, int]]]
) -> list[MemoryLine]:
    """The byte law over ``contexts``, the float16 cache first; ``measured`` by digest of a plan.

    Plans whose bytes nowhere differ by more than a hundredth share a line: they could not be told apart.
    """
    if not plans:
        return []
    whole = tuple(plans[0].layout.reference_bytes(context) for context in contexts)
    lines: list[MemoryLine] = []
    for plan in plans:
        live = tuple(plan.layout.bytes(context) for context in contexts)
        points = tuple(measured.get(plan.digest, ()))
        same = next((i for i, line in enumerate(lines) if _alike(line.bytes, live)), None)
        if same is not None:
            lines[same] = lines[same].with_plan(plan.recipe, points)
            continue
        share = tuple(100.0 * part / all_ for part, all_ in zip(live, whole, strict=True))
        lines.append(MemoryLine((plan.recipe,), plan.layout.bits_packed, tuple(contexts), live, share, points))
    own = MemoryLine(("fp16",), None, tuple(contexts), whole, (100.0,) * len(whole))
    return [own, *sorted(lines, key=lambda line: -line.bytes[-1])]


def _alike(a: Sequence[int], b: Sequence[int]) -> bool:
    return all(abs(x - y) <= 0.01 * y for x, y in zip(a, b, strict=True))
