"""Which evaluations may stand in one table: those of one protocol, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from aatc_cli.artifacts.evaluation import Evaluation
from aatc_cli.core import Side
from aatc_cli.report.data import paper_first


@dataclass(frozen=True, order=True)
class Protocol:
    """What must be equal before two evaluations are compared."""

    model: str
    text: str
    text_sha256: str
    length: int
    windows: int
    stride: int
    first_position: int
    dtype: str

    @classmethod
    def of(cls, e: Evaluation) -> Protocol:
        """The protocol an evaluation was made under."""
        return cls(e.model, e.text, e.text_sha256, e.length, e.windows, e.stride, e.first_position, e.dtype)

    def describe(self) -> str:
        """The protocol in words, as the caption of its table."""
        windows = "1 window" if self.windows == 1 else f"{self.windows} windows"
        return (
            f"{self.text}: {windows} of {self.length} tokens, scored from position {self.first_position}, {self.dtype}"
        )


@dataclass(frozen=True)
class QualityRow:
    """One recipe at one budget: its evaluations of the tasks ``kl`` and ``perplexity``, at least one of them."""

    evaluations: tuple[Evaluation, ...]

    @property
    def any(self) -> Evaluation:
        """An evaluation for what all of them share: bits, ratio, protocol."""
        return self.evaluations[0]

    @property
    def label(self) -> str:
        """The recipe, with the budget where it is not a width (a ratio or a size)."""
        budget = self.any.budget
        return self.any.recipe if budget is None or _is_width(budget) else f"{self.any.recipe} ({budget})"

    def value(self, field: str) -> float | None:
        """A measured field, from the first task that measured it."""
        found: Iterable[float | None] = (getattr(e, field) for e in self.evaluations)
        return next((value for value in found if value is not None), None)


@dataclass(frozen=True)
class QualityGroup:
    """All rows of one protocol: fp16 first, then budgets in falling bits, the paper's recipe first in each."""

    protocol: Protocol
    rows: tuple[QualityRow, ...]

    def budgets(self) -> dict[str, list[QualityRow]]:
        """Rows with a measured KL by budget label, fp16 left out."""
        found: dict[str, list[QualityRow]] = {}
        for row in self.rows:
            if row.any.budget is not None and row.value("kl_mean") is not None:
                found.setdefault(row.any.budget, []).append(row)
        return found

    def best_rows(self) -> list[QualityRow]:
        """The rows with the lowest KL of each budget at which two recipes or more were evaluated."""
        best: list[QualityRow] = []
        for rows in self.budgets().values():
            if len({row.any.recipe for row in rows}) > 1:
                lowest = min(_kl(row) for row in rows)
                best += [row for row in rows if _kl(row) == lowest]
        return best

    def indistinct(self) -> list[str]:
        """At most one sentence: per budget, the pairs whose KL differs by at most 2 standard errors of the difference.

        The errors are combined as if independent; the recipes share windows, so this is on the careful side.
        """
        found: list[str] = []
        for budget, rows in self.budgets().items():
            close = [pair for pair in combinations(rows, 2) if _within(*pair)]
            pairs = [f"{a.any.recipe} and {b.any.recipe}" for a, b in close if a.any.recipe != b.any.recipe]
            if pairs:
                found.append(
                    f"at {budget} bits {', '.join(pairs)}" if _is_width(budget) else f"at {budget} {', '.join(pairs)}"
                )
        return [f"n.s. (KL within 2 standard errors of each other): {'; '.join(found)}."] if found else []


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


def quality_groups(evaluations: Sequence[Evaluation]) -> list[QualityGroup]:
    """Evaluations of the tasks ``kl`` and ``perplexity`` by protocol.

    Two tasks share a row only if they ran the same recipe, budget and plan (by digest), so that numbers of a plan
    that was made anew in between are never put side by side as one.
    """
    found: dict[Protocol, dict[tuple[str, str | None, str | None], list[Evaluation]]] = {}
    for e in sorted((e for e in evaluations if e.task in ("kl", "perplexity")), key=lambda e: e.task):
        found.setdefault(Protocol.of(e), {}).setdefault((e.recipe, e.budget, e.plan), []).append(e)
    groups: list[QualityGroup] = []
    for protocol in sorted(found):
        rows = [QualityRow(tuple(parts)) for parts in found[protocol].values()]
        widest: dict[str | None, float] = {}
        for row in rows:
            widest[row.any.budget] = max(widest.get(row.any.budget, 0.0), row.any.bits)
        rows.sort(key=lambda row: _order(row, widest[row.any.budget]))
        groups.append(QualityGroup(protocol, tuple(rows)))
    return groups


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


def _order(row: QualityRow, widest: float) -> tuple[object, ...]:
    e = row.any
    return e.budget is not None, -widest, e.budget or "", paper_first(e.recipe), e.plan or ""


def _kl(row: QualityRow) -> float:
    value = row.value("kl_mean")
    assert value is not None
    return value


def _within(a: QualityRow, b: QualityRow) -> bool:
    errors = a.value("kl_stderr"), b.value("kl_stderr")
    if errors[0] is None or errors[1] is None:
        return False
    return abs(_kl(a) - _kl(b)) <= 2 * math.hypot(errors[0], errors[1])


def _is_width(budget: str) -> bool:
    return budget.replace(".", "", 1).isdigit()
