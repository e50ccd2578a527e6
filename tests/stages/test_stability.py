"""aatc eval stability: every row against the stages run by hand, and what one Stats says of another's plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from aatc_cli.artifacts.evaluation import read_measurement
from aatc_cli.artifacts.plan import Plan
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import CollectSettings, Stats
from aatc_cli.config import Budget, Window, make_budget
from aatc_cli.core import SIDES
from aatc_cli.core.curves import DISTORTION
from aatc_cli.errors import ArtifactError, UsageError
from aatc_cli.evals import find_task
from aatc_cli.evals.call import Call
from aatc_cli.evals.stability.result import Result as StabilityResult
from aatc_cli.evals.stability.result import spread
from aatc_cli.evals.stability.settings import Settings
from aatc_cli.evals.subjects import EvalOptions, Subject
from aatc_cli.methods.recipe import Recipe
from aatc_cli.models.loading import find_model
from aatc_cli.profiles import TextMixture, load_recipe
from aatc_cli.stages.collect import CollectOptions, collect
from aatc_cli.stages.report import make_report
from aatc_cli.studies import stability as stability_study
from aatc_cli.studies.stability import stability

ASKED = {"length": 48, "limit": 2, "first": 16}
BUDGET = make_budget(bits=2.5)
WINDOW = Window(sinks=2, recent=8, flush=4)


def recipe(name: str = "loss-aware", **changes: object) -> Recipe:
    return load_recipe(name).model_copy(update={"window": WINDOW, **changes})


@pytest.fixture(scope="module")
def run(tiny_llama: Path, corpus: Path, calibration_texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with Stats of two draws and of another text; the last has no gradients."""
    run = Run(tmp_path_factory.mktemp("stability") / "run")
    for name, text, seed, fisher in (("a", corpus, 0, 8), ("b", corpus, 1, 8), ("c", calibration_texts, 0, 0)):
        settings = CollectSettings(samples=8, length=64, rows=256, seed=seed, fisher=fisher, window=WINDOW)
        mixture = TextMixture(sources=[str(text)], samples=8, length=64)
        collect(run, name, find_model(str(tiny_llama)), mixture, settings, CollectOptions())
    return run


@pytest.fixture(scope="module")
def calibration_texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "numbers.txt"
    path.write_text(" ".join(str(i * i * i % 9973) for i in range(2000)))
    return path


def compare(
    run: Run, model: Path, names: str, texts: list[str], chosen: Recipe, budget: Budget = BUDGET
) -> StabilityResult:
    """A comparison of ``chosen`` as it is given, without a file of its own."""
    settings = Settings(stats=tuple(str(run.stats(name)) for name in names), text=tuple(texts), **ASKED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stability_study, "load_recipe", lambda name: chosen)
        call = Call(run, EvalOptions(force=True), find_model(str(model)), recipes=("x",), budgets=(budget.value,))
        [result] = stability(find_task("stability"), call, settings)
    return result


def test_rows_are_the_stages_by_hand(
    measured: Any, run: Run, tiny_llama: Path, corpus: Path, calibration_texts: Path
) -> None:
    texts = [str(corpus), str(calibration_texts)]
    result = compare(run, tiny_llama, "ab", texts, recipe())
    assert [(row.stats, row.text) for row in result.rows] == [
        ("a", "corpus.txt"),
        ("b", "corpus.txt"),
        ("a", "numbers.txt"),
        ("b", "numbers.txt"),
    ]
    for name in "ab":
        plan = Plan.open(run.root / "stability" / name / "plans" / "loss-aware-2.5")
        subject = Subject(plan.recipe, plan)
        found = measured("kl", Run(run.root / "stability" / name), tiny_llama, [subject], text=texts, **ASKED)
        rows = [row for row in result.rows if row.stats == name]
        assert [row.kl_mean for row in rows] == [evaluation.kl_mean for evaluation in found]
        assert [row.bits for row in rows] == [plan.mean_bits] * 2
    assert rows[0].calibration == ["corpus.txt"]
    assert result.windows == [2, 2]
    first = [row.kl_mean for row in result.rows[:2]]
    assert result.kl_spread["corpus.txt"] == max(first) / min(first)
    assert read_measurement(run.evals / result.file_name, StabilityResult) == result
    assert result.file_name.startswith("stability.loss-aware-2.5.a-b.")


