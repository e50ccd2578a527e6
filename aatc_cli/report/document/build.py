"""The whole report: the headline, and all sections in their fixed order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from aatc_cli.report.blocks import Section
from aatc_cli.report.data.run import ReportData, TextUse
from aatc_cli.report.document.plans import bytes_section, memory_section, spectrum_section, widths_section
from aatc_cli.report.document.quality import curve_section, distortion_section, quality_section
from aatc_cli.report.document.results import (
    answers_section,
    measured_memory_section,
    needles_section,
    recall_section,
    speed_section,
    stability_section,
    tokens_section,
    unshown_section,
)
from aatc_cli.report.document.studies import study_section
from aatc_cli.report.text import size

HOW_TO_READ = (
    "KL is the Kullback-Leibler divergence from the model's own next-token distribution with an uncompressed cache to "
    "that with the compressed cache, in nats per token: at 0 the compressed model predicts exactly what the original "
    "does. Windows are teacher-forced: every position is scored after the true text before it, so errors do not build "
    "up as they can in free generation, and a small KL does not by itself promise the same answers on a task. A number "
    "after ± is one standard error over windows; windows of one text are not fully independent. Two methods that saw "
    "the same windows or the same questions are compared by their differences on each of them, which is what tells "
    "them apart, not by the errors of either. Ratios and bytes are computed by the byte law from the widths (codes, "
    "padding, scales and what else a method keeps, sinks, recent window), not read from an allocator, and the static "
    "matrices are stated apart. Packed bits are what a number of a packed token takes with all that goes with it, "
    "without sinks and window, at any context; bits at N tokens count all bytes of the cache there, so that short "
    "windows look less compressed than long ones at the same widths."
)


@dataclass(frozen=True)
class Document:
    """A report ready to be rendered. ``facts`` are label and value pairs of the headline."""

    title: str
    facts: tuple[tuple[str, str], ...]
    sections: tuple[Section, ...]


def build_document(data: ReportData) -> Document:
    """The report's sections in their fixed order; one that a run of plans should have says in a sentence what lacks."""
    optional = (
        tokens_section(data),
        needles_section(data),
        recall_section(data),
        answers_section(data),
        stability_section(data),
        speed_section(data),
        measured_memory_section(data),
        unshown_section(data),
    )
    sections = (
        *(study_section(view) for view in data.studies),
        quality_section(data),
        curve_section(data),
        widths_section(data),
        spectrum_section(data),
        distortion_section(data),
        bytes_section(data),
        memory_section(data),
        *(section for section in optional if section is not None),
        Section("reading", "How to read this report", (HOW_TO_READ,)),
    )
    return Document(data.title, tuple(_facts(data)), sections)


def _facts(data: ReportData) -> Iterable[tuple[str, str]]:
    if data.model is None:
        found = (
            *data.evaluations,
            *data.speed,
            *data.memory,
            *data.answers,
            *data.needles,
            *data.recall,
            *data.stability,
        )
        yield "Model", ", ".join(sorted({e.model for e in found}))
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
        yield f"Calibration ({use.artifact})", _calibration(use)
    versions: dict[str, set[str]] = {"aatc": {data.version}}
    for e in data.evaluations:
        for name, version in e.versions.items():
            versions.setdefault(name, set()).add(version)
    yield "Versions", ", ".join(f"{name} {' and '.join(sorted(found))}" for name, found in sorted(versions.items()))


def _calibration(use: TextUse) -> str:
    """The texts with the windows taken of each, and the tokens that were used of them, not those that they have."""
    parts = [f"{text.name}, {'1 window' if text.windows == 1 else f'{text.windows} windows'}" for text in use.texts]
    return "; ".join(parts) + ("" if use.used is None else f": {use.used} tokens used")
