"""The registry: what choices say of one another names choices that there are, and the pages list all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from aatc_cli.methods.fields import RecipeFields
from aatc_cli.methods.recipe import Recipe
from aatc_cli.methods.registry import AXES, QUANTIZERS, names, table_makers, table_names
from aatc_cli.profiles import available, load_recipe
from aatc_cli.studies.definition import load_study

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text("utf-8")


@pytest.mark.parametrize("axis", AXES)
def test_every_choice_is_in_the_table_of_its_axis(axis) -> None:
    """As the page has it: a row with the name and what the object says of itself."""
    part = PAGE.split(f"### {axis}\n")[1].split("\n### ")[0].split("\n## ")[0]
    rows = [line for line in part.splitlines() if line.startswith("| `")]
    assert rows == [f"| `{choice.name}` | {choice.meaning} |" for choice in AXES[axis]]


@pytest.mark.parametrize("axis", AXES)
def test_names_are_unlike_and_partners_are_there(axis) -> None:
    choices = AXES[axis]
    assert len({choice.name for choice in choices}) == len(choices)
    for choice in choices:
        for field, wanted in choice.goes_with.items():
            assert field in RecipeFields.model_fields
            known = {n for c in AXES[field] for n in (c.name, *c.kinds)} if field in AXES else set(wanted)
            assert set(wanted) <= known, f"{choice.name} goes with {field} {wanted}"


def test_every_choice_is_in_a_packaged_recipe() -> None:
    recipes = [load_recipe(name) for name in available("recipes")]
    for axis in set(AXES) - {"classes", "prediction"}:
        assert {getattr(recipe, axis) for recipe in recipes} == set(names(axis)), axis
    assert {recipe.choices.classes.name for recipe in recipes} == set(names("classes"))
    assert {recipe.choices.prediction.name for recipe in recipes} == set(names("prediction"))
    assert {recipe.curve for recipe in recipes} == set(names("curve"))


def test_a_name_that_is_none_lists_those_that_are() -> None:
    with pytest.raises(ValidationError) as caught:
        Recipe(name="mine", summary="", transform="fourier")
    assert f"'fourier' is none of {', '.join(names('transform'))}" in str(caught.value)


def test_tables_lie_where_they_are_read() -> None:
    """Asked for, in a folder of their own; or with the transform that their reader goes with."""
    assert table_names() == [quantizer.name for quantizer in QUANTIZERS if quantizer.asked]
    for name in table_names():
        recipe = next(r for r in map(load_recipe, available("recipes")) if r.quantizer == name)
        assert recipe.choices.tables == (name,)
        assert recipe.transform_name == f"{recipe.transform}-{name}"
        assert [maker.name for maker in table_makers(recipe.transform, (name,))] == [name]
    assert [maker.name for maker in table_makers("pca")] == ["block-dp"]
    assert table_makers("whiten") == []


def test_everything_has_every_published_method() -> None:
    """All recipes of others' methods, and ours as they ship; of presses that act at the end of a prompt, behind one."""
    study = load_study("everything")
    named = {method.recipe for method in study.methods}
    recipes = {name: load_recipe(name) for name in available("recipes")}
    for_prompts = {name for name, recipe in recipes.items() if recipe.pressed and recipe.choices.press.acts == "prompt"}
    ours = {"paper", "loss-aware", "loss-aware-tiles"}
    others = {name for name, recipe in recipes.items() if not recipe.packed and name not in {"quanto", "hqq", "stored"}}
    ours |= {"loss-aware+h2o-0.5", "loss-aware-tiles+kvzip-0.5"}
    assert named == ours | others | {"qaq", "aqua-kv"}
    assert for_prompts <= named
    assert {bool(task.prompt) for task in study.tasks} == {False, True}
