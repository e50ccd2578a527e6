"""What stands together in a report: one protocol per table, with what keeps others apart; nothing left out silently."""

from __future__ import annotations

import re

import pytest

from aatc_cli.artifacts.evaluation import Evaluation, write_evaluation
from aatc_cli.artifacts.run import Run
from aatc_cli.evals.answers.result import BenchmarkResult, BenchmarkRow
from aatc_cli.evals.memory.result import MemoryRow
from aatc_cli.evals.memory.result import Result as MemoryResult
from aatc_cli.evals.needles.result import NeedleCell
from aatc_cli.evals.needles.result import Result as NeedleResult
from aatc_cli.evals.stability.result import Result as StabilityResult
from aatc_cli.evals.stability.result import StabilityRow
from aatc_cli.report.data.protocols import Protocol, apart_notes
from aatc_cli.report.series.quality import quality_groups
from aatc_cli.report.tables.quality import quality_table
from aatc_cli.report.tables.results import stability_table
from aatc_cli.stages.report import make_report

BASE = {"model_fingerprint": "a" * 64}


def evaluation(recipe: str, bits: float | None, kl: float, **changes: object) -> Evaluation:
    values: dict[str, object] = {
        "task": "kl",
        "recipe": recipe,
        "budget": None if bits is None else f"{bits:g}",
        "model": "tiny/model",
        "bits": bits or 16.0,
        "bits_packed": 16.0 if bits is None else bits + 0.12,
        "bits_at_context": 16.0 if bits is None else bits + 0.87,
        "ratio": 4.0,
        "context": 1024,
        "text": "wiki",
        "text_sha256": "f" * 64,
        "windows": 6,
        "length": 1024,
        "stride": 1024,
        "first_position": 256,
        "tokens_scored": 4608,
        "sinks": 4,
        "recent": 128,
        "flush": 16,
        "kl_mean": kl,
        "kl_stderr": kl / 20,
        "seconds": 1.5,
        "device": "cpu",
        "dtype": "float32",
        "versions": {"torch": "2.13.0", "transformers": "5.24.0"},
    }
    return Evaluation.model_validate(values | changes)


def pair(**changes: object) -> tuple[Evaluation, Evaluation]:
    return evaluation("paper", 2.0, 0.1, **BASE), evaluation("var-only", 2.0, 0.2, **(BASE | changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_fingerprint": "b" * 64}, "weights of the model bbbbbbbbbbbb here and aaaaaaaaaaaa there"),
        ({"model": "other/model"}, "model other/model here and tiny/model there"),
        ({"text_sha256": "e" * 64}, "sha256 of the text eeeeeeeeeeee here and ffffffffffff there"),
        ({"windows": 5}, "windows 5 here and 6 there"),
        ({"length": 512}, "length 512 here and 1024 there"),
        ({"stride": 512}, "stride 512 here and 1024 there"),
        ({"first_position": 0}, "first scored position 0 here and 256 there"),
        ({"dtype": "bfloat16"}, "dtype bfloat16 here and float32 there"),
        ({"device": "NVIDIA H100"}, "device NVIDIA H100 here and cpu there"),
        ({"versions": {"torch": "2.14.0", "transformers": "5.24.0"}}, "torch 2.14.0 here and 2.13.0 there"),
        ({"versions": {"torch": "2.13.0", "transformers": "5.25.0"}}, "transformers 5.25.0 here and 5.24.0 there"),
    ],
)
def test_another_protocol_is_another_table_and_says_why(changes: dict[str, object], said: str) -> None:
    a, b = pair(**changes)
    assert len(quality_groups([a, a.model_copy(update={"recipe": "kivi"})])) == 1
    groups = quality_groups([a, b])
    assert len(groups) == 2
    assert Protocol.of(b).differences(Protocol.of(a)) == [said]
    notes = apart_notes([Protocol.of(a), Protocol.of(b)])
    assert notes == [(), (f"Not to be compared with the table above on {a.text}: {said}.",)]
    assert quality_table(groups[1], (), notes[1]).notes[0] == notes[1][0]
    # no table of the two has a best: it would be the best of what was not measured alike
    assert [row for group in groups for row in group.best_rows()] == []


