"""Predicted and measured distortion by layer: rows of tables, and points of the scatter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aatc_cli.artifacts.evaluation import Evaluation
from aatc_cli.core import Side
from aatc_cli.report.data.protocols import Protocol
from aatc_cli.report.data.run import paper_first


@dataclass(frozen=True)
class Point:
    """Predicted and measured distortion of one layer and side. ``width`` is a number of bits, or ``plan 2.5``."""

    recipe: str
    side: Side
    layer: int
    bits: float
    plan: bool
    width: str
    predicted: float
    diagonal: float
    measured: float

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None where nothing was predicted."""
        return self.measured / self.predicted if self.predicted > 0 else None


@dataclass(frozen=True)
class DistortionGroup:
    """All distortion points of one protocol."""

    protocol: Protocol
    points: tuple[Point, ...]

    def by_width(self) -> list[list[Point]]:
        """Points of the same recipe, side and width together; uniform widths in rising order, then plans."""
        found: dict[tuple[object, ...], list[Point]] = {}
        for p in self.points:
            key = (paper_first(p.recipe), p.side, p.plan, 0.0 if p.plan else p.bits, p.width)
            found.setdefault(key, []).append(p)
        return [found[key] for key in sorted(found)]


@dataclass(frozen=True)
class Scatter:
    """Predicted against measured distortion under one protocol; only points that a log axis can show."""

    title: str
    points: tuple[Point, ...]


def distortion_groups(evaluations: Sequence[Evaluation]) -> list[DistortionGroup]:
    """Rows of the task ``distortion`` by protocol.

    Uniform widths do not depend on the budget: a row that several budgets of a recipe repeat is kept once.
    """
    found: dict[Protocol, dict[Point, None]] = {}
    for e in evaluations:
        if e.task != "distortion":
            continue
        for row in e.distortion or []:
            width = f"plan {e.budget}" if row.plan else f"{row.bits:g}"
            point = Point(
                e.recipe,
                row.side,
                row.layer,
                row.bits,
                row.plan,
                width,
                row.predicted,
                row.predicted_diagonal,
                row.measured,
            )
            found.setdefault(Protocol.of(e), {})[point] = None
    return [DistortionGroup(protocol, tuple(found[protocol])) for protocol in sorted(found)]


def scatter_series(groups: Sequence[DistortionGroup]) -> list[Scatter]:
    """One scatter per protocol."""
    found: list[Scatter] = []
    for group in groups:
        points = tuple(p for p in group.points if p.predicted > 0 and p.measured > 0)
        if points:
            found.append(Scatter(f"{group.protocol.text}, {group.protocol.length} tokens", points))
    return found
