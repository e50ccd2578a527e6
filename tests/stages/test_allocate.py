from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aatc_cli.artifacts.artifact import ArtifactWriter, open_artifact
from aatc_cli.artifacts.plan import Plan
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import CollectSettings
from aatc_cli.config import Budget, make_budget
from aatc_cli.core import SIDES
from aatc_cli.errors import AatcError, ArtifactError, SettingsMismatchError, UsageError
from aatc_cli.methods.recipe import Recipe
from aatc_cli.models.loading import find_model
from aatc_cli.profiles import TextMixture, load_recipe
from aatc_cli.stages.allocate import Difference, allocate, check
from aatc_cli.stages.collect import CollectOptions, collect
from aatc_cli.stages.whiten import Wanted, whiten

CHANNELS = 2 * 4 * 32
FREE = load_recipe("paper").model_copy(update={"name": "free", "protect": load_recipe("fp16").protect})


def plan_of(run: Path, budget: Budget, recipe: Recipe = FREE, **changes: Any) -> Plan:
    return allocate(Run(run), recipe, [budget], **changes)[0]


def bits(value: float) -> Budget:
    return make_budget(bits=value)


def test_one_plan_for_each_budget(run_folder: Path) -> None:
    plans = allocate(Run(run_folder), FREE, [bits(value) for value in (1.0, 2.5, 16.0)])
    assert [plan.name for plan in plans] == ["free-1", "free-2.5", "free-16"]
    assert sorted(path.name for path in (run_folder / "plans").iterdir()) == [
        "free-1",
        "free-16",
        "free-2.5",
        "paper-3",
    ]
    for plan, wanted in zip(plans, (1.0, 2.5, 16.0), strict=True):
        assert wanted - 0.01 < plan.mean_bits <= wanted
        for side in SIDES:
            spent = sum(sum(layer[side]) for layer in plan.bits)
            assert 0.99 * wanted * CHANNELS / 2 < spent <= wanted * CHANNELS / 2
    assert len({plan.digest for plan in plans}) == 3


def test_protected_layers_get_the_average_and_the_extra(base_run: Path) -> None:
    plan = Plan.open(base_run / "plans" / "paper-3")
    for layer in range(3):
        assert sum(plan.bits[layer]["k"]) == 4 * 32
        assert sum(plan.bits[layer]["v"]) == 3 * 32


def test_the_same_transform_and_settings_give_the_same_digest(run_folder: Path) -> None:
    before = Plan.open(run_folder / "plans" / "paper-3").digest
    again = plan_of(run_folder, bits(3.0), load_recipe("paper"), force=True)
    assert again.digest == before
    assert plan_of(run_folder, bits(3.0)).digest != before


def test_unchanged_changed_and_forced(run_folder: Path, snapshot: Any, capsys: Any) -> None:
    first = plan_of(run_folder, bits(2.0))
    before = snapshot(run_folder)
    capsys.readouterr()
    assert max(width for layer in first.bits for side in SIDES for width in layer[side]) > 3
    assert plan_of(run_folder, bits(2.0)).bits == first.bits
    assert "allocate: inputs unchanged, nothing to do" in capsys.readouterr().err
    other = FREE.model_copy(update={"max_bits": 3})
    with pytest.raises(SettingsMismatchError) as caught:
        plan_of(run_folder, bits(2.0), other)
    assert "settings.recipe.max_bits was 16, now 3" in caught.value.message
    assert "--force" in str(caught.value.hint)
    assert snapshot(run_folder) == before
    changed = plan_of(run_folder, bits(2.0), other, force=True)
    assert max(width for layer in changed.bits for side in SIDES for width in layer[side]) == 3


def test_another_transform_under_the_same_name_is_noticed(run_folder: Path) -> None:
    plan_of(run_folder, bits(2.0))
    rewrite(run_folder / "transforms" / "whiten", "transform", settings={"percentile": 98.0})
    with pytest.raises(SettingsMismatchError, match=r"inputs\.transform was"):
        plan_of(run_folder, bits(2.0))


