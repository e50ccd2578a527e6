"""Tiles through the stages: collect, whiten, plans with exact bytes, evaluation, refusals."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aatc_cli.artifacts.plan import Plan
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import CollectSettings, Stats
from aatc_cli.artifacts.transform import Transform
from aatc_cli.config import make_budget
from aatc_cli.core import SIDES
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.core.tile_layout import TileLayout
from aatc_cli.core.tile_sizes import RANKS
from aatc_cli.errors import AatcError, ArtifactError, UsageError
from aatc_cli.evals import find_task
from aatc_cli.evals.call import Call
from aatc_cli.evals.stability.settings import Settings
from aatc_cli.evals.subjects import EvalOptions, Subject
from aatc_cli.methods.recipe import Recipe
from aatc_cli.models.loading import find_model
from aatc_cli.profiles import TextMixture, load_recipe
from aatc_cli.stages.allocate import allocate, check
from aatc_cli.stages.collect import CollectOptions, collect
from aatc_cli.stages.inspecting.plan import inspect_plan
from aatc_cli.stages.reporting.spectrum import plan_view
from aatc_cli.stages.whiten import Wanted, whiten
from aatc_cli.studies import stability as stability_study

RECIPE = load_recipe("loss-aware-tiles")


def changed(**changes: object) -> Recipe:
    return Recipe.model_validate(RECIPE.model_dump(mode="json") | changes)


def gather(run: Run, model: Path, corpus: Path, name: str, seed: int = 0) -> None:
    settings = CollectSettings(samples=4, length=260, rows=64, fisher=4, seed=seed)
    mixture = TextMixture(sources=[str(corpus)], samples=4, length=260)
    collect(run, name, find_model(str(model)), mixture, settings, CollectOptions(batch=2))


@pytest.fixture(scope="module")
def run(tiny_llama: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("tiles") / "run")
    gather(run, tiny_llama, corpus, "stats")
    whiten(run, transform_stats=run.stats(), rate_stats=run.stats(), wanted=Wanted.by(RECIPE))
    return run


@pytest.fixture(scope="module")
def plan(run: Run) -> Plan:
    return allocate(run, RECIPE, [make_budget(bits=4.0)])[0]


def test_checking_a_plan_of_tiles_loads_no_torch(plan: Plan) -> None:
    """A CI job that reproduces the flagship's plan needs what `aatc allocate --check` of any other needs."""
    code = (
        "import sys; from aatc_cli.__main__ import main\n"
        "try: main()\nfinally: assert not {'torch', 'transformers', 'scipy'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", code, "allocate", "--check", str(plan.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "AssertionError" not in done.stderr
    assert done.returncode == 0, done.stderr
    assert "identical" in done.stdout + done.stderr


def test_tiles_are_coded_about_the_mean(run: Run, plan: Plan) -> None:
    """The mean of the Stats, in latents, is what a channel without bits is read as; it is counted once."""
    stats, codecs = Stats.open(run.stats()).layer(1), plan.simulated_codecs("cpu")
    for side in SIDES:
        codec = codecs[1][side].codec
        expected = codec.latents(stats.mean(side).float())
        np.testing.assert_allclose(codec.centre, expected, rtol=1e-4, atol=1e-5)
    assert plan.layout.static_breakdown()["means"] == 2 * 4 * 32 * 2
    with pytest.raises(ValueError, match="goes with tiles"):
        changed(tokens=None)


def test_the_transform_says_what_ranks_cost(run: Run) -> None:
    transform = Transform.open(run.transform(RECIPE.transform_name))
    for layer in range(4):
        for side in SIDES:
            costs = transform.artifact.numbers(f"layers.{layer}.{side}.ranks", (2, RANKS, 32))
            np.testing.assert_allclose(costs.mean(1), 1.0, rtol=1e-6)
            assert costs.std() > 0.01


def test_bytes_planned_are_bytes_of_any_text(plan: Plan) -> None:
    """Four bits a number with scales, classes and padding; not a byte more, and no plane that would still fit."""
    layout = plan.layout
    assert isinstance(layout, TileLayout)
    parts = layout.breakdown(4 + 128 + 64)
    packed = sum(parts[name] for name in ("codes_keys", "codes_values", "padding", "token_scales", "class_tags"))
    limit = 4.0 * 64 * 2 * 32 * 4 / 8
    assert limit - 16 * (16 + 8) / 8 < packed <= limit
    assert parts["class_tags"] == 4 * 2 * 16
    assert layout.bits_packed == pytest.approx(8 * packed / (64 * 2 * 32 * 4))
    assert layout.mean_bits < layout.bits_packed
    assert plan.classes.shares == (0.5, 0.25, 0.25)
    assert layout.bytes(4 + 128 + 640) - layout.bytes(4 + 128 + 576) == packed


def test_a_plan_is_what_is_derived_anew(plan: Plan) -> None:
    assert check(plan) == []
    assert len(plan.class_facts) == 3
    assert plan.class_facts[0].key_cost < plan.class_facts[2].key_cost


def test_inspect_shows_the_classes(plan: Plan) -> None:
    found = inspect_plan(plan, 8192)
    facts = found.data["classes"]
    assert [fact["share"] for fact in facts] == [0.5, 0.25, 0.25]
    assert [fact["tokens"] for fact in facts] == [32, 16, 16]
    means = [fact["share"] * (fact["bits_keys"] + fact["bits_values"]) / 2 for fact in facts]
    assert sum(means) == pytest.approx(plan.layout.mean_bits)
    widths = np.array([[layer[side] for side in SIDES] for layer in plan.class_bits(0)]).reshape(4, 2, 2, 16)
    assert facts[0]["masked"] == pytest.approx(float((widths == 0).all((1, 3)).mean()))
    assert f"{plan.layout.bits_packed:.3f} with all that is packed" in found.tables[0].title
    sites = [site["bits_mean"] for site in found.data["sites"]]
    assert sum(sites) / len(sites) == pytest.approx(plan.layout.mean_bits)
    forecast, kl = found.data["forecast"], sum(plan.predicted.values())
    low, high = forecast["over_forecast"]
    assert forecast["kl"] == pytest.approx(kl)
    assert forecast["kl_other_text"] == pytest.approx([low * kl, high * kl])


def test_a_report_counts_classes_by_their_tokens(plan: Plan) -> None:
    view = plan_view(plan)
    means = [value for side in SIDES for value in view.layer_means(side)]
    assert sum(means) / len(means) == pytest.approx(plan.layout.mean_bits)
    counts = view.histogram()
    for side in SIDES:
        assert sum(counts[side]) == pytest.approx(4 * 32)
    bits = sum(width * count for side in SIDES for width, count in enumerate(counts[side]))
    assert bits / (2 * 4 * 32) == pytest.approx(plan.layout.mean_bits)


def test_a_size_is_met(run: Run) -> None:
    size = 90_000
    found = allocate(run, RECIPE, [make_budget(size=str(size), context=1000)])[0]
    assert 0.95 * size < found.layout.bytes(1000) <= size


def test_evaluation_reads_the_widths_of_every_class(
    run: Run, plan: Plan, tiny_llama: Path, corpus: Path, measured: Callable[..., Any]
) -> None:
    codecs = plan.simulated_codecs("cpu")
    assert isinstance(codecs[0]["k"], TileCodec)
    given = {"length": 260, "limit": 1, "first": 200}
    [one] = measured("kl", run, tiny_llama, [Subject(RECIPE, plan)], text=[corpus], **given)
    assert one.kl_mean is not None
    assert 0 < one.kl_mean < 10
    assert one.bits_packed == pytest.approx(plan.layout.bits_packed)


def test_codecs_of_the_packed_cache_hold_the_classes(plan: Plan) -> None:
    codecs = plan.codecs("cpu")
    assert len(codecs) == 4
    assert all(isinstance(codec, TileCodec) and codec.classes == 3 for layer in codecs for codec in layer.values())


def test_other_windows_are_refused(run: Run) -> None:
    other = changed(window={"sinks": 4, "recent": 192, "flush": 64})
    with pytest.raises(UsageError, match="ranked tokens behind 4, watched for 64 steps"):
        allocate(run, other, [make_budget(bits=3.0)])


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"key_groups": "all"}, "per-head"),
        ({"max_bits": 16}, "up to 8 bits"),
        ({"block": 16}, "free widths"),
        ({"window": {"sinks": 4, "recent": 128, "flush": 16}}, "flushes 64"),
        ({"tokens": {"quotas": [40, 24]}}, "multiples of 16"),
        ({"tokens": {"quotas": [32, 16]}}, "sum to 64"),
    ],
)
def test_recipes_that_cannot_be(changes: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        changed(**changes)


def test_a_layer_may_rank_for_all_heads(run: Run) -> None:
    whole = changed(key_groups="all", value_groups="all", tokens={"quotas": [16, 16, 16, 16], "order": "layer"})
    whiten(run, transform_stats=run.stats(), rate_stats=run.stats(), wanted=Wanted.by(whole))
    found = allocate(run, whole, [make_budget(bits=3.0)])[0]
    assert found.layout.breakdown(4 + 128 + 64)["class_tags"] == 4 * 16
    assert found.layout.bits_packed <= 3.0


def test_the_paper_in_tiles_has_half_of_its_bits_for_keys(run: Run) -> None:
    """Separate budgets: neither side takes from the other, whatever the weights are."""
    paper = load_recipe("paper-tiles")
    whiten(run, transform_stats=run.stats(), rate_stats=run.stats(), wanted=Wanted.by(paper))
    [found] = allocate(run, paper, [make_budget(bits=4.0)])
    assert check(found) == []
    parts = found.layout.breakdown(4 + 128 + 64)
    assert found.layout.bits_packed <= 4.0
    half = (4.0 * 64 * 2 * 32 * 4 / 8 - parts["class_tags"]) / 2
    for side in ("codes_keys", "codes_values"):
        assert 0.6 * half < parts[side] <= half


def test_a_floor_gives_the_lowest_class_more(run: Run, plan: Plan) -> None:
    """A share of the average cost in every class brings the classes together, and bits with them."""
    table = {"quotas": [32, 16, 16], "floor": 0.5}
    [floored] = allocate(run, changed(name="floored", tokens=table), [make_budget(bits=4.0)])
    for with_floor, without in zip(floored.class_facts, plan.class_facts, strict=True):
        assert with_floor.key_cost == pytest.approx(0.5 * without.key_cost + 0.5, rel=1e-6)
    assert floored.bits != plan.bits


def test_old_transforms_are_refused(run: Run, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aatc_cli.artifacts.artifact.Artifact.holds", lambda self, name: False)
    with pytest.raises(ArtifactError, match="does not say what tokens of each rank cost"):
        allocate(run, changed(name="again"), [make_budget(bits=3.0)])


def test_stability_compares_plans_with_classes(run: Run, tiny_llama: Path, corpus: Path, monkeypatch: Any) -> None:
    gather(run, tiny_llama, corpus, "other", seed=1)
    given = {"length": 260, "limit": 1, "first": 200}
    settings = Settings(stats=tuple(str(run.stats(name)) for name in ("stats", "other")), text=(str(corpus),), **given)
    monkeypatch.setattr(stability_study, "load_recipe", lambda name: RECIPE)
    call = Call(run, EvalOptions(), find_model(str(tiny_llama)), recipes=("x",), budgets=(4.0,))
    [result] = stability_study.stability(find_task("stability"), call, settings)
    own = allocate(run, RECIPE, [make_budget(bits=4.0)])[0].manifest.results["predicted"]
    # the plan's own forecast shrinks the metric, this one does not
    assert result.rows[0].predicted == pytest.approx(sum(own.values()), rel=0.3)


def test_the_lowest_class_has_its_least_bits(run: Run, plan: Plan) -> None:
    """So many bits of each of its numbers, with scales and padding, and not a byte more in the whole."""
    table = {"quotas": [32, 16, 16], "lowest_bits": 3.8}
    [floored] = allocate(run, changed(name="lowest", tokens=table), [make_budget(bits=4.0)])
    assert _lowest_bits(plan) < 3.8 <= _lowest_bits(floored)
    assert floored.layout.bits_packed <= 4.0
    assert check(floored) == []
    with pytest.raises(AatcError, match="does not pay for the floor"):
        allocate(run, changed(name="too-high", tokens=table), [make_budget(bits=1.5)])


def _lowest_bits(plan: Plan) -> float:
    """Packed bits of a number of class 0, counted from its widths."""
    total = 0
    for layer in plan.simulated_codecs("cpu"):
        for side in SIDES:
            for widths in layer[side].bits[0].view(2, -1).tolist():
                twos, ones = sum(w // 2 for w in widths), sum(w % 2 for w in widths)
                total += 16 * (2 * -(-twos // 16) + -(-ones // 16)) + 8 * any(widths)
    return total / (4 * 2 * 32)
