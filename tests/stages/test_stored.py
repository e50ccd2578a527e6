"""The storage code through the stages: collect with layers below, maps, plans over residuals, bytes, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aatc_cli.artifacts.plan import Plan
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import CollectSettings, Stats
from aatc_cli.artifacts.transform import Transform
from aatc_cli.config import make_budget
from aatc_cli.core.stored_chunk import StoredCode
from aatc_cli.core.stored_layer import StoredLayer
from aatc_cli.errors import AatcError, ArtifactError, UsageError
from aatc_cli.evals.forced.stored import stored_layers
from aatc_cli.evals.subjects import Subject
from aatc_cli.methods.recipe import Recipe
from aatc_cli.models.loading import find_model
from aatc_cli.profiles import TextMixture, load_recipe
from aatc_cli.runtime.stored.compiled_chunk import CompiledChunk
from aatc_cli.stages.allocate import allocate, check
from aatc_cli.stages.collect import CollectOptions, collect
from aatc_cli.stages.inspecting.plan import inspect_plan
from aatc_cli.stages.whiten import Wanted, whiten

RECIPE = load_recipe("stored-fixed")


def changed(**changes: object) -> Recipe:
    return Recipe.model_validate(RECIPE.model_dump(mode="json") | changes)


def collected(run: Run, model: Path, corpus: Path, *, name: str = "stats", below: int = 2, **how: object) -> Stats:
    settings = CollectSettings(samples=4, length=260, rows=64, fisher=4, below=below)
    mixture = TextMixture(sources=[str(corpus)], samples=4, length=260)
    collect(run, name, find_model(str(model)), mixture, settings, CollectOptions(**{"batch": 2, **how}))
    return Stats.open(run.stats(name))


@pytest.fixture(scope="module")
def run(tiny_llama: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("stored") / "run")
    collected(run, tiny_llama, corpus)
    whiten(run, transform_stats=run.stats(), rate_stats=run.stats(), wanted=Wanted.by(RECIPE))
    return run


@pytest.fixture(scope="module")
def plan(run: Run) -> Plan:
    return allocate(run, RECIPE, [make_budget(bits=2.0)])[0]


def test_products_of_layers_are_those_of_their_rows(run: Run) -> None:
    """Every token of every window is in them; the sampled rows are some of those."""
    stats = Stats.open(run.stats())
    own = stats.layer(2)
    width = own.k_outer.shape[0]
    torch.testing.assert_close(own.cross[0][:width, :width], own.k_outer)
    torch.testing.assert_close(own.cross[0][width:, width:], own.v_outer)
    assert own.cross.shape == (3, 2 * width, 2 * width)
    assert not stats.layer(0).cross[1].any()
    assert not stats.layer(1).cross[2].any()
    # Cauchy and Schwarz, of one number of this layer and one of the layer below
    lower = stats.layer(1).cross[0].diagonal()
    limit = (lower[:, None] * own.cross[0].diagonal()).sqrt()
    assert bool((own.cross[1].abs() <= limit * (1 + 1e-9)).all())


def test_products_do_not_depend_on_the_batch(run: Run, tiny_llama: Path, corpus: Path, tmp_path: Path) -> None:
    other = collected(Run(tmp_path / "run"), tiny_llama, corpus, batch=1)
    for layer in range(4):
        torch.testing.assert_close(
            other.layer(layer).cross, Stats.open(run.stats()).layer(layer).cross, rtol=1e-5, atol=1e-6
        )


def test_stats_without_layers_below_say_nothing_of_them(tiny_llama: Path, corpus: Path, tmp_path: Path) -> None:
    bare = Run(tmp_path / "run")
    stats = collected(bare, tiny_llama, corpus, below=0)
    assert "below" not in stats.manifest.settings
    assert not [name for name in stats.manifest.tensors if "cross" in name]
    with pytest.raises(ArtifactError, match="0 below, prediction reads 2"):
        whiten(bare, transform_stats=bare.stats(), rate_stats=bare.stats(), wanted=Wanted.by(RECIPE))


def test_maps_leave_less_to_code(run: Run) -> None:
    plain = load_recipe("loss-aware-tiles")
    whiten(run, transform_stats=run.stats(), rate_stats=run.stats(), wanted=Wanted.by(plain))
    [bare] = allocate(run, plain, [make_budget(bits=2.0)])
    [stored] = allocate(run, RECIPE, [make_budget(bits=2.0)])
    assert sum(stored.predicted.values()) < 0.9 * sum(bare.predicted.values())
    assert stored.layout.bits_packed <= 2.0


def test_bytes_of_the_maps_are_in_the_law(run: Run, plan: Plan) -> None:
    transform = Transform.open(run.transform(RECIPE.transform_name))
    numbers = 0
    for layer in range(4):
        below = transform.artifact.tensor(f"layers.{layer}.maps.below")
        within = transform.artifact.tensor(f"layers.{layer}.maps.within")
        assert below.dtype == within.dtype == torch.float16
        assert below.shape == (min(layer, 2) * 64, 64)
        # two heads of 16: the second of a side reads the first, keys read both values
        numbers += below.numel() + 2 * 16 * 16 + 32 * 32
    assert plan.layout.static_breakdown()["prediction_maps"] == 2 * numbers
    assert "prediction_maps" not in plan.layout.breakdown(1000)


def test_a_plan_is_what_is_derived_anew(plan: Plan) -> None:
    assert check(plan) == []


def test_evaluation_goes_through_the_layers(
    plan: Plan, run: Run, tiny_llama: Path, corpus: Path, measured: Callable[..., Any]
) -> None:
    codecs = plan.simulated_codecs("cpu")
    assert all(isinstance(layer["k"], StoredLayer) and layer["k"] is layer["v"] for layer in codecs)
    given = {"length": 260, "limit": 1, "first": 200}
    [one] = measured("kl", run, tiny_llama, [Subject(RECIPE, plan)], text=[corpus], **given)
    assert one.kl_mean is not None
    assert 0 < one.kl_mean < 10


def test_codes_of_variable_length_take_what_is_measured(
    run: Run, tiny_llama: Path, corpus: Path, measured: Callable[..., Any]
) -> None:
    recipe = load_recipe("stored")
    whiten(run, transform_stats=run.stats(), rate_stats=run.stats(), wanted=Wanted.by(recipe))
    [plan] = allocate(run, recipe, [make_budget(bits=2.0)])
    assert check(plan) == []
    assert 1.95 < plan.layout.bits_packed <= 2.0
    facts = inspect_plan(plan, 8192).data["classes"]
    means = [fact["share"] * (fact["bits_keys"] + fact["bits_values"]) / 2 for fact in facts]
    assert sum(means) == pytest.approx(plan.layout.mean_bits)
    assert [fact["masked"] for fact in facts] == [0.0, 0.0, 0.0]
    given = {"length": 260, "limit": 1, "first": 200}
    [one] = measured("kl", run, tiny_llama, [Subject(recipe, plan)], text=[corpus], **given)
    assert 0.97 * plan.layout.bits_packed < one.bits_packed < 1.006 * plan.layout.bits_packed
    assert one.bits_packed != pytest.approx(plan.layout.bits_packed, rel=1e-6)


@pytest.mark.parametrize("name", ["stored", "stored-fixed"])
def test_prefixes_go_through_bytes_of_it(
    name: str, run: Run, tiny_llama: Path, corpus: Path, measured: Callable[..., Any]
) -> None:
    """Chunks of the plan's bits are written and read back, and what follows them is not far off."""
    recipe = load_recipe(name)
    whiten(run, transform_stats=run.stats(), rate_stats=run.stats(), wanted=Wanted.by(recipe))
    kl = []
    for bits in (1.0, 4.0):
        [plan] = allocate(run, recipe, [make_budget(bits=bits)])
        given = {"prefix": 128, "continuation": 64, "chunk": 64, "limit": 1, "ranked": "received"}
        [one] = measured("stored", run, tiny_llama, [Subject(recipe, plan)], text=[corpus], **given)
        kl.append(one.kl_mean)
        # heads of chunks and four exact tokens weigh much in a model this small
        assert one.bytes_stored < one.bytes_raw
    assert 0 < kl[1] < 0.5 * kl[0]


