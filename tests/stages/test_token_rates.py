"""Token rates through the stages: what collect counts against the model's own attention weights, plans, refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from aatc_cli.artifacts.plan import Plan
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import CollectSettings, Stats
from aatc_cli.config import Window, make_budget
from aatc_cli.core import SIDES
from aatc_cli.core.layout import packed_tokens
from aatc_cli.core.received import bin_edges
from aatc_cli.core.stats import LayerStats
from aatc_cli.errors import AatcError, ArtifactError, UsageError
from aatc_cli.evals import find_task
from aatc_cli.evals.call import Call
from aatc_cli.evals.stability.settings import Settings
from aatc_cli.evals.subjects import EvalOptions, Subject
from aatc_cli.methods.recipe import Recipe
from aatc_cli.models.loading import find_model, load_model, load_tokenizer
from aatc_cli.profiles import TextMixture, load_recipe
from aatc_cli.runtime.attach import attach_codecs
from aatc_cli.stages.allocate import allocate, check
from aatc_cli.stages.collect import CollectOptions, collect
from aatc_cli.stages.inspecting.plan import inspect_plan
from aatc_cli.stages.whiten import Wanted, whiten
from aatc_cli.studies import stability as stability_study
from aatc_cli.text.windows import draw_windows

WINDOW = Window(sinks=2, recent=8, flush=4)
KL = {"length": 48, "limit": 2, "first": 16}


def recipe(**changes: object) -> Recipe:
    base = load_recipe("loss-aware-tokens").model_dump(mode="json")
    shares = {"tokens": {"shares": [0.4, 0.3, 0.3]}, "window": WINDOW.model_dump(mode="json")}
    return Recipe.model_validate(base | shares | changes)


def gather(run: Run, model: Path, corpus: Path, name: str, batch: int = 1, seed: int = 0, **options) -> None:
    settings = CollectSettings(samples=8, length=64, rows=256, fisher=8, window=WINDOW, seed=seed)
    mixture = TextMixture(sources=[str(corpus)], samples=8, length=64)
    collect(run, name, find_model(str(model)), mixture, settings, CollectOptions(batch=batch, **options))


@pytest.fixture(scope="module")
def run(tiny_llama: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("rates") / "run")
    gather(run, tiny_llama, corpus, "stats")
    whiten(run, transform_stats=run.stats(), rate_stats=run.stats(), wanted=Wanted(transform="metric"))
    return run


@pytest.fixture(scope="module")
def plan(run: Run) -> Plan:
    return allocate(run, recipe(), [make_budget(bits=2.0)])[0]


@torch.no_grad()
def received_by_hand(model: Path, corpus: Path) -> np.ndarray:
    """r of every packed token of the calibration windows by layer, from the weights that transformers returns."""
    source = find_model(str(model))
    drawn = draw_windows([str(corpus)], load_tokenizer(source).encode, samples=8, length=64, seed=0, bos=None)
    plain = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").eval()
    found: list[list[float]] = [[] for _ in range(4)]
    for window in drawn.tokens:
        for layer, weights in enumerate(plain(window[None], output_attentions=True).attentions):
            for i in range(2, 2 + packed_tokens(64, WINDOW)):
                found[layer].append(sum(float((weights[0, :, t, i] ** 2).sum()) for t in range(i + 2, i + 5)))
    return np.array(found)


def test_collect_counts_what_tokens_receive(run: Run, tiny_llama: Path, corpus: Path) -> None:
    """w - f = 4: queries 2 to 4 tokens on. Tokens close to an edge of the grid may fall to either side."""
    received = received_by_hand(tiny_llama, corpus)
    for layer, row in enumerate(received):
        stats = Stats.open(run.stats()).layer(layer)
        assert stats.received.sum() == row.size == 8 * packed_tokens(64, WINDOW)
        below = stats.received.cumsum(0)[:-1].numpy()
        edges = bin_edges().numpy()
        least, most = ((row * scale < edges[:, None]).sum(1) for scale in (1 + 1e-4, 1 - 1e-4))
        assert (least <= below).all()
        assert (below <= most).all()
        assert np.abs(most - least).sum() <= 4


def test_probes_are_of_the_gradients(run: Run) -> None:
    """Over all bins they are products with the Fisher sums: every token with a gradient is in some bin."""
    from aatc_cli.core.received import probes

    stats = Stats.open(run.stats()).layer(1)
    for fisher, sums in ((stats.k_fisher, stats.k_probes), (stats.v_fisher, stats.v_probes)):
        assert torch.allclose(sums.sum(0), fisher @ probes(32), rtol=1e-4, atol=1e-6 * float(fisher.abs().max()))
        assert bool((sums[stats.received == 0] == 0).all())


@pytest.mark.parametrize("options", [{"batch": 3}, {"recompute": True}], ids=["batches", "recomputed"])
def test_batches_and_recomputed_layers_count_the_same(run: Run, tiny_llama, corpus, tmp_path, options) -> None:
    other = Run(tmp_path / "run")
    gather(other, tiny_llama, corpus, "stats", **options)
    for layer in range(4):
        a, b = (Stats.open(r.stats()).layer(layer) for r in (run, other))
        assert torch.equal(a.received, b.received)
        assert torch.allclose(a.k_probes, b.k_probes, rtol=1e-3, atol=1e-5 * float(a.k_probes.abs().max()))


def test_plan_has_classes_at_the_mean_budget(run: Run, plan: Plan) -> None:
    assert plan.classes is not None
    assert plan.classes.shares.shape == (4, 3)
    assert plan.classes.thresholds.shape == (4, 2)
    by_hand = sum(
        plan.classes.shares[layer, k] * sum(plan.class_bits(k)[layer][side])
        for layer in range(4)
        for k in range(3)
        for side in SIDES
    ) / (2 * 4 * 32)
    assert plan.mean_bits == pytest.approx(by_hand)
    assert 1.98 < by_hand <= 2.0
    means = [sum(sum(layer[side]) for layer in plan.class_bits(k) for side in SIDES) for k in range(3)]
    assert means[0] < means[1] < means[2]
    codecs = plan.simulated_codecs("cpu")
    for layer, sites in enumerate(codecs):
        for side in SIDES:
            assert [c.bits.tolist() for c in sites[side].codecs] == [plan.class_bits(k)[layer][side] for k in range(3)]


def test_plan_is_derived_again(run: Run, plan: Plan, aatc) -> None:
    assert check(plan) == []
    assert allocate(run, recipe(), [make_budget(bits=2.0)])[0].digest == plan.digest
    outcome = aatc("allocate", "--check", plan.path)
    assert outcome.code == 0
    assert "identical" in outcome.out + outcome.err


def test_a_ratio_is_met_by_the_bytes_of_all_streams(run: Run) -> None:
    [made] = allocate(run, recipe(name="rates-ratio"), [make_budget(ratio=4.0, context=2048)])
    assert 4.0 <= made.layout.ratio(2048) < 4.1
    assert made.layout.breakdown(2048)["class_tags"] > 0


def test_evaluation_is_at_the_shares_it_found(
    measured: Any, run: Run, plan: Plan, tiny_llama: Path, corpus: Path
) -> None:
    [found] = measured("kl", run, tiny_llama, [Subject(plan.recipe, plan)], text=[corpus], **KL)
    assert found.kl_mean is not None
    assert found.kl_mean > 0
    assert found.class_shares is not None
    assert math.fsum(found.class_shares) == pytest.approx(1.0)
    widths = [sum(sum(layer[side]) for layer in plan.class_bits(k) for side in SIDES) / 256 for k in range(3)]
    assert min(widths) < found.bits < max(widths)
    assert found.bits != plan.mean_bits
    assert found.bits_at_context == pytest.approx(16 / found.ratio)
    again = measured("kl", run, tiny_llama, [Subject(plan.recipe, plan)], text=[corpus], **KL)
    assert again == [found]


def test_inspect_shows_classes_thresholds_and_shares(plan: Plan, aatc) -> None:
    facts = inspect_plan(plan, 8192).data["classes"]
    assert [fact["thresholds"] is None for fact in facts] == [True, False, False]
    assert [fact["shares"][2] for fact in facts] == plan.classes.shares[2].tolist()
    assert facts[2]["thresholds"] == plan.classes.thresholds[:, 1].tolist()
    outcome = aatc("inspect", plan.path, "--json")
    assert json.loads(outcome.out)["classes"] == facts
    assert "token classes" in aatc("inspect", plan.path).out


def test_packed_cache_and_its_tasks_refuse(run: Run, plan: Plan, tiny_llama: Path, corpus: Path, refuses) -> None:
    transform = plan.transform()
    with pytest.raises(AatcError, match="keeps tokens at 3 rates, which the packed cache does not hold yet"):
        plan.codecs("cpu", transform)
    model = load_model(find_model(str(tiny_llama)))
    with (
        pytest.raises(AatcError, match="a RatedCodec has no codes to pack"),
        attach_codecs(model, plan.simulated_codecs("cpu"), WINDOW),
    ):
        pass
    for task, says in (("memory", "3 rates"), ("speed", "3 rates"), ("distortion", "several rates")):
        refuses(
            "eval",
            task,
            "--run",
            run.root,
            "--model",
            tiny_llama,
            "--plan",
            plan.path,
            *(("--context", "64") if task in ("memory", "speed") else ("--text", corpus, "--length", "48")),
            says=(says,),
            folder=run.root / "plans",
            code=2 if task == "distortion" else 1,
        )


def test_stats_without_what_tokens_received_are_refused(tiny_llama, corpus, tmp_path, monkeypatch) -> None:
    """As they were before it was collected: the sums alone."""
    monkeypatch.setattr(LayerStats, "add_received", lambda *arguments: None)
    old = Run(tmp_path / "run")
    gather(old, tiny_llama, corpus, "stats")
    whiten(old, transform_stats=old.stats(), rate_stats=old.stats(), wanted=Wanted(transform="metric"))
    with pytest.raises(ArtifactError, match="does not say what attention tokens received"):
        allocate(old, recipe(), [make_budget(bits=2.0)])


def test_another_window_than_the_calibration_had_is_refused(run: Run) -> None:
    with pytest.raises(UsageError, match="watches tokens for 6 to 12 steps, the calibration watched them for 2 to 4"):
        allocate(run, recipe(name="wide", window={"sinks": 2, "recent": 16, "flush": 4}), [make_budget(bits=2.0)])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokens": {"shares": [0.5, 0.4]}}, "sum to 1"),
        ({"tokens": {"shares": [1.0]}}, "at least 2"),
        ({"allocator": "per-layer", "pool": "separate"}, 'tokens "received" goes with allocator "waterfill"'),
        ({"protect": {"layers": 1}}, "no protected layers"),
    ],
)
def test_recipes_that_do_not_fit_together(changes, says) -> None:
    with pytest.raises(ValueError, match=says):
        recipe(**changes)


def test_stability_compares_plans_with_classes(run: Run, tiny_llama: Path, corpus: Path, monkeypatch: Any) -> None:
    gather(run, tiny_llama, corpus, "other", seed=1)
    settings = Settings(stats=tuple(str(run.stats(name)) for name in ("stats", "other")), text=(str(corpus),), **KL)
    monkeypatch.setattr(stability_study, "load_recipe", lambda name: recipe())
    call = Call(run, EvalOptions(), find_model(str(tiny_llama)), recipes=("x",), budgets=(2.0,))
    [result] = stability_study.stability(find_task("stability"), call, settings)
    own = allocate(run, recipe(), [make_budget(bits=2.0)])[0].manifest.results["predicted"]
    # the plan's own forecast shrinks the metric, this one does not
    assert result.rows[0].predicted == pytest.approx(sum(own.values()), rel=0.3)
    assert result.rows[0].predicted < result.rows[0].predicted_elsewhere
