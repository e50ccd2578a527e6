"""Tables of quality: every recipe and budget of one protocol, with differences taken window by window."""

from __future__ import annotations

from collections.abc import Iterable

from aatc_cli.core.compare import Difference
from aatc_cli.report.blocks import Cell, Table
from aatc_cli.report.series.quality import QualityGroup, QualityRow
from aatc_cli.report.series.samples import nll_change
from aatc_cli.report.text import MISSING, change, number, percent_with_error, spread

_BEHIND = "KL above the best"


def quality_table(group: QualityGroup, digests: Iterable[str], apart: tuple[str, ...] = ()) -> Table:
    """The quality of every recipe and budget under one protocol; ``digests`` are the plans the run holds now.

    apart: what is said of why this table is not one with another.

    The best KL of a budget is strong where at least two recipes were evaluated at it. A column that nothing was
    measured for is left out.
    """
    known, best, behind = set(digests), {id(row) for row in group.best_rows()}, group.behind()
    cells: list[dict[str, Cell]] = []
    rules: set[int] = set()
    for index, row in enumerate(group.rows):
        stale = row.any.plan is not None and row.any.plan not in known
        cells.append(_quality_cells(row, behind.get(id(row)), strong=id(row) in best, stale=stale))
        if index and row.any.budget != group.rows[index - 1].any.budget:
            rules.add(index)
    columns = [c for c in cells[0] if any(row[c].text != MISSING for row in cells)]
    rows = tuple(tuple(row[c] for c in columns) for row in cells)
    notes = [*apart, *_reference_notes(group), *_difference_notes(behind), *group.indistinct()]
    if any("†" in row["recipe"].text for row in cells):
        notes.append("† evaluated with a plan that is no longer in this run; run aatc eval again for the present one.")
    return Table(group.protocol.describe(), tuple(columns), rows, tuple(notes), frozenset(rules))


def _quality_cells(row: QualityRow, behind: Difference | None, *, strong: bool, stale: bool) -> dict[str, Cell]:
    e = row.any
    nll = row.value("nll")
    changes = [found for e in row.evaluations if (found := nll_change(e))[0] is not None]
    perplexity = spread(row.value("perplexity"), row.value("perplexity_stderr"))
    texts = {
        "recipe": row.label + (" †" if stale else ""),
        "bits": number(e.bits),
        "packed bits": number(e.bits_packed),
        "KL (nats)": spread(row.value("kl_mean"), row.value("kl_stderr")),
        _BEHIND: MISSING if behind is None else spread(behind.mean, behind.stderr),
        "KL p99": number(row.value("kl_p99")),
        "KL p99.9": number(row.value("kl_p999")),
        "top-1": percent_with_error(row.value("top1"), row.value("top1_stderr")),
        "NLL (nats)": spread(nll, row.value("nll_stderr")),
        "ΔNLL": change(*(changes[0] if changes else (None, None))),
        "perplexity": perplexity,
        f"bits at {e.context} tokens": number(e.bits_at_context),
        f"ratio at {e.context} tokens": f"{number(e.ratio)}x",
    }
    return {name: Cell(text, strong and name == "KL (nats)") for name, text in texts.items()}


def _difference_notes(behind: dict[int, Difference]) -> list[str]:
    if not behind:
        return []
    paired = all(gap.paired for gap in behind.values())
    how = "window by window" if paired else "window by window where windows were kept, else as of independent samples"
    return [f"{_BEHIND} of its budget and the standard error of that difference, taken {how}."]


def _reference_notes(group: QualityGroup) -> list[str]:
    parts = [
        f"{name} {number(value)}"
        for name, field in (("NLL", "nll_reference"), ("perplexity", "perplexity_reference"))
        if (value := next((v for row in group.rows if (v := row.value(field)) is not None), None)) is not None
    ]
    notes = [f"Reference (uncompressed cache, {group.protocol.dtype}): {', '.join(parts)}."] if parts else []
    return [*notes, f"Text sha256 {group.protocol.text_sha256[:12]}."]
