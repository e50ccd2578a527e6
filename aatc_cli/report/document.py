"""The report as a sequence of sections, before it becomes Markdown or HTML."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from aatc_cli.artifacts.manifest import TextRecord
from aatc_cli.evals.speed.table import Columns, memory_columns, speed_columns
from aatc_cli.evals.stability.table import COLUMNS, stability_rows
from aatc_cli.report import figures, series, tables
from aatc_cli.report.data import Absent, ReportData
from aatc_cli.report.groups import distortion_groups, quality_groups
from aatc_cli.report.sections import FigureBlock, Section
from aatc_cli.report.study_section import study_section
from aatc_cli.report.tables import number, size

NO_PLANS = "No plan in this run: aatc allocate --budget 2.5"
HOW_TO_READ = (
    "KL is the Kullback-Leibler divergence from the model's own next-token distribution with an uncompressed cache to "
    "that with the compressed cache, in nats per token: at 0 the compressed model predicts exactly what the original "
    "does. Windows are teacher-forced: every position is scored after the true text before it, so errors do not build "
    "up as they can in free generation, and a small KL does not by itself promise the same answers on a task. A number "
    "after ± is one standard error over windows; windows of one text are not fully independent, so read a difference "
    "of one or two standard errors as a tie. Ratios and bytes are computed by the byte law from the widths (codes, "
    "padding, scales and what else a method keeps, sinks, recent window), not read from an allocator, and the static "
    "matrices are stated apart. Packed bits are what a number of a packed token takes with all that goes with it, "
    "without sinks and window, at any context; bits at N tokens count all bytes of the cache there, so that short "
    "windows look "
    "less compressed than long ones at the same widths."
)


@dataclass(frozen=True)
class Document:
    """A report ready to be rendered. ``facts`` are label and value pairs of the headline."""

    title: str
    facts: tuple[tuple[str, str], ...]
    sections: tuple[Section, ...]


def build_document(data: ReportData) -> Document:
    """The report's sections in their fixed order; a section without data says why in one sentence."""
    sections = (
        *(study_section(view) for view in data.studies),
        _quality(data),
        _quality_figure(data),
        _widths(data),
        _spectrum(data),
        _distortion(data),
        _bytes(data),
        *([_stability(data)] if data.stability else ()),
        *([_speed(data)] if data.speed else ()),
        Section("reading", "How to read this report", (HOW_TO_READ,)),
    )
    return Document(data.title, tuple(_facts(data)), sections)


def _facts(data: ReportData) -> Iterable[tuple[str, str]]:
    if data.model is None:
        yield "Model", ", ".join(sorted({e.model for e in (*data.evaluations, *data.speed)}))
    else:
        revision = f" at revision {data.model.revision}" if data.model.revision else ""
        yield "Model", f"{data.model.name} ({data.model.architecture}){revision}"
        g = data.model.geometry
        token = size(2 * g.layers * g.channels * 2)
        yield (
            "Cache",
            (
                f"{g.layers} layers, {g.heads} query heads, {g.kv_heads} key-value heads of {g.head_dim}: "
                f"{g.channels} channels per site, {token} per token in float16"
            ),
        )
    for use in data.texts:
        yield f"Calibration ({use.artifact})", "; ".join(_text(text) for text in use.texts)
    versions: dict[str, set[str]] = {"aatc": {data.version}}
    for e in data.evaluations:
        for name, version in e.versions.items():
            versions.setdefault(name, set()).add(version)
    yield "Versions", ", ".join(f"{name} {' and '.join(sorted(found))}" for name, found in sorted(versions.items()))


def _text(text: TextRecord) -> str:
    windows = "1 window" if text.windows == 1 else f"{text.windows} windows"
    return f"{text.name}, {text.tokens} tokens in {windows}"


def _quality(data: ReportData) -> Section:
    digests = {plan.digest for plan in data.plans}
    found = tuple(tables.quality_table(group, digests) for group in quality_groups(data.evaluations))
    text = (
        "The lowest KL of each budget is in bold. One table holds one text, window length and first position."
        if found
        else "No evaluation of quality in this run: aatc eval kl"
    )
    return Section("quality", "Quality", (text,), tables=found)


def _quality_figure(data: ReportData) -> Section:
    title = "Quality against memory"
    panels = series.quality_series(quality_groups(data.evaluations))
    if not panels:
        return Section("curve", title, ("No KL of a compressed cache in this run: aatc eval kl",))
    references = {number(panel.reference) for panel in panels if panel.reference is not None}
    fp16 = f" The float16 cache itself stands at {' and '.join(sorted(references))} nats." if references else ""
    caption = f"KL against packed bits; bars are one standard error over windows.{fp16}"
    return Section("curve", title, figures=(FigureBlock((figures.quality_figure(panels),), caption),))