@pytest.mark.parametrize(("ratio", "context"), [(1.7, 400), (1.7, 1000), (3.0, 1000), (3.0, 8192), (5.0, 8192)])
def test_a_ratio_is_met(run_folder: Path, ratio: float, context: int) -> None:
    plan = plan_of(run_folder, make_budget(ratio=ratio, context=context))
    assert ratio <= plan.layout.ratio(context) < 1.05 * ratio
    assert plan.manifest.results["layout"]["ratio"] == plan.layout.ratio(context)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("free", "300000"),
        ("free", "0.7MB"),
        ("free", "1MiB"),
        ("paper", "1.05MB"),
        ("paper", "2MiB"),
        ("global", "1.1MB"),
    ],
)
def test_a_size_is_met(run_folder: Path, name: str, size: str) -> None:
    budget = make_budget(size=size, context=8192)
    plan = plan_of(run_folder, budget, FREE if name == "free" else load_recipe(name))
    assert 0.96 * budget.value < plan.layout.bytes(8192) <= budget.value


def test_more_than_enough_bytes_give_sixteen_bits(run_folder: Path) -> None:
    plan = plan_of(run_folder, make_budget(ratio=0.5, context=8192))
    assert plan.layout.ratio(8192) >= 0.5
    assert plan.manifest.results["bits_budget"] == 16.0


@pytest.mark.parametrize(
    ("budget", "says"),
    [
        (make_budget(ratio=1000.0, context=8192), "are not more than the"),
        (make_budget(ratio=2.0, context=64), "that sinks, window and token scales take alone"),
        (make_budget(size="1B", context=8192), "1 bytes at 8192 tokens"),
        (make_budget(size="190KB", context=8192), "190,000 bytes at 8192 tokens"),
    ],
    ids=lambda value: getattr(value, "label", None),
)
def test_bytes_that_the_window_takes_already(run_folder: Path, snapshot: Any, budget: Budget, says: str) -> None:
    before = snapshot(run_folder)
    with pytest.raises(AatcError) as caught:
        plan_of(run_folder, budget)
    assert says in caught.value.message
    assert "a ratio below" in str(caught.value.hint)
    assert snapshot(run_folder) == before
    # the limit that the hint names is the limit
    limit = float(str(caught.value.hint).split("a ratio below ")[1])
    assert budget.context is not None
    with pytest.raises(AatcError, match="are not more than the"):
        plan_of(run_folder, make_budget(ratio=limit + 0.01, context=budget.context))


def test_budgets_that_cannot_pay_the_protected_layers(run_folder: Path, snapshot: Any) -> None:
    before = snapshot(run_folder)
    with pytest.raises(AatcError, match="cannot pay for 3 protected layers") as caught:
        plan_of(run_folder, bits(0.5), load_recipe("paper"))
    assert "fewer protected layers" in str(caught.value.hint)
    with pytest.raises(AatcError, match="no allocation fits 230,000 bytes"):
        plan_of(run_folder, make_budget(size="230KB", context=8192), load_recipe("paper"))
    assert snapshot(run_folder) == before


def test_recipes_that_do_not_fit(run_folder: Path) -> None:
    with pytest.raises(UsageError, match="recipe fp16 allocates nothing"):
        plan_of(run_folder, bits(2.0), load_recipe("fp16"))
    with pytest.raises(UsageError, match="recipe free needs a whiten transform, not identity"):
        plan_of(run_folder, bits(2.0), transform=run_folder / "transforms" / "identity")
    shutil.rmtree(run_folder / "transforms" / "identity")
    with pytest.raises(ArtifactError, match="there is no transform at"):
        plan_of(run_folder, bits(2.0), FREE.model_copy(update={"transform": "identity"}))