def test_differences_are_paired_where_windows_are_shared() -> None:
    """The text is hard in some windows: between windows KL differs more than between recipes."""
    hard = [0.01, 0.05, 0.2, 0.8, 0.3, 0.1]
    ours = evaluation("paper", 2.0, sum(hard) / 6, kl_windows=hard, kl_stderr=0.1)
    more = [value + gap for value, gap in zip(hard, (0.001, 0.0012, 0.0009, 0.0011, 0.001, 0.0008), strict=True)]
    theirs = evaluation("var-only", 2.0, sum(more) / 6, kl_windows=more, kl_stderr=0.1)
    [group] = quality_groups([ours, theirs])
    assert group.indistinct() == []
    table = quality_table(group, ())
    behind = table.columns.index("KL above the best")
    assert [row[behind].text for row in table.rows] == ["-", "0.00100 ± 5.77e-5"]
    assert any("window by window." in note for note in table.notes)
    # without their windows the two cannot be told apart
    alone = [e.model_copy(update={"kl_windows": None}) for e in (ours, theirs)]
    assert quality_groups(alone)[0].indistinct() != []


def memory_result(plan: str | None = None) -> MemoryResult:
    row = MemoryRow(
        context=4096,
        batch=1,
        bytes_live=123_000,
        bytes_predicted=122_000,
        bytes_fp16=700_000,
        ratio=5.69,
        base_bytes=None,
        peak_bytes=9_000_000,
    )
    origin = {"recipe": "paper", "budget": "2", "model": "tiny/model", "plan": plan, "bits": 2.0, "bits_packed": 2.12}
    place = {"seconds": 1.0, "device": "cpu", "dtype": "float32", "versions": {"torch": "2.13.0"}}
    return MemoryResult.model_validate({**origin, **place, "synthetic": False, "rows": [row]})


def answers(recipe: str, budget: str | None, scores: list[float], **changes: object) -> BenchmarkResult:
    rows = [
        BenchmarkRow(
            subtask=name,
            context=4096,
            metric="all",
            score=sum(scores) / len(scores),
            stderr=0.0,
            samples=len(scores),
            scores=scores,
            prompts_sha256=name,
            seconds=1.0,
        )
        for name in ("vt", "cwe")
    ]
    origin = {"recipe": recipe, "budget": budget, "model": "tiny/model", "plan": budget, "bits": float(budget or 16)}
    place = {"seconds": 1.0, "device": "cpu", "dtype": "float32", "versions": {"torch": "2.13.0"}}
    return BenchmarkResult.model_validate({**origin, **place, "benchmark": "ruler", "rows": rows} | changes)


def test_every_evaluation_of_the_run_is_in_the_report(tmp_path) -> None:
    run = Run(tmp_path)
    write_evaluation(run.evals, evaluation("paper", 2.0, 0.1))
    write_evaluation(run.evals, memory_result())
    for result in (answers("fp16", None, [1.0, 1.0]), answers("paper", "2", [1.0, 0.0])):
        write_evaluation(run.evals, result)
    old = evaluation("kivi", 3.0, 0.3, bits_packed=None)
    write_evaluation(run.evals, old)
    files = make_report(run)
    text = files.markdown.read_text("utf-8")
    assert re.search(r"\| paper-2 \| 2.12 \| 4096 \| 1 \| 123 kB \| 122 kB \| 700 kB \| 5.69x \| 9.00 MB \|", text)
    # two hits of two are not certainty
    assert "| fp16 | - | 100 (34.2 to 100) | 100 (34.2 to 100) | 100 (53.5 to 100) |" in text
    assert "kivi-3 on wiki" in text
    assert "its file is older than packed bits; run aatc eval again." in text
    titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert titles[-4:] == ["Answers", "Measured memory", "Not in the figures", "How to read this report"]
    assert '"bytes_live": 123000' in files.json.read_text("utf-8")