def test_aqua_kv_from_stats_to_divergence(
    run: Run, tiny_llama: Path, corpus: Path, measured: Callable[..., Any]
) -> None:
    """A published predictor takes the same way: one layer below, keys before values, more bits less divergence."""
    recipe = load_recipe("aqua-kv")
    whiten(run, transform_stats=run.stats(), rate_stats=run.stats(), wanted=Wanted.by(recipe))
    plans = allocate(run, recipe, [make_budget(bits=bits) for bits in (1.0, 3.0)])
    assert all(check(plan) == [] for plan in plans)
    given = {"length": 260, "limit": 1, "first": 200}
    subjects = [Subject(recipe, plan) for plan in plans]
    few, many = measured("kl", run, tiny_llama, subjects, text=[corpus], **given)
    assert 0 < many.kl_mean < few.kl_mean < 5


def test_a_mean_is_taken_off_before_and_added_again(run: Run) -> None:
    """Tokens that are the mean have nothing to code, in any layer, and are read as it."""
    data = load_recipe("stored").model_dump(mode="json")
    recipe = Recipe.model_validate(data | {"name": "centred", "transform": "metric-centred"})
    whiten(run, transform_stats=run.stats(), rate_stats=run.stats(), wanted=Wanted.by(recipe))
    [plan] = allocate(run, recipe, [make_budget(bits=4.0)], force=True)
    layers = stored_layers(plan.simulated_codecs("cpu"))
    stats = Stats.open(run.stats())
    means = [torch.cat([stats.layer(i).mean(side) for side in ("k", "v")]).float() for i in range(4)]
    rows = [mean.expand(64, -1) for mean in means]
    classes = [layer.rule.classes_of(torch.rand(2, 64), 0, 0) for layer in layers]
    for code in (StoredCode(layers, 2), CompiledChunk(layers, 2)):
        found, _ = code.read(code.parts(rows, classes), 64)
        for mine, mean in zip(found, rows, strict=True):
            torch.testing.assert_close(mine, mean, rtol=1e-4, atol=1e-4)