def test_an_identity_plan(run_folder: Path) -> None:
    plan = plan_of(run_folder, bits(2.0), FREE.model_copy(update={"name": "plain", "transform": "identity"}))
    assert plan.transform().manifest.settings["transform"] == "identity"
    codecs = plan.codecs("cpu")
    assert torch.equal(codecs[0]["k"].encode, torch.eye(32)[None])
    assert check(plan) == []


# checking and tampering


def rewrite(
    path: Path,
    kind: Any,
    change: Callable[[dict[str, torch.Tensor]], object] = lambda parts: None,
    settings: dict[str, Any] | None = None,
    results: dict[str, Any] | None = None,
) -> None:
    """Write the artifact again with other content and a digest that fits it, as a careful forger would."""
    artifact = open_artifact(path, kind)
    manifest, parts = artifact.manifest, dict(artifact.tensors())
    change(parts)
    with ArtifactWriter(path, kind) as writer:
        for name, tensor in parts.items():
            writer.add(name, tensor)
        writer.commit(
            settings=manifest.settings | (settings or {}),
            model=manifest.model,
            inputs=manifest.inputs,
            texts=manifest.texts,
            results=manifest.results | (results or {}),
        )


@pytest.mark.parametrize("name", ["paper", "var-only", "per-layer", "global", "uniform", "no-query", "no-output"])
def test_check_of_what_was_allocated(run_folder: Path, name: str) -> None:
    assert check(plan_of(run_folder, bits(3.0), load_recipe(name))) == []


def test_check_of_a_loss_aware_plan(tiny_llama: Path, corpus: Path, tmp_path: Path) -> None:
    run = Run(tmp_path)
    settings = CollectSettings(samples=3, length=160, fisher=2)
    mixture = TextMixture(sources=[str(corpus)], samples=3, length=160)
    collect(run, "stats", find_model(str(tiny_llama)), mixture, settings, CollectOptions())
    whiten(run, transform_stats=run.stats(), rate_stats=run.stats(), wanted=Wanted(transform="metric"))
    plan = plan_of(tmp_path, bits(2.0), load_recipe("loss-aware"))
    assert 1.98 < plan.mean_bits <= 2.0
    assert check(plan) == []
    rewrite(plan.path, "plan", lambda parts: parts["layers.1.k.bits"].__setitem__(0, 0))
    assert [(found.layer, found.side, found.channel) for found in check(Plan.open(plan.path))] == [(1, "k", 0)]


def test_check_of_budgets_in_bytes(run_folder: Path) -> None:
    assert check(plan_of(run_folder, make_budget(ratio=3.0, context=8192))) == []


def test_check_names_every_difference(run_folder: Path) -> None:
    plan = plan_of(run_folder, bits(2.0))
    old = plan.bits[2]["v"][7]

    def change(parts: dict[str, torch.Tensor]) -> None:
        parts["layers.2.v.bits"][7] += 1
        parts["layers.0.k.bits"][31] = 16

    rewrite(plan.path, "plan", change)
    assert check(Plan.open(plan.path)) == [
        Difference(0, "k", 31, 16, plan.bits[0]["k"][31]),
        Difference(2, "v", 7, old + 1, old),
    ]


