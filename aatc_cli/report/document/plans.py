"""Sections of plans: where the bits go, the spectrum they were given by, and what the cache takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from aatc_cli.report.blocks import FigureBlock, Section
from aatc_cli.report.data.run import PAPER_CONTEXT, Absent, PlanView, ReportData
from aatc_cli.report.figures.memory import bytes_figure, memory_figure
from aatc_cli.report.figures.plans import bitmap_figure, widths_figure
from aatc_cli.report.figures.spectrum import spectrum_figure
from aatc_cli.report.series.plans import bit_maps, bytes_series, memory_series, widths_series
from aatc_cli.report.series.spectrum import spectrum_series
from aatc_cli.report.tables.plans import bytes_table, plan_table

# plans that are all drawn: a page of a large study would be all bit maps
_MANY = 24
NO_PLANS = "No plan in this run: aatc allocate --budget 2.5"
# tokens at which the figure of memory states bytes: powers of two, from a short prompt to a long book
_CONTEXTS = tuple(2**power for power in range(8, 18))


def widths_section(data: ReportData) -> Section:
    """Widths of every plan by layer, and of every channel."""
    title = "Where the bits go"
    if not data.plans:
        return Section("widths", title, (NO_PLANS,))
    shown = shown_of(data.plans)
    # where there is a choice, plans of one width have nothing to show
    shown = [plan for plan in shown if len(shown) == len(data.plans) or _many_widths(plan)] or shown
    found = widths_series(shown)
    top = max(max(means) for widths in found for means in widths.layers.values())
    widest = max(len(counts) - 1 for widths in found for counts in widths.histogram.values())
    drawn = tuple(
        widths_figure(widths, top, widest, f"widths{index}", legend=index == 0) for index, widths in enumerate(found)
    )
    shaded = " Protected first layers, which stand outside the common pool, are shaded."
    few = "" if len(shown) == len(data.plans) else f" Of {len(data.plans)} plans one of each recipe, nearest to 2 bits."
    caption = (
        f"Left: mean bits per layer and side of each plan.{shaded if any(p.protected for p in shown) else ''} "
        f"Right: share of channels at each width.{few}"
    )
    maps = tuple(
        bitmap_figure(bitmap, widest, f"bits{index}", legend=index == 0) for index, bitmap in enumerate(bit_maps(shown))
    )
    told = f"Bits of every channel: a row of cells per layer, channels in the order of the plan's transform.{few}"
    blocks = (FigureBlock(drawn, caption, open=3), FigureBlock(maps, told, open=2))
    return Section("widths", title, figures=blocks, tables=(plan_table(data.plans),))


def shown_of(plans: Sequence[PlanView]) -> Sequence[PlanView]:
    """All plans, or where they are many one of each recipe, that nearest to two packed bits."""
    if len(plans) <= _MANY:
        return plans
    found: dict[str, PlanView] = {}
    for plan in sorted(plans, key=lambda plan: abs(plan.layout.bits_packed - 2)):
        found.setdefault(plan.recipe, plan)
    return [plan for plan in plans if found[plan.recipe] is plan]


def _many_widths(plan: PlanView) -> bool:
    return len({width for layer in plan.bits for side in layer.values() for width in side}) > 1


def spectrum_section(data: ReportData) -> Section:
    """Energies of a few sites with the water levels of the plans."""
    title = "Spectrum and water level"
    if isinstance(data.spectrum, Absent):
        return Section("spectrum", title, (data.spectrum.reason,))
    panels = spectrum_series(data.spectrum)
    caption = (
        f"Normalised energy w σ² of every channel in falling order under the recipe {data.spectrum.recipe}. A dashed "
        "line is the water level of one plan over all unprotected layers together: a channel above it gets about "
        "½ log₂(energy / level) bits, one below it none."
    )
    return Section("spectrum", title, figures=(FigureBlock((spectrum_figure(panels),), caption),))


def bytes_section(data: ReportData) -> Section:
    """What the cache of every plan takes by cause."""
    title = "Bytes by cause"
    if not data.plans:
        return Section("bytes", title, (NO_PLANS,))
    shown = shown_of(data.plans)
    bars = [(context, bytes_series(shown, context)) for context in data.contexts]
    few = "" if len(shown) == len(data.plans) else " Of each recipe the plan nearest to 2 bits; all are in the tables."
    caption = f"Live cache of one sequence in percent of its float16 cache, with its size and compression ratio.{few}"
    # at many plans the tables of all contexts are long: the paper's stays open
    found = tuple(
        replace(bytes_table(data.plans, context), folded=context != PAPER_CONTEXT) for context in data.contexts
    )
    return Section("bytes", title, figures=(FigureBlock((bytes_figure(bars),), caption),), tables=found)


def memory_section(data: ReportData) -> Section:
    """The byte law of every plan over the context, with what was measured."""
    title = "Memory against context"
    if not data.plans:
        return Section("memory", title, (NO_PLANS,))
    measured: dict[str, list[tuple[int, int]]] = {}
    for result in data.memory:
        if result.plan is not None:
            measured.setdefault(result.plan, []).extend((r.context, r.bytes_live) for r in result.rows if r.batch == 1)
    drawn = memory_figure(memory_series(data.plans, _CONTEXTS, measured))
    rings = " Rings are measured." if any(plan.digest in measured for plan in data.plans) else ""
    caption = (
        f"Live bytes of one sequence by the byte law; plans that take the same share a line.{rings} On the right "
        "packed bits name the lines: with the context the share falls towards that number over 16."
    )
    return Section("memory", title, figures=(FigureBlock((drawn,), caption),))
