"""Evaluations of quality, grouped by protocol: rows of tables, and lines of KL over packed bits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from aatc_cli.artifacts.evaluation import Evaluation
from aatc_cli.core.compare import Difference, Figure, difference, tied
from aatc_cli.report.data.protocols import Protocol
from aatc_cli.report.data.run import paper_first
from aatc_cli.report.series.samples import kl_figure


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

    @property
    def kl(self) -> Figure | None:
        """KL with its windows; None where it was not measured."""
        return next((figure for e in self.evaluations if (figure := kl_figure(e)) is not None), None)

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
            if row.any.budget is not None and row.kl is not None:
                found.setdefault(row.any.budget, []).append(row)
        return found

    def best_rows(self) -> list[QualityRow]:
        """The rows with the lowest KL of each budget at which two recipes or more were evaluated."""
        best: list[QualityRow] = []
        for rows in self.budgets().values():
            if len({row.any.recipe for row in rows}) > 1:
                lowest = min(_kl(row).mean for row in rows)
                best += [row for row in rows if _kl(row).mean == lowest]
        return best

    def behind(self) -> dict[int, Difference]:
        """By the identity of a row, how far its KL lies above the best of its budget; none for the best itself."""
        best = {row.any.budget: row for row in reversed(self.best_rows())}
        found: dict[int, Difference] = {}
        for budget, rows in self.budgets().items():
            for row in rows:
                if budget in best and row is not best[budget]:
                    gap = difference(_kl(row), _kl(best[budget]))
                    if gap is not None:
                        found[id(row)] = gap
        return found

    def indistinct(self) -> list[str]:
        """At most one sentence: per budget, the pairs of recipes whose KL cannot be told apart (`compare.tied`)."""
        found: list[str] = []
        for budget, rows in self.budgets().items():
            close = [(a, b) for a, b in combinations(rows, 2) if tied(_kl(a), _kl(b))]
            pairs = [f"{a.any.recipe} and {b.any.recipe}" for a, b in close if a.any.recipe != b.any.recipe]
            if pairs:
                found.append(
                    f"at {budget} bits {', '.join(pairs)}" if _is_width(budget) else f"at {budget} {', '.join(pairs)}"
                )
        return [f"n.s. (differences of KL within chance at 95 %): {'; '.join(found)}."] if found else []


@dataclass(frozen=True)
class Line:
    """A quantity of one recipe, rising in x. ``error`` is None where there was a single window; ``label`` names it."""

    recipe: str
    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    error: tuple[float | None, ...]

    @classmethod
    def of(
        cls, recipe: str, points: Sequence[tuple[float, Figure]], scale: float = 1.0, label: str | None = None
    ) -> Line:
        """Points in rising order of x, means and errors times ``scale``; its recipe is the label unless given."""
        ordered = sorted(points, key=lambda point: (point[0], point[1].mean))
        errors = tuple(None if figure.stderr is None else scale * figure.stderr for _, figure in ordered)
        return cls(
            recipe,
            label or recipe,
            tuple(x for x, _ in ordered),
            tuple(scale * figure.mean for _, figure in ordered),
            errors,
        )


@dataclass(frozen=True)
class QualityPanel:
    """One panel of the quality figure. ``reference`` is the KL of the float16 cache, stated and not drawn."""

    title: str
    lines: tuple[Line, ...]
    reference: float | None


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


def quality_series(groups: Sequence[QualityGroup]) -> list[QualityPanel]:
    """One panel per protocol with a measured KL, one line per recipe."""
    panels: list[QualityPanel] = []
    for group in groups:
        measured: dict[str, list[tuple[float, Figure]]] = {}
        reference = None
        for row in group.rows:
            kl = row.kl
            if kl is None:
                continue
            if row.any.budget is None:
                reference = kl.mean if reference is None else reference
            elif kl.mean > 0 and row.any.bits_packed is not None:
                measured.setdefault(row.any.recipe, []).append((row.any.bits_packed, kl))
        lines = tuple(Line.of(recipe, measured[recipe]) for recipe in sorted(measured, key=paper_first))
        if lines:
            title = f"{group.protocol.text}, {group.protocol.windows} x {group.protocol.length} tokens"
            panels.append(QualityPanel(title, lines, reference))
    return panels


def undrawn(groups: Sequence[QualityGroup]) -> list[str]:
    """Measured KL that the figure cannot show, each with its reason."""
    found = []
    for group in groups:
        for row in group.rows:
            e, kl = row.any, row.kl
            if kl is None or e.budget is None:
                continue
            if kl.mean <= 0:
                found.append(f"{e.method} on {e.text}: a KL of 0 has no place on a logarithmic axis")
            elif e.bits_packed is None:
                found.append(f"{e.method} on {e.text}: its file is older than packed bits; run aatc eval again")
    return found


def _order(row: QualityRow, widest: float) -> tuple[object, ...]:
    e = row.any
    return e.budget is not None, -widest, e.budget or "", paper_first(e.recipe), e.plan or ""


def _kl(row: QualityRow) -> Figure:
    figure = row.kl
    assert figure is not None
    return figure


def _is_width(budget: str) -> bool:
    return budget.replace(".", "", 1).isdigit()