def test_check_against_a_transform_elsewhere(run_folder: Path, tmp_path: Path) -> None:
    plan = plan_of(run_folder, bits(2.0))
    (run_folder / "transforms" / "whiten").rename(tmp_path / "moved")
    with pytest.raises(ArtifactError, match="there is no transform at"):
        check(plan)
    assert check(plan, tmp_path / "moved") == []
    with pytest.raises(ArtifactError, match="was not made from the transform at"):
        check(plan, run_folder / "transforms" / "identity")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda p: p["layers.1.k.bits"].__setitem__(0, 17), "the widths of layer 1 k are out of range"),
        (lambda p: p.update({"layers.1.v.bits": p["layers.1.v.bits"].to(torch.int64) * 0 - 1}), "layer 1 v"),
        (lambda p: p.update({"layers.3.v.bits": p["layers.3.v.bits"][:31].clone()}), "layer 3 v"),
        (lambda p: p.update({"layers.3.v.bits": torch.full((32,), float("nan"))}), "layer 3 v"),
        (lambda p: p.pop("layers.2.k.bits"), "no tensor 'layers.2.k.bits'"),
    ],
    ids=["too-wide", "negative", "short", "nan", "missing"],
)
def test_plans_with_widths_they_cannot_have(run_folder: Path, change: Any, says: str) -> None:
    path = run_folder / "plans" / "paper-3"
    rewrite(path, "plan", change)
    with pytest.raises(ArtifactError) as caught:
        Plan.open(path)
    assert says in caught.value.message
    assert "aatc allocate --force" in str(caught.value.hint)


def test_widths_below_the_recipe_s_own_least(run_folder: Path) -> None:
    plan = plan_of(run_folder, bits(3.0), FREE.model_copy(update={"min_bits": 1}))
    rewrite(plan.path, "plan", lambda parts: parts["layers.0.k.bits"].__setitem__(0, 0))
    with pytest.raises(ArtifactError, match="the widths of layer 0 k are out of range"):
        Plan.open(plan.path)


@pytest.mark.parametrize("groups", [0, -1, 1.0, "1", None, True])
def test_plans_with_head_groups_that_are_none(run_folder: Path, groups: object) -> None:
    path = run_folder / "plans" / "paper-3"
    for recorded in (groups, {"k": 1, "v": groups}, {"k": 1}, {"k": 1, "v": 1, "q": 1}):
        rewrite(path, "plan", results={"head_groups": recorded})
        with pytest.raises(ArtifactError, match=r"are not head groups of keys and values"):
            Plan.open(path)


@pytest.mark.parametrize(
    ("groups", "says"), [((3, 3), "3 head groups"), ((2, 4), "2 head groups of keys and 4 of values")]
)
def test_plans_with_head_groups_that_do_not_divide(run_folder: Path, groups: tuple[int, int], says: str) -> None:
    path = run_folder / "plans" / "paper-3"
    rewrite(path, "plan", results={"head_groups": dict(zip("kv", groups, strict=True))})
    with pytest.raises(ArtifactError, match=f"{says} do not divide 2 kv heads"):
        Plan.open(path)


def test_plans_with_the_head_groups_of_another_transform(run_folder: Path) -> None:
    path = run_folder / "plans" / "paper-3"
    rewrite(path, "plan", results={"head_groups": {"k": 1, "v": 2}})
    with pytest.raises(ArtifactError, match="its 1 head group of keys and 2 of values are not those of its transform"):
        check(Plan.open(path))


def test_recipes_of_different_head_groups_live_side_by_side(run_folder: Path) -> None:
    run = Run(run_folder)
    split = FREE.model_copy(update={"name": "split", "key_groups": "per-head", "value_groups": "all"})
    with pytest.raises(ArtifactError, match=r"there is no transform at .*whiten-keys-per-head-values-all") as caught:
        plan_of(run_folder, bits(3.0), split)
    command = "aatc whiten --key-groups per-head --value-groups all"
    assert caught.value.hint == f"run {command} to make it"
    with pytest.raises(UsageError, match="needs other head groups than the 1 head group of") as caught:
        plan_of(run_folder, bits(3.0), split, transform=run.transform("whiten"))
    assert caught.value.hint == f"run {command}"
    whiten(
        run,
        transform_stats=run.stats(),
        rate_stats=run.stats(),
        wanted=Wanted(key_groups="per-head", value_groups="all"),
    )
    for recipe, (keys, values) in ((split, (2, 1)), (FREE, (1, 1))):
        plan = plan_of(run_folder, bits(3.0), recipe)
        assert plan.manifest.results["head_groups"] == {"k": keys, "v": values}
        assert check(plan) == []
        for layer in plan.codecs("cpu"):
            assert (layer["k"].groups, layer["v"].groups) == (keys, values)
        scales = plan.layout.breakdown(1024)["token_scales"]
        assert scales == 896 * 4 * (keys + values) * 2