def test_memory_and_answers_alone_make_a_report(tmp_path) -> None:
    run = Run(tmp_path)
    write_evaluation(run.evals, memory_result())
    assert "Model: tiny/model" in make_report(run).markdown.read_text("utf-8")


def test_answers_of_another_model_or_version_have_tables_of_their_own(tmp_path) -> None:
    run = Run(tmp_path)
    write_evaluation(run.evals, answers("fp16", None, [1.0, 0.0]))
    write_evaluation(run.evals, answers("paper", "2", [1.0, 1.0], model_fingerprint="b"))
    write_evaluation(run.evals, answers("paper", "3", [1.0, 1.0], versions={"torch": "2.14.0"}))
    text = make_report(run).markdown.read_text("utf-8")
    assert len(re.findall(r"^### ruler with tiny/model", text, re.MULTILINE)) == 3


def needles(recipe: str, budget: str | None, scores: dict[tuple[int, int], float]) -> NeedleResult:
    cells = [
        NeedleCell(
            context=context, depth=depth, samples=4, score=score, low=0.0, high=1.0, wanted=["1"] * 4, answers=["1"] * 4
        )
        for (context, depth), score in scores.items()
    ]
    origin = {"recipe": recipe, "budget": budget, "model": "tiny/model", "plan": budget, "bits": float(budget or 16)}
    place = {"seconds": 1.0, "device": "cpu", "dtype": "float32", "versions": {"torch": "2.13.0"}}
    return NeedleResult.model_validate({**origin, **place, "cells": cells})


def test_needles_are_a_heat_map_and_a_table(tmp_path) -> None:
    run = Run(tmp_path)
    grid = [(context, depth) for context in (1024, 2048) for depth in (0, 50, 100)]
    write_evaluation(run.evals, needles("fp16", None, dict.fromkeys(grid, 1.0)))
    write_evaluation(run.evals, needles("paper", "2", dict.fromkeys(grid, 1.0) | {(2048, 50): 0.25}))
    files = make_report(run)
    text, page = files.markdown.read_text("utf-8"), files.html.read_text("utf-8")
    # 12 of 12, and 9 of 12, with Wilson's interval
    assert "| fp16 | - | 100 (75.8 to 100) | 100 (75.8 to 100) |" in text
    assert "| paper-2 | - | 100 (75.8 to 100) | 75.0 (46.8 to 91.1) |" in text
    figure = page[page.index('id="needles0-title"') : page.index("</svg>", page.index('id="needles0-title"'))]
    shown = re.findall(r">(\d+)</text>", figure)
    assert (shown.count("25"), shown.count("0") - 2) == (1, 0)
    assert figure.count("var(--m5, ") + figure.count("var(--m6, ") == 1


def test_plans_of_several_stats_are_paired_by_windows() -> None:
    hard = [0.01, 0.2, 0.8, 0.1]

    def stats(name: str, kl: list[float]) -> StabilityRow:
        values = {"stats": name, "stats_digest": name, "calibration": [], "text": "t", "text_sha256": "0", "bits": 2.0}
        values |= {"kl_mean": sum(kl) / 4, "kl_stderr": 0.18, "kl_windows": kl}
        return StabilityRow.model_validate({**values, "predicted": None, "predicted_elsewhere": None})

    rows = [
        stats("a", hard),
        stats("b", [value + gap for value, gap in zip(hard, (0.01, 0.012, 0.009, 0.011), strict=True)]),
    ]
    origin = {"recipe": "paper", "budget": "2", "model": "m", "bits": 2.0, "length": 8, "first_position": 0}
    place = {"seconds": 1.0, "device": "cpu", "dtype": "float32", "versions": {}, "windows": [4], "kl_spread": {}}
    table = stability_table([StabilityResult.model_validate({**origin, **place, "rows": rows})])
    assert table.columns[-1] == "above the lowest"
    assert [row[-1].text for row in table.rows] == ["-", "0.0105 ± 0.000645"]
