"""Numbers as text, and the report's tables. A `Table` knows nothing of Markdown or HTML."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from aatc_cli.core import SIDES
from aatc_cli.core.layout import CacheLayout
from aatc_cli.report.data import PlanView
from aatc_cli.report.groups import DistortionGroup, QualityGroup, QualityRow

CAUSES = {
    "codes_keys": "key codes",
    "codes_values": "value codes",
    "padding": "padding",
    "token_scales": "scales, outliers",
    "sinks": "sinks",
    "window": "window",
}
MISSING = "-"
_UNITS = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))


@dataclass(frozen=True)
class Cell:
    """One cell; ``strong`` marks the best of its budget."""

    text: str
    strong: bool = False


@dataclass(frozen=True)
class Table:
    """A captioned table. ``rules`` are the rows that start a new block; ``notes`` stand below the table."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    rules: frozenset[int] = frozenset()


def number(value: float | None) -> str:
    """Three significant digits, plain between 0.0001 and a million and with an exponent outside; a dash for None."""
    if value is None:
        return MISSING
    if value == 0:
        return "0"
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    power = int(exponent)
    if -4 <= power < 6:
        return f"{float(f'{value:.2e}'):.{max(0, 2 - power)}f}"
    return f"{mantissa}e{power}"


def signed(value: float | None) -> str:
    """`number` with its sign written out."""
    return f"+{number(value)}" if value is not None and value > 0 else number(value)


def spread(mean: float | None, stderr: float | None) -> str:
    """A mean with its standard error, or the mean alone when there is none (a single window)."""
    return number(mean) if mean is None or stderr is None else f"{number(mean)} ± {number(stderr)}"


def percent(share: float | None) -> str:
    """A share as a percentage."""
    return number(share) if share is None else f"{number(100 * share)} %"


def percent_with_error(share: float | None, stderr: float | None) -> str:
    """A mean share as a percentage with its standard error in points, or alone when there is none."""
    return percent(share) if share is None or stderr is None else f"{number(100 * share)} ± {number(100 * stderr)} %"


def size(count: int) -> str:
    """Bytes in decimal units: ``184 MB``."""
    for unit, scale in _UNITS:
        if count >= 0.9995 * scale:
            return f"{number(count / scale)} {unit}"
    return f"{count} B"


def quality_table(group: QualityGroup, digests: Iterable[str]) -> Table:
    """The quality of every recipe and budget under one protocol; ``digests`` are the plans the run holds now.

    The best KL of a budget is strong where at least two recipes were evaluated at it. A column that nothing was
    measured for is left out.
    """
    known, best = set(digests), {id(row) for row in group.best_rows()}
    cells: list[dict[str, Cell]] = []
    rules: set[int] = set()
    for index, row in enumerate(group.rows):
        stale = row.any.plan is not None and row.any.plan not in known
        cells.append(_quality_cells(row, strong=id(row) in best, stale=stale))
        if index and row.any.budget != group.rows[index - 1].any.budget:
            rules.add(index)
    columns = [c for c in cells[0] if any(row[c].text != MISSING for row in cells)]
    rows = tuple(tuple(row[c] for c in columns) for row in cells)
    notes = [*_reference_notes(group), *group.indistinct()]
    if any("†" in row["recipe"].text for row in cells):
        notes.append("† evaluated with a plan that is no longer in this run; run aatc eval again for the present one.")
    return Table(group.protocol.describe(), tuple(columns), rows, tuple(notes), frozenset(rules))


def _quality_cells(row: QualityRow, *, strong: bool, stale: bool) -> dict[str, Cell]:
    e = row.any
    nll, reference = row.value("nll"), row.value("nll_reference")
    perplexity = spread(row.value("perplexity"), row.value("perplexity_stderr"))
    texts = {
        "recipe": row.label + (" †" if stale else ""),
        "bits": number(e.bits),
        "packed bits": number(e.bits_packed),
        f"bits at {e.context} tokens": number(e.bits_at_context),
        f"ratio at {e.context} tokens": f"{number(e.ratio)}x",
        "KL (nats)": spread(row.value("kl_mean"), row.value("kl_stderr")),
        "KL p99": number(row.value("kl_p99")),
        "top-1": percent_with_error(row.value("top1"), row.value("top1_stderr")),
        "NLL (nats)": spread(nll, row.value("nll_stderr")),
        "ΔNLL": signed(None if nll is None or reference is None else nll - reference),
        "perplexity": perplexity,
        "windows x length (from)": f"{e.windows} x {e.length} ({e.first_position})",
    }
    return {name: Cell(text, strong and name == "KL (nats)") for name, text in texts.items()}