@pytest.mark.parametrize(
    "settings", [{"recipe": None}, {"recipe": {"name": "x"}}, {"budget": {"unit": "bits"}}, {"budget": 3}]
)
def test_plans_with_the_settings_of_something_else(run_folder: Path, settings: dict[str, Any]) -> None:
    path = run_folder / "plans" / "paper-3"
    rewrite(path, "plan", settings=settings)
    with pytest.raises(ArtifactError, match="its settings are not those of a plan"):
        Plan.open(path)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("layers.1.k.variance", float("nan"), "does not hold finite numbers"),
        ("layers.1.v.weight", float("inf"), "does not hold finite numbers"),
        ("layers.2.v.variance", -1e-9, "has negative values"),
        ("layers.0.k.weight", -1.0, "has negative values"),
    ],
)
def test_transforms_with_energies_they_cannot_have(run_folder: Path, name: str, value: float, says: str) -> None:
    rewrite(run_folder / "transforms" / "whiten", "transform", lambda parts: parts[name].__setitem__(4, value))
    with pytest.raises(ArtifactError) as caught:
        plan_of(run_folder, bits(2.0))
    assert name in caught.value.message
    assert says in caught.value.message


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda p: p["layers.1.k.scale"].__setitem__(3, 0.0), "layer 1 k has a scale that is not positive"),
        (lambda p: p["layers.1.k.scale"].__setitem__(3, -1.0), "layer 1 k has a scale that is not positive"),
        (lambda p: p["layers.1.v.scale"].__setitem__(3, float("inf")), "'layers.1.v.scale' does not hold finite"),
        (lambda p: p["layers.0.v.decode"].__setitem__((0, 3, 3), float("nan")), "'layers.0.v.decode'"),
        (lambda p: p.update({"layers.0.k.encode": torch.eye(16)[None].repeat(2, 1, 1)}), "of shape [1, 32, 32]"),
    ],
    ids=["zero", "negative", "infinite", "nan", "shape"],
)
def test_transforms_with_scales_and_matrices_no_codec_can_have(run_folder: Path, change: Any, says: str) -> None:
    rewrite(run_folder / "transforms" / "whiten", "transform", change)
    plan = plan_of(run_folder, bits(2.0))
    with pytest.raises(ArtifactError) as caught:
        plan.codecs("cpu")
    assert says in caught.value.message


def test_a_plan_keeps_to_its_own_transform(run_folder: Path) -> None:
    plan = Plan.open(run_folder / "plans" / "paper-3")
    rewrite(run_folder / "transforms" / "whiten", "transform", settings={"percentile": 98.0})
    with pytest.raises(ArtifactError, match="was not made from the transform at") as caught:
        plan.transform()
    assert "--force" in str(caught.value.hint)


def test_recorded_results_are_those_of_the_widths(base_run: Path) -> None:
    plan = Plan.open(base_run / "plans" / "paper-3")
    results = plan.manifest.results
    widths = [width for layer in plan.bits for side in SIDES for width in layer[side]]
    assert results["bits_mean"] == sum(widths) / CHANNELS == plan.mean_bits
    assert results["layout"] == plan.layout.recorded(8192)
    total = 0.0
    energies = plan.transform().energies()
    for layer, sites in enumerate(energies):
        energy = plan.recipe.choices.energy(sites["v"], "v")
        total += sum(e * 4.0**-b for e, b in zip(energy, plan.bits[layer]["v"], strict=True))
    assert results["predicted"]["v"] == pytest.approx(total, rel=1e-8)
