"""The numbers behind every figure, apart from the drawing: what a test can compare with the evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from aatc_cli.core import SIDES, Side
from aatc_cli.report.data import PlanView, Spectrum, paper_first
from aatc_cli.report.groups import DistortionGroup, Point, QualityGroup
from aatc_cli.report.tables import CAUSES, causes, number, size


@dataclass(frozen=True)
class Line:
    """KL of one recipe over packed bits, rising in x. ``error`` is None where there was a single window."""

    recipe: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    error: tuple[float | None, ...]


@dataclass(frozen=True)
class QualityPanel:
    """One panel of the quality figure. ``reference`` is the KL of the float16 cache, stated and not drawn."""

    title: str
    lines: tuple[Line, ...]
    reference: float | None


@dataclass(frozen=True)
class Widths:
    """Mean bits per layer and counts per width of one plan, by side."""

    name: str
    protected: int
    layers: Mapping[Side, list[float]]
    histogram: Mapping[Side, list[int]]


@dataclass(frozen=True)
class SpectrumPanel:
    """Normalised energy of one site against rank (1-based, zero energies left out), and the water levels."""

    layer: int
    side: Side
    rank: tuple[int, ...]
    energy: tuple[float, ...]
    levels: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Scatter:
    """Predicted against measured distortion under one protocol; only points that a log axis can show."""

    title: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Bar:
    """One plan's cache in percent of the float16 cache, by cause, with its total in words."""

    name: str
    shares: Mapping[str, float]
    label: str


def quality_series(groups: Sequence[QualityGroup]) -> list[QualityPanel]:
    """One panel per protocol with a measured KL, one line per recipe."""
    panels: list[QualityPanel] = []
    for group in groups:
        measured: dict[str, list[tuple[float, float, float | None]]] = {}
        reference = None
        for row in group.rows:
            kl = row.value("kl_mean")
            if row.any.budget is None:
                reference = kl if reference is None else reference
            elif kl is not None and kl > 0 and row.any.bits_packed is not None:
                measured.setdefault(row.any.recipe, []).append((row.any.bits_packed, kl, row.value("kl_stderr")))
        lines = []
        for recipe in sorted(measured, key=paper_first):
            x, y, error = zip(*sorted(measured[recipe], key=lambda point: point[:2]), strict=True)
            lines.append(Line(recipe, x, y, error))
        if lines:
            title = f"{group.protocol.text}, {group.protocol.windows} x {group.protocol.length} tokens"
            panels.append(QualityPanel(title, tuple(lines), reference))
    return panels


def widths_series(plans: Sequence[PlanView]) -> list[Widths]:
    """Layer means and width histogram of every plan."""
    return [
        Widths(plan.name, plan.protected, {side: plan.layer_means(side) for side in SIDES}, plan.histogram())
        for plan in plans
    ]


def spectrum_series(spectrum: Spectrum) -> list[SpectrumPanel]:
    """Panels in reading order: keys of every chosen layer, then values."""
    panels: list[SpectrumPanel] = []
    for side in SIDES:
        for layer in spectrum.layers:
            energy = np.sort(spectrum.energy[layer, side])[::-1]
            energy = energy[energy > 0]
            levels = tuple((budget, level[side]) for budget, level in spectrum.levels if level[side] > 0)
            ranks = tuple(range(1, energy.size + 1))
            panels.append(SpectrumPanel(layer, side, ranks, tuple(float(e) for e in energy), levels))
    return panels


def scatter_series(groups: Sequence[DistortionGroup]) -> list[Scatter]:
    """One scatter per protocol."""
    found: list[Scatter] = []
    for group in groups:
        points = tuple(p for p in group.points if p.predicted > 0 and p.measured > 0)
        if points:
            found.append(Scatter(f"{group.protocol.text}, {group.protocol.length} tokens", points))
    return found


def bytes_series(plans: Sequence[PlanView], context: int) -> list[Bar]:
    """Bytes by cause in percent of the float16 cache at ``context`` tokens."""
    bars: list[Bar] = []
    for plan in plans:
        parts, whole = causes(plan.layout, context), plan.layout.reference_bytes(context)
        shares = {CAUSES[cause]: 100.0 * parts[cause] / whole for cause in CAUSES}
        label = f"{size(plan.layout.bytes(context))}, {number(plan.layout.ratio(context))}x"
        bars.append(Bar(plan.name, shares, label))
    return bars
