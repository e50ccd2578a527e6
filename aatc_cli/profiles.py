"""Profiles as data: model profiles and recipes are TOML files, read strictly and never guessed from a name."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator

from aatc_cli.config import MAX_BITS, Geometry, Settings, Window
from aatc_cli.errors import AatcError

T = TypeVar("T", bound=BaseModel)

GroupChoice = Literal["profile", "per-head", "all"]


class HeadGroups(Settings):
    """How many groups the kv heads of a layer are cut into, for keys and for values; each is transformed jointly."""

    k: int = Field(ge=1, description="groups of the keys")
    v: int = Field(ge=1, description="groups of the values")

    @classmethod
    def both(cls, groups: int) -> Self:
        """The same number for keys and values."""
        return cls(k=groups, v=groups)

    @classmethod
    def chosen(cls, keys: GroupChoice, values: GroupChoice, kv_heads: int, profile: HeadGroups) -> Self:
        """What two choices come to on a model of ``kv_heads`` with the groups of its ``profile``."""
        fixed = {"per-head": kv_heads, "all": 1}
        return cls(k=fixed.get(keys, profile.k), v=fixed.get(values, profile.v))

    def of(self, side: Literal["k", "v"]) -> int:
        """Groups of one side."""
        return self.k if side == "k" else self.v

    def divide(self, kv_heads: int) -> bool:
        """Whether both numbers divide the kv heads."""
        return kv_heads % self.k == 0 and kv_heads % self.v == 0

    @property
    def described(self) -> str:
        """In words: ``2 head groups``, ``8 head groups of keys and 1 of values``."""
        first = f"{self.k} head group{'' if self.k == 1 else 's'}"
        return first if self.k == self.v else f"{first} of keys and {self.v} of values"


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


class Protection(Settings):
    """Layers kept out of the common pool: each gets the average budget plus an extra, waterfilled inside."""

    layers: int = Field(0, ge=0)
    key_extra: float = Field(0.0, ge=0, description="bits per key channel above the average")
    value_extra: float = Field(0.0, ge=0, description="bits per value channel above the average")


class Recipe(Settings):
    """One method as a choice on the axes of the design: transform, weights, allocator, quantizer, window."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="part of file names: no space, no slash")
    summary: str
    transform: Literal["identity", "whiten", "metric"] = "whiten"
    key_weight: Literal["none", "query", "fisher"] = "query"
    value_weight: Literal["none", "output", "fisher"] = "output"
    key_groups: GroupChoice = Field(
        "profile", description="heads whose keys are transformed jointly: the profile's groups, each alone, or all"
    )
    value_groups: GroupChoice = Field("profile", description="the same for values")
    allocator: Literal["waterfill", "per-layer", "global", "uniform", "none"] = "waterfill"
    pool: Literal["separate", "joint"] = Field(
        "separate", description="one budget for keys and one for values, or both in one"
    )
    curve: Literal["exponential", "lloyd", "uniform"] = Field(
        "exponential", description="distortion at b bits: 4^-b, Lloyd-Max's, or that of evenly spaced levels"
    )
    quantizer: Literal["uniform-token-max", "lloyd", "uniform", "float16"] = "uniform-token-max"
    scale_bits: Literal[8, 16] = Field(16, description="bits of a token scale: float16, or a logarithmic grid")
    coordinates: Literal["pre-rope"] = "pre-rope"
    min_bits: int = Field(0, ge=0, le=MAX_BITS)
    max_bits: int = Field(MAX_BITS, ge=1, le=MAX_BITS)
    widths: tuple[int, ...] | None = Field(
        None, strict=False, description="widths that may be used, rising; None is every one from min_bits to max_bits"
    )
    block: int = Field(1, ge=1, description="channels of one head group that share a width, by falling energy")
    normalize_percentile: float | None = Field(
        None, gt=0, le=100, description="divide variance and key weight by this percentile of the layer's own"
    )
    protect: Protection = Protection()
    window: Window = Window()

    @model_validator(mode="after")
    def _axes_fit(self) -> Self:
        if self.min_bits > self.max_bits:
            raise ValueError(f"min_bits ({self.min_bits}) exceeds max_bits ({self.max_bits})")
        if self.widths is not None and (
            sorted(set(self.widths)) != list(self.widths) or not self.widths or self.widths[0] != self.min_bits
            or self.widths[-1] != self.max_bits
        ):  # fmt: skip
            raise ValueError("widths must rise from min_bits to max_bits")
        if (self.quantizer == "float16") != (self.allocator == "none"):
            raise ValueError('quantizer "float16" and allocator "none" go together')
        if self.pool == "joint" and (self.allocator != "waterfill" or self.protect.layers):
            raise ValueError('pool "joint" needs allocator "waterfill" and no protected layers')
        if self.pool == "joint" and (self.key_weight == "fisher") != (self.value_weight == "fisher"):
            raise ValueError('pool "joint" weighs both sides by "fisher" or neither: nothing else is in nats')
        return self

    @property
    def allowed_widths(self) -> tuple[int, ...]:
        """The widths a channel may have, rising."""
        return self.widths if self.widths is not None else tuple(range(self.min_bits, self.max_bits + 1))

    def head_groups(self, kv_heads: int, profile: HeadGroups) -> HeadGroups:
        """The recipe's head groups on a model of ``kv_heads`` with the groups of its ``profile``."""
        return HeadGroups.chosen(self.key_groups, self.value_groups, kv_heads, profile)

    @property
    def transform_name(self) -> str:
        """Folder of the recipe's Transform: ``metric``, ``metric-keys-per-head-values-all``."""
        return transform_name(self.transform, self.key_groups, self.value_groups)


def transform_name(kind: str, keys: GroupChoice, values: GroupChoice) -> str:
    """Folder name of a Transform: its kind, then every choice of head groups that is not the profile's."""
    return "".join(
        [kind, *(f"-{side}-{choice}" for side, choice in (("keys", keys), ("values", values)) if choice != "profile")]
    )


def profiles_dir() -> Path:
    """Folder of the packaged profiles: inside the wheel, or the repository's own in a source checkout."""
    packaged = Path(__file__).parent / "_profiles"
    return packaged if packaged.is_dir() else Path(__file__).parent.parent / "profiles"


def available(kind: Literal["models", "recipes"]) -> list[str]:
    """Sorted names of the packaged profiles of one kind."""
    return sorted(path.stem for path in (profiles_dir() / kind).glob("*.toml"))


def load_model_profile(name: str) -> ModelProfile:
    """Read the model profile ``name`` (a packaged name or a path to a TOML file); raises `AatcError`."""
    return _load("models", name, ModelProfile)


def load_recipe(name: str) -> Recipe:
    """Read the recipe ``name`` (a packaged name or a path to a TOML file); raises `AatcError`."""
    return _load("recipes", name, Recipe)


def _load(kind: Literal["models", "recipes"], name: str, model: type[T]) -> T:
    noun = {"models": "model profile", "recipes": "recipe"}[kind]
    path = Path(name) if name.endswith(".toml") else profiles_dir() / kind / f"{name}.toml"
    if not path.is_file():
        raise AatcError(
            f"no {noun} named {name!r}", f"available: {', '.join(available(kind))}; or give a path ending in .toml"
        )
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        return model.model_validate(raw)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AatcError(f"{noun} {path.name} is not valid TOML: {error}", "mend the file") from error
    except ValidationError as error:
        hint = "mend the field named; unknown fields are errors"
        raise AatcError(f"{noun} {path.name}: {explain(error)}", hint) from error


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
