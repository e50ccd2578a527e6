"""Profiles as data: model profiles and recipes are TOML files, read strictly and never guessed from a name."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator

from aatc_cli.config import Geometry, Settings
from aatc_cli.errors import AatcError
from aatc_cli.methods.recipe import Recipe

T = TypeVar("T", bound=BaseModel)


class TextMixture(Settings):
    """Calibration text as the user writes it: sources with weights, and how many windows of which length."""

    sources: list[str] = Field(min_length=1, description="text specifications, each with an optional @weight")
    samples: int = Field(ge=1, description="windows drawn over all sources")
    length: int = Field(ge=2, description="tokens per window")


class Calibration(Settings):
    """The texts a profile calibrates on; the paper uses one for the transform and another for the rates."""

    transform: TextMixture | None = None
    rates: TextMixture


class ModelProfile(Settings):
    """One model: where it lives, its cache geometry (checked against its config), head groups, calibration."""

    name: str
    model: str = Field(description="hub id of the weights")
    geometry: Geometry
    context: int = Field(ge=1, description="longest sequence the model was trained for, in tokens")
    head_groups: int = Field(1, ge=1, description="groups G whose channels are transformed jointly; divides kv_heads")
    head_groups_why: str = Field("", description="one line on the choice")
    calibration: Calibration

    @model_validator(mode="after")
    def _groups_divide(self) -> Self:
        if self.geometry.kv_heads % self.head_groups:
            raise ValueError(f"head_groups ({self.head_groups}) must divide kv_heads ({self.geometry.kv_heads})")
        return self


def profiles_dir() -> Path:
    """Folder of the packaged profiles: inside the wheel, or the repository's own in a source checkout."""
    packaged = Path(__file__).parent / "_profiles"
    return packaged if packaged.is_dir() else Path(__file__).parent.parent / "profiles"


def available(kind: Literal["models", "recipes", "studies"]) -> list[str]:
    """Sorted names of the packaged profiles of one kind."""
    return sorted(path.stem for path in (profiles_dir() / kind).glob("*.toml"))


def load_model_profile(name: str) -> ModelProfile:
    """Read the model profile ``name`` (a packaged name or a path to a TOML file); raises `AatcError`."""
    return load_named("models", name, ModelProfile)


def load_recipe(name: str) -> Recipe:
    """Read the recipe ``name`` (a packaged name or a path to a TOML file); raises `AatcError`.

    ``CODE+PRESS-KEEP`` is the recipe of a code behind a press: ``loss-aware+snapkv-0.25`` keeps a quarter of the
    tokens, ``loss-aware+snapkv-256t`` 256 of them.
    """
    code, plus, pressed = name.rpartition("+")
    if not plus or name.endswith(".toml"):
        return load_named("recipes", name, Recipe)
    found = re.fullmatch(r"(.*?)(?:-([0-9.]+)(t?))?", pressed)
    assert found is not None
    press, said, counted = found.groups()
    try:
        keep = None if said is None else float(said)
    except ValueError as error:
        raise AatcError(f"recipe {name}: {said} is no share of tokens", f"write {code}+{press}-0.25") from error
    if keep is not None and (keep <= 1) == bool(counted):
        other = f"{said}t" if keep > 1 else said
        problem = f"recipe {name}: a share is at most 1, and a number of tokens, with a t behind it, more than 1"
        raise AatcError(problem, f"write {code}+{press}-{other}")
    try:
        return load_named("recipes", code, Recipe).with_press(press, keep)
    except ValidationError as error:
        raise AatcError(
            f"recipe {name}: {explain(error)}", "write CODE+PRESS-KEEP, as loss-aware+snapkv-0.25"
        ) from error


def load_named(kind: Literal["models", "recipes", "studies"], name: str, model: type[T]) -> T:
    """Read a profile of one ``kind`` by its packaged name or its path; raises `AatcError`."""
    noun = {"models": "model profile", "recipes": "recipe", "studies": "study"}[kind]
    path = Path(name) if name.endswith(".toml") else profiles_dir() / kind / f"{name}.toml"
    if not path.is_file():
        raise AatcError(
            f"no {noun} named {name!r}", f"available: {', '.join(available(kind))}; or give a path ending in .toml"
        )
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        return model.model_validate(raw)
    except ValidationError as error:
        hint = "mend the field named; unknown fields are errors"
        raise AatcError(f"{noun} {path.name}: {explain(error)}", hint) from error
    except (ValueError, RecursionError) as error:
        # not only what tomllib calls its own: numbers of too many digits, bytes that are no text
        raise AatcError(f"{noun} {path.name} is not valid TOML: {error}", "mend the file") from error


def explain(error: ValidationError) -> str:
    """A pydantic error in one line: each field with what is wrong with it."""
    parts: list[str] = []
    for item in error.errors():
        where = ".".join(str(step) for step in item["loc"]) or "file"
        parts.append(f"{where}: {str(item['msg']).removeprefix('Value error, ')}")
    return "; ".join(parts)


def dump(model: BaseModel) -> dict[str, Any]:
    """The model as JSON-ready data, for manifests and output."""
    data: dict[str, Any] = model.model_dump(mode="json")
    return data
