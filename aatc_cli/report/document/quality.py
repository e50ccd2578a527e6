"""Sections of quality: tables by protocol, the curve over packed bits, and distortion."""

from __future__ import annotations

from aatc_cli.report.blocks import FigureBlock, Section
from aatc_cli.report.data.protocols import apart_notes
from aatc_cli.report.data.run import ReportData
from aatc_cli.report.figures.distortion import distortion_figure
from aatc_cli.report.figures.quality import quality_figure
from aatc_cli.report.series.distortion import distortion_groups, scatter_series
from aatc_cli.report.series.quality import quality_groups, quality_series
from aatc_cli.report.tables.distortion import distortion_table
from aatc_cli.report.tables.quality import quality_table
from aatc_cli.report.text import number


def quality_section(data: ReportData) -> Section:
    """One table per protocol."""
    digests = {plan.digest for plan in data.plans}
    groups = quality_groups(data.evaluations)
    apart = apart_notes([group.protocol for group in groups])
    found = tuple(quality_table(group, digests, said) for group, said in zip(groups, apart, strict=True))
    text = (
        "The lowest KL of each budget is in bold. One table holds what was measured alike: model, text, windows, first "
        "position, dtype and versions."
        if found
        else "No evaluation of quality in this run: aatc eval kl"
    )
    return Section("quality", "Quality", (text,), tables=found)


def curve_section(data: ReportData) -> Section:
    """KL over packed bits, a panel per protocol."""
    title = "Quality against memory"
    panels = quality_series(quality_groups(data.evaluations))
    if not panels:
        return Section("curve", title, ("No KL of a compressed cache in this run: aatc eval kl",))
    references = {number(panel.reference) for panel in panels if panel.reference is not None}
    fp16 = f" The float16 cache itself stands at {' and '.join(sorted(references))} nats." if references else ""
    caption = f"KL against packed bits; bars are one standard error over windows.{fp16}"
    return Section("curve", title, figures=(FigureBlock((quality_figure(panels),), caption),))


def distortion_section(data: ReportData) -> Section:
    """Predicted against measured error of attention."""
    title = "Predicted against measured distortion"
    groups = distortion_groups(data.evaluations)
    if not groups:
        return Section("distortion", title, ("No distortion evaluation in this run: aatc eval distortion",))
    scatters = scatter_series(groups)
    caption = (
        "Mean squared error of each layer's attention output relative to the output, one side quantized at a time; "
        "one mark per layer. On the diagonal the second-order prediction is exact."
    )
    drawn = (FigureBlock((distortion_figure(scatters),), caption),) if scatters else ()
    return Section("distortion", title, figures=drawn, tables=tuple(distortion_table(group) for group in groups))
