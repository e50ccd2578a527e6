"""Sections of what a run may hold beside quality: answers, stability, speed, memory; and what is not shown."""

from __future__ import annotations

from aatc_cli.artifacts.manifest import digest_of
from aatc_cli.evals.answers.result import BenchmarkResult
from aatc_cli.report.blocks import FigureBlock, Section
from aatc_cli.report.data.run import ReportData
from aatc_cli.report.figures.needles import needle_figure
from aatc_cli.report.series.needles import needle_groups
from aatc_cli.report.series.quality import quality_groups, undrawn
from aatc_cli.report.series.tokens import marked_texts
from aatc_cli.report.tables.recall import recall_tables
from aatc_cli.report.tables.results import memory_tables, needle_tables, speed_tables, stability_table
from aatc_cli.report.tables.scores import answer_tables


def answers_section(data: ReportData) -> Section | None:
    """Scores of benchmarks by generation, a table per benchmark, protocol and context; None without any."""
    if not data.answers:
        return None
    groups: dict[tuple[str, ...], list[BenchmarkResult]] = {}
    for result in data.answers:
        groups.setdefault(_place(result), []).append(result)
    tables = []
    for place in sorted(groups):
        benchmark, model, dtype, device, versions, *_ = place
        tables += answer_tables(f"{benchmark} with {model}, {dtype} on {device} ({versions})", groups[place])
    text = "Scores in percent, by greedy generation. One table holds answers to the same prompts by the same model."
    return Section("answers", "Answers", (text,), tables=tuple(tables))


def _place(result: BenchmarkResult) -> tuple[str, ...]:
    """What must be equal before two results of a benchmark stand in one table; prompts are compared part by part."""
    versions = ", ".join(f"{n} {result.versions[n]}" for n in ("torch", "transformers") if n in result.versions)
    facts = result.protocol or {"weights": result.model_fingerprint}
    return result.benchmark, result.model, result.dtype, result.device, versions, digest_of(facts)


def stability_section(data: ReportData) -> Section | None:
    """How plans depend on what they were calibrated on; None where it was not measured."""
    if not data.stability:
        return None
    text = (
        "The same recipe and budget, calibrated on different Stats. Where the KL that a plan's own gradients predict "
        "is far below what those of the other Stats predict for it, the plan fits its sample: more windows, or more "
        "whiten --shrinkage, will help. A text on which the largest KL is far above the smallest asks for calibration "
        "of its kind."
    )
    return Section("stability", "Stability of the calibration", (text,), tables=(stability_table(data.stability),))


def speed_section(data: ReportData) -> Section | None:
    """Times beside the model's own cache; None where nothing was timed."""
    if not data.speed:
        return None
    text = (
        "Medians over repeats, with the smallest and the largest; ratios are to the model's own cache or, of a "
        "geometry alone, to the fastest attention on a bfloat16 cache. Bounds are of one call: its bytes at the rate "
        "at which the reference reads, and what its bytes, unpacking and key matrix take at the rates measured on the "
        "device, each alone. On a CPU only ratios mean anything."
    )
    return Section("speed", "Speed", (text,), tables=tuple(speed_tables(data.speed)))


def measured_memory_section(data: ReportData) -> Section | None:
    """Bytes that caches held and the most that was in use; None where it was not measured."""
    if not data.memory:
        return None
    text = (
        "Live bytes are the storages behind the cache, each counted once; the byte law foretells them. Peaks are of "
        "the process on a CPU and of the device's allocator on a GPU."
    )
    return Section("measured-memory", "Measured memory", (text,), tables=tuple(memory_tables(data.memory)))


def unshown_section(data: ReportData) -> Section | None:
    """What the run holds and the report cannot show, each with its reason; None where everything is shown."""
    found = undrawn(quality_groups(data.evaluations))
    return Section("unshown", "Not in the figures", tuple(f"{reason}." for reason in found)) if found else None


def tokens_section(data: ReportData) -> Section | None:
    """KL token by token; None where it was not recorded."""
    found = marked_texts(data.evaluations)
    if not found:
        return None
    text = (
        "Held-out text as the model read it. A piece is shaded by the KL of the prediction that was made in its place, "
        "in nats, from the least number of its shade on; pointing at it tells the number and its position."
    )
    return Section("tokens", "KL token by token", (text,), marked=tuple(found))


def needles_section(data: ReportData) -> Section | None:
    """Retrieval by context and depth; None where it was not asked."""
    if not data.needles:
        return None
    blocks = []
    for place, group in enumerate(needle_groups(data.needles)):
        samples = "/".join(dict.fromkeys(str(found.samples) for found in group.maps))
        caption = f"Percent of needles found, {samples} at each place: {group.title}."
        blocks.append(FigureBlock((needle_figure(group, f"needles{place}"),), caption, f"needles{place}"))
    text = (
        "A number hidden at a depth of a text, and the question for it. With few needles at each place a miss is much."
    )
    return Section("needles", "Needles", (text,), tuple(blocks), tuple(needle_tables(needle_groups(data.needles))))


def recall_section(data: ReportData) -> Section | None:
    """Second mentions of names and numbers; None where they were not read."""
    if not data.recall:
        return None
    text = (
        "Names and numbers of ordinary text that come again far behind their first mention. The loss is the "
        "log-probability of their tokens with the uncompressed cache minus that with the compressed one, in nats; "
        "recalled are tokens that could not be guessed at the first mention and are known at the second."
    )
    return Section("recall", "Recall", (text,), tables=tuple(recall_tables(data.recall)))
