"""Published methods from Stats to evaluations, on a tiny model: every packaged recipe that is simulated."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch

from aatc_cli.artifacts.plan import Plan
from aatc_cli.artifacts.run import Run
from aatc_cli.config import make_budget
from aatc_cli.errors import AatcError, ArtifactError, UsageError
from aatc_cli.evals.subjects import Subject, subject_codecs
from aatc_cli.profiles import available, load_recipe
from aatc_cli.stages.allocate import allocate, check
from aatc_cli.stages.whiten import Wanted, whiten

# a coarse budget and a fine one of each
BUDGETS = {
    "kivi": (2, 6),
    "kvquant": (1, 4),
    "squat": (2, 6),
    "palu": (3, 4),
    "kvtc": (2, 6),
    "kvtc-global": (2, 6),
    "oscar": (2, 6),
    "ratequant": (2, 6),
    "turboquant": (2, 6),
    "per-token": (2, 6),
    "per-channel": (2, 6),
    "fp8": (8,),
    "kvarn": (2, 6),
    "kvarn-k4v2": (3, 6),
    "block-gtq": (2, 6),
    "mixkvq": (2, 6),
    "eoptshrinkq": (2, 6),
    "a2ats": (1, 4),
    "commvq": (1, 2),
    "eigen-attention": (8, 14),
    "eigen-attention-4bit": (2, 3.9),
    "xkv": (6, 12),
    "xkv-4bit": (2, 3),
    "minicache": (2, 6),
}
LIBRARIES = {"quanto", "hqq"}
# values of 2 bits at every budget: of 32 normal numbers the range is 4.1 of their deviation, a third of it a step, and
# a step over the root of 12 the error, 0.395
COARSE = {("mixkvq", "v"): 0.45}


@pytest.fixture(scope="module")
def run(tiny_llama, with_gradients, tmp_path_factory) -> Run:
    """A run with gradients and every transform that the recipes ask for."""
    found = with_gradients(tmp_path_factory.mktemp("methods"), tiny_llama)
    for name in BUDGETS:
        recipe = load_recipe(name)
        if not found.transform(recipe.transform_name).exists():
            whiten(found, transform_stats=found.stats(), rate_stats=found.stats(), wanted=Wanted.by(recipe))
    return found


def test_every_simulated_recipe_is_tried():
    recipes = [load_recipe(name) for name in available("recipes")]
    # those with a press: tests/stages/test_pressed_plans.py; of stored caches: tests/stages/test_stored.py
    live = [recipe for recipe in recipes if not recipe.pressed and not recipe.choices.prediction.predicts]
    simulated = {recipe.name for recipe in live if not recipe.packed} - {"fp16"}
    assert simulated == set(BUDGETS) | LIBRARIES


@pytest.mark.parametrize("name", BUDGETS)
def test_from_plan_to_divergence(measured, run, name, tiny_llama, corpus):
    recipe = load_recipe(name)
    plans = allocate(run, recipe, [make_budget(bits=float(bits)) for bits in BUDGETS[name]])
    subjects = [Subject(recipe, plan) for plan in plans]
    for plan in plans:
        assert check(plan) == []
        assert plan.manifest.results["layout"]["bytes_total"] == plan.layout.bytes(8192)
        with pytest.raises(AatcError, match=f"recipe {name} has no packed cache"):
            plan.codecs("cpu")
    found = measured("kl", run, tiny_llama, subjects, text=[corpus], length=224, limit=1, first=160)
    divergences = [evaluation.kl_mean for evaluation in found]
    assert all(value is not None and 0 < value < 5 for value in divergences)
    assert divergences == sorted(divergences, reverse=True)
    assert [evaluation.bits_at_context for evaluation in found] == [plan.layout.bits_at(224) for plan in plans]


def test_plans_stay_within_their_budgets(run):
    for name, bits in (("kvtc", 2.0), ("kvtc", 2.7), ("kvtc-global", 2.0), ("ratequant", 2.6)):
        plan = allocate(run, load_recipe(name), [make_budget(bits=bits)])[0]
        spent = sum(sum(layer[side]) for layer in plan.bits for side in ("k", "v"))
        blocks = sum(sum(layer[side]) for layer in plan.starts or [] for side in ("k", "v"))
        assert 0.6 * bits * 4 * 64 < spent + 16 * blocks <= bits * 4 * 64


def test_budgets_by_ratio(run):
    plan = allocate(run, load_recipe("kivi"), [make_budget(ratio=2.9, context=4096)])[0]
    assert set(plan.bits[0]["k"]) == {4}
    assert plan.layout.ratio(4096) >= 2.9
    blocks = allocate(run, load_recipe("kvtc"), [make_budget(ratio=4.0, context=4096)])[0]
    assert 4.0 <= blocks.layout.ratio(4096) < 4.5


def test_reconstructions_are_near_what_goes_in(run):
    """At a fine budget every codec gives back what it was given, to a few per cent of its size."""
    rows = _rows(run)
    for name, budgets in BUDGETS.items():
        recipe = load_recipe(name)
        if recipe.choices.transform.over_layers:
            continue
        plan = allocate(run, recipe, [make_budget(bits=float(budgets[-1]))])[0]
        for layer, codecs in enumerate(subject_codecs(Subject(recipe, plan), 4, "cpu")):
            for side in ("k", "v"):
                x = rows[layer][side]
                error = (codecs[side].reconstruct(x) - x).norm() / x.norm()
                # Palu drops nothing here: 32 channels are one multiple of its ranks
                assert error < COARSE.get((name, side), 0.25), (name, layer, side)


def _rows(run):
    from aatc_cli.artifacts.stats import Stats

    artifact = Stats.open(run.stats())
    found = []
    for layer in range(4):
        stats = artifact.layer(layer)
        found.append({"k": stats.k_rows[:64][None], "v": stats.v_rows[:64][None]})
    return found


def test_what_is_refused(measured, run, tmp_path, tiny_llama, corpus):
    with pytest.raises(UsageError, match=r"kivi gives every channel one width, which 2\.5 bits is not"):
        allocate(run, load_recipe("kivi"), [make_budget(bits=2.5)])
    with pytest.raises(AatcError, match=r"kivi begins at 1 bits, 0\.5 are too few"):
        allocate(run, load_recipe("kivi"), [make_budget(bits=0.5)])
    plan = Plan.open(run.plan("kivi", make_budget(bits=2.0)))
    with pytest.raises(UsageError, match="the noise of grouped-minmax"):
        measured("distortion", run, tiny_llama, [Subject(plan.recipe, plan)], text=[corpus], length=224, first=160)


def test_gradients_are_asked_for(base_run, tmp_path):
    bare = Run(base_run)
    with pytest.raises(ArtifactError, match="no loss gradients, which the nonuniform-outlier quantizer"):
        whiten(bare, transform_stats=bare.stats(), rate_stats=bare.stats(), wanted=Wanted.by(load_recipe("kvquant")))


def test_a_damaged_table_is_named(run, tmp_path):
    import shutil

    copy = Run(tmp_path / "run")
    shutil.copytree(run.root, copy.root)
    manifest = copy.plan("kvtc", make_budget(bits=2.0)) / "manifest.json"
    data = json.loads(manifest.read_text("utf-8"))
    assert "layers.0.k.starts" in data["tensors"]
    manifest.write_text(manifest.read_text("utf-8").replace('"block-max"', '"block-min"'), "utf-8")
    with pytest.raises(ArtifactError):
        Plan.open(copy.plan("kvtc", make_budget(bits=2.0)))


@pytest.mark.parametrize(
    ("name", "package", "module"), [("quanto", "optimum-quanto", "optimum"), ("hqq", "hqq", "hqq")]
)
def test_libraries_quantize_or_are_named(run, name, package, module):
    recipe = load_recipe(name)
    subject = Subject(recipe, allocate(run, recipe, [make_budget(bits=4.0)])[0])
    if importlib.util.find_spec(module) is None:
        with pytest.raises(AatcError, match=package) as raised:
            subject_codecs(subject, 4, "cpu")
        assert raised.value.hint == f"pip install {package}"
        return
    x = torch.randn(1, 70, 32)
    found = subject_codecs(subject, 4, "cpu")[0]["k"].reconstruct(x)
    assert torch.equal(found[:, 64:], x[:, 64:])
    assert 0 < (found - x).norm() / x.norm() < 0.15