def _widths(data: ReportData) -> Section:
    title = "Where the bits go"
    if not data.plans:
        return Section("widths", title, (NO_PLANS,))
    found = series.widths_series(data.plans)
    top = max(max(means) for widths in found for means in widths.layers.values())
    widest = max(len(counts) - 1 for widths in found for counts in widths.histogram.values())
    drawn = tuple(
        figures.widths_figure(widths, top, widest, f"widths{index}", legend=index == 0)
        for index, widths in enumerate(found)
    )
    shaded = " Protected first layers, which stand outside the common pool, are shaded." if _any_protected(data) else ""
    caption = f"Left: mean bits per layer and side of each plan.{shaded} Right: share of channels at each width."
    return Section("widths", title, figures=(FigureBlock(drawn, caption),), tables=(tables.plan_table(data.plans),))


def _any_protected(data: ReportData) -> bool:
    return any(plan.protected for plan in data.plans)


def _spectrum(data: ReportData) -> Section:
    title = "Spectrum and water level"
    if isinstance(data.spectrum, Absent):
        return Section("spectrum", title, (data.spectrum.reason,))
    panels = series.spectrum_series(data.spectrum)
    caption = (
        f"Normalised energy w σ² of every channel in falling order under the recipe {data.spectrum.recipe}. A dashed "
        "line is the water level of one plan over all unprotected layers together: a channel above it gets about "
        "½ log₂(energy / level) bits, one below it none."
    )
    return Section("spectrum", title, figures=(FigureBlock((figures.spectrum_figure(panels),), caption),))


def _distortion(data: ReportData) -> Section:
    title = "Predicted against measured distortion"
    groups = distortion_groups(data.evaluations)
    if not groups:
        return Section("distortion", title, ("No distortion evaluation in this run: aatc eval distortion",))
    scatters = series.scatter_series(groups)
    caption = (
        "Mean squared error of each layer's attention output relative to the output, one side quantized at a time; "
        "one mark per layer. On the diagonal the second-order prediction is exact."
    )
    drawn = (FigureBlock((figures.distortion_figure(scatters),), caption),) if scatters else ()
    return Section("distortion", title, figures=drawn, tables=tuple(tables.distortion_table(group) for group in groups))


def _stability(data: ReportData) -> Section:
    rows = tuple(tuple(tables.Cell(text) for text in row) for row in stability_rows(data.stability))
    text = (
        "The same recipe and budget, calibrated on different Stats. Where the KL that a plan's own gradients predict "
        "is far below what those of the other Stats predict for it, the plan fits its sample: more windows, or more "
        "whiten --shrinkage, will help. A text on which the largest KL is far above the smallest asks for calibration "
        "of its kind."
    )
    table = tables.Table("KL by the Stats a plan was calibrated on, and its predictions", COLUMNS, rows)
    return Section("stability", "Stability of the calibration", (text,), tables=(table,))


def _speed(data: ReportData) -> Section:
    """One table for every model and device that anything was timed on, and one of memory where it was measured."""
    text = (
        "Medians over repeats, with the smallest and the largest; ratios are to the model's own cache or, of a "
        "geometry alone, to the fastest attention on a bfloat16 cache. Bounds are of one call: its bytes at the rate "
        "at which the reference reads, and what its bytes, unpacking and key matrix take at the rates measured on the "
        "device, each alone. On a CPU only ratios mean anything."
    )
    places = dict.fromkeys((result.model, result.device, result.absolute) for result in data.speed)
    found = []
    for model, device, absolute in places:
        mine = [r for r in data.speed if (r.model, r.device, r.absolute) == (model, device, absolute)]
        found.append(_plain_table(f"Speed of {model} on {device}", speed_columns(mine)))
        if any(result.memory for result in mine):
            title = f"Memory in MB of decoding with {model} on {device}"
            found.append(_plain_table(title, memory_columns(mine)))
    return Section("speed", "Speed", (text,), tables=tuple(found))


def _plain_table(title: str, content: Columns) -> tables.Table:
    columns, rows = content
    return tables.Table(title, tuple(columns), tuple(tuple(tables.Cell(text) for text in row) for row in rows))


def _bytes(data: ReportData) -> Section:
    title = "Bytes by cause"
    if not data.plans:
        return Section("bytes", title, (NO_PLANS,))
    bars = [(context, series.bytes_series(data.plans, context)) for context in data.contexts]
    caption = "Live cache of one sequence in percent of its float16 cache, with its size and compression ratio."
    found = tuple(tables.bytes_table(data.plans, context) for context in data.contexts)
    return Section("bytes", title, figures=(FigureBlock((figures.bytes_figure(bars),), caption),), tables=found)