def _reference_notes(group: QualityGroup) -> list[str]:
    parts = [
        f"{name} {number(value)}"
        for name, field in (("NLL", "nll_reference"), ("perplexity", "perplexity_reference"))
        if (value := next((v for row in group.rows if (v := row.value(field)) is not None), None)) is not None
    ]
    notes = [f"Reference (uncompressed cache, {group.protocol.dtype}): {', '.join(parts)}."] if parts else []
    return [*notes, f"Text sha256 {group.protocol.text_sha256[:12]}."]


def causes(layout: CacheLayout, context: int) -> dict[str, int]:
    """Live bytes at ``context`` tokens by the keys of `CAUSES`.

    All that a method keeps beside its codes goes with the token scales, sliding layers with the window.
    """
    parts = layout.breakdown(context)
    named = {cause: parts.pop(cause, 0) for cause in CAUSES}
    named["window"] += parts.pop("sliding_layers", 0)
    named["token_scales"] += sum(parts.values())
    return named


def plan_table(plans: Sequence[PlanView]) -> Table:
    """Mean widths, the most and the least generous layer, and predicted distortion of every plan."""
    columns = ("plan", "bits", "K bits", "V bits", "bits by layer", "zero-bit channels", "predicted K", "predicted V")
    rows = []
    for plan in plans:
        means = {side: plan.layer_means(side) for side in SIDES}
        layers = [(k + v) / 2 for k, v in zip(means["k"], means["v"], strict=True)]
        counts = plan.histogram()
        total = sum(sum(counts[side]) for side in SIDES)
        rows.append(
            _row(
                plan.name,
                number(plan.bits_mean),
                *(number(statistics.fmean(means[side])) for side in SIDES),
                f"{number(min(layers))} to {number(max(layers))}",
                percent(sum(counts[s][0] for s in SIDES) / total),
                *(number(plan.predicted[side]) for side in SIDES),
            )
        )
    note = "Predicted: what is left of the recipe's energies; with loss gradients as weights, the KL in nats per token."
    return Table("Widths of each plan", columns, tuple(rows), notes=(note,))


def distortion_table(group: DistortionGroup) -> Table:
    """Measured over predicted distortion per (recipe, side, width): median and range over layers."""
    columns = ("recipe", "side", "bits", "layers", "measured", "measured / predicted", "range", "measured / theorem")
    rows = []
    for points in group.by_width():
        head = points[0]
        ratios = [p.ratio for p in points if p.ratio is not None]
        rows.append(
            _row(
                head.recipe,
                head.side.upper(),
                head.width,
                str(len(points)),
                number(statistics.median(p.measured for p in points)),
                _median(ratios),
                f"{number(min(ratios))} to {number(max(ratios))}" if ratios else MISSING,
                _median([p.measured / p.diagonal for p in points if p.diagonal > 0]),
            )
        )
    notes = (
        "Medians over layers. The prediction keeps the coupling of heads that share a cache; "
        "the theorem adds heads as if they were independent.",
    )
    return Table(f"Distortion on {group.protocol.describe()}", columns, tuple(rows), notes)


def bytes_table(plans: Sequence[PlanView], context: int) -> Table:
    """Live bytes of every plan at ``context`` tokens by cause, the ratio to float16, and the static bytes."""
    columns = ("plan", *CAUSES.values(), "total", "ratio", f"bits at {context} tokens", "static")
    rows = []
    for plan in plans:
        parts = causes(plan.layout, context)
        static = sum(plan.layout.static_breakdown().values())
        rows.append(
            _row(
                plan.name,
                *(size(parts[cause]) for cause in CAUSES),
                size(plan.layout.bytes(context)),
                f"{number(plan.layout.ratio(context))}x",
                number(plan.layout.bits_at(context)),
                size(static),
            )
        )
    reference = size(plans[0].layout.reference_bytes(context))
    notes = (f"The float16 cache takes {reference}. Static bytes do not grow with tokens and are not in the ratio.",)
    return Table(f"Cache of one sequence of {context} tokens", columns, tuple(rows), notes)


def _median(values: list[float]) -> str:
    return number(statistics.median(values) if values else None)


def _row(*texts: str) -> tuple[Cell, ...]:
    return tuple(Cell(text) for text in texts)