@pytest.mark.parametrize(("name", "bits"), [("kivi", 2), ("per-token", 2), ("fp8", 8)])
def test_codecs_see_the_coordinates_of_their_recipe(
    measured: Any, name: str, bits: int, run: Run, tiny_llama: Path, corpus: Path
) -> None:
    """Recipes that code the rotated cache are scored on the rotated cache, as eval does it."""
    chosen = load_recipe(name).model_copy(update={"window": Window(sinks=2, recent=32, flush=32)})
    assert chosen.coordinates == "post-rope"
    [first, _] = compare(run, tiny_llama, "ab", [str(corpus)], chosen, make_budget(bits=bits)).rows
    plan = Plan.open(run.root / "stability" / "a" / "plans" / f"{name}-{bits}")
    place, subject = Run(run.root / "stability" / "a"), Subject(plan.recipe, plan)
    [found] = measured("kl", place, tiny_llama, [subject], text=[corpus], **ASKED)
    assert first.kl_mean == found.kl_mean


def test_other_gradients_price_the_same_noise(run: Run, tiny_llama: Path, corpus: Path) -> None:
    """tr(decode^T diag(noise) decode M) / 2 with the M of each Stats; a plan looks best to its own gradients."""
    result = compare(run, tiny_llama, "ab", [str(corpus)], recipe())
    for row, other in zip(result.rows, "ba", strict=True):
        plan = Plan.open(run.root / "stability" / row.stats / "plans" / "loss-aware-2.5")
        transform, totals = plan.transform(), []
        for name in (row.stats, other):
            stats, total = Stats.open(run.stats(name)), 0.0
            for layer in range(4):
                held = stats.layer(layer)
                for side in SIDES:
                    [decode] = transform.artifact.tensor(f"layers.{layer}.{side}.decode").double()
                    variance = transform.artifact.tensor(f"layers.{layer}.{side}.variance")
                    noise = variance * torch.tensor(DISTORTION)[torch.tensor(plan.bits[layer][side])]
                    metric = (held.k_fisher if side == "k" else held.v_fisher) / (8 * (64 - 10))
                    total += 0.5 * float(torch.trace(decode.T @ torch.diag(noise) @ decode @ metric))
            totals.append(total)
        assert [row.predicted, row.predicted_elsewhere] == pytest.approx(totals, rel=1e-6)
        assert totals[0] < totals[1]


def test_without_gradients_there_is_no_prediction(run: Run, tiny_llama: Path, corpus: Path) -> None:
    result = compare(run, tiny_llama, "ac", [str(corpus)], recipe("var-only", protect=load_recipe("uniform").protect))
    assert [(row.predicted is None, row.predicted_elsewhere is None) for row in result.rows] == [
        (False, True),
        (True, False),
    ]
    with pytest.raises(ArtifactError, match="holds no loss gradients"):
        compare(run, tiny_llama, "ac", [str(corpus)], recipe())


def test_one_stats_is_no_comparison(run: Run, tiny_llama: Path, corpus: Path) -> None:
    for names in ("", "a", "aa"):
        with pytest.raises(UsageError, match="two or more Stats of different names"):
            compare(run, tiny_llama, names, [str(corpus)], recipe())
    with pytest.raises(UsageError, match="calibrated on nothing"):
        compare(run, tiny_llama, "ab", [str(corpus)], load_recipe("fp16"))


def test_the_report_has_the_table(run: Run, tiny_llama: Path, corpus: Path) -> None:
    result = compare(run, tiny_llama, "ab", [str(corpus)], recipe())
    files = make_report(run)
    section = files.markdown.read_text("utf-8").partition("## Stability of the calibration")[2].partition("\n## ")[0]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("|")]
    found = {line[1]: line for line in lines[2:] if line[0] == result.method}
    for row in result.rows:
        assert found[row.stats][4] == f"{row.kl_mean:.3g} ± {row.kl_stderr:.2g}"
        assert found[row.stats][6] == f"{row.predicted_elsewhere:.3g}"
    told = json.loads(files.json.read_text("utf-8"))["stability"]
    assert result.model_dump(mode="json") in told


def test_spread_of_nothing() -> None:
    assert spread([]) == {}