def test_no_live_cache_holds_it(plan: Plan) -> None:
    with pytest.raises(AatcError, match="no live cache holds it"):
        plan.codecs("cpu")


def test_maps_of_another_form_are_another_transform(run: Run) -> None:
    other = changed(name="stored-rank", prediction={"layers": 1, "within": "none", "rank": 8})
    assert other.transform_name != RECIPE.transform_name
    with pytest.raises(UsageError, match="maps"):
        allocate(run, other, [make_budget(bits=2.0)], transform=run.transform(RECIPE.transform_name))
    whiten(run, transform_stats=run.stats(), rate_stats=run.stats(), wanted=Wanted.by(other))
    [found] = allocate(run, other, [make_budget(bits=2.0)])
    assert found.layout.static_breakdown()["prediction_maps"] == 2 * 3 * 8 * (64 + 64)
    assert isinstance(found.simulated_codecs("cpu")[1]["k"], StoredLayer)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"prediction": {"layers": 0, "within": "none"}}, "reads layers below"),
        ({"prediction": {"layers": 2, "depth": 3}}, "depth"),
        ({"prediction": {"layers": 1, "rank": 4, "alone": True}}, "alone"),
        ({"transform": "whiten", "key_weight": "query", "value_weight": "output", "pool": "separate"}, "metric"),
        ({"tokens": None}, "tiles"),
    ],
)
def test_recipes_that_cannot_be(changes: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        changed(**changes)
