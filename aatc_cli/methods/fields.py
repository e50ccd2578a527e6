"""Fields of a recipe: what a method is told on every axis and beside them, as data."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, SerializeAsAny, SerializerFunctionWrapHandler, model_serializer

from aatc_cli.config import MAX_BITS, HeadGroups, Settings, Window

GroupChoice = Literal["profile", "per-head", "four-heads", "all"]


class Protection(Settings):
    """Layers kept out of the common pool: each gets the average budget plus an extra, waterfilled inside."""

    layers: int = Field(0, ge=0)
    key_extra: float = Field(0.0, ge=0, description="bits per key channel above the average")
    value_extra: float = Field(0.0, ge=0, description="bits per value channel above the average")


class Coding(Settings):
    """What the quantizers of published methods are told beside a width; the packed ones leave it alone."""

    key_axis: Literal["token", "channel"] = Field("token", description="groups lie in a token, or along one channel")
    value_axis: Literal["token", "channel"] = Field("token", description="the same for values")
    group: int | None = Field(None, ge=1, description="members of a group of grouped-minmax; None: a head's channels")
    key_clip: float = Field(1.0, gt=0, le=1, description="share of a group's range that its levels cover")
    value_clip: float = Field(1.0, gt=0, le=1, description="the same for values")
    outliers: float = Field(0.0, ge=0, lt=0.5, description="share of the values kept exact")
    latent_hadamard: bool = Field(False, description="mix the kept latents of a group by a Hadamard matrix")
    rank_multiple: int = Field(32, ge=1, description="ranks of the allocator rank are multiples of this")


class RecipeFields(Settings):
    """Every field of a recipe with its default; `recipe.Recipe` checks them against the registry of choices."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$", description="part of file names: no space, no slash")
    summary: str
    transform: str = Field("whiten", description="what turns a cached vector into latents")
    key_weight: str = Field("query", description="what noise in a latent of keys costs")
    value_weight: str = Field("output", description="what noise in a latent of values costs")
    key_groups: GroupChoice = Field(
        "profile", description="heads whose keys are transformed jointly: the profile's groups, each alone, or all"
    )
    value_groups: GroupChoice = Field("profile", description="the same for values")
    allocator: str = Field("waterfill", description="how a budget becomes widths")
    pool: Literal["separate", "joint"] = Field(
        "separate", description="one budget for keys and one for values, or both in one"
    )
    curve: str = Field("exponential", description="distortion at b bits that the allocator counts on")
    quantizer: str = Field("uniform-token-max", description="how latents become codes")
    scale_bits: Literal[8, 16] = Field(16, description="bits of a token scale: float16, or a logarithmic grid")
    coordinates: Literal["pre-rope", "post-rope"] = Field(
        "pre-rope", description="keys before RoPE without bias, or keys and values as the model's own cache holds them"
    )
    min_bits: int = Field(0, ge=0, le=MAX_BITS)
    max_bits: int = Field(MAX_BITS, ge=1, le=MAX_BITS)
    widths: tuple[int, ...] | None = Field(
        None, strict=False, description="widths that may be used, rising; None is every one from min_bits to max_bits"
    )
    block: int = Field(1, ge=1, description="channels of one head group that share a width, by falling energy")
    normalize_percentile: float | None = Field(
        None, gt=0, le=100, description="divide variance and key weight by this percentile of the layer's own"
    )
    coding: Coding = Coding()
    protect: Protection = Protection()
    window: Window = Window()
    tokens: SerializeAsAny[Settings] | None = Field(None, description="classes of tokens; others do not write this")
    prediction: SerializeAsAny[Settings] | None = Field(
        None, description="prediction from what is decoded; others do not write this"
    )
    press: str = Field("none", description="which tokens stay, per kv head; not written without one")
    keep: float | None = Field(
        None,
        gt=0,
        description="share of the tokens behind the window that a press leaves, above 1 how many; None: by the budget",
    )

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = handler(self)
        absent = {name for name in ("tokens", "prediction") if getattr(self, name) is None}
        absent |= {"press", "keep"} if self.press == "none" else set()
        return {key: part for key, part in data.items() if key not in absent}

    @property
    def allowed_widths(self) -> tuple[int, ...]:
        """The widths a channel may have, rising."""
        return self.widths if self.widths is not None else tuple(range(self.min_bits, self.max_bits + 1))


def chosen_groups(keys: GroupChoice, values: GroupChoice, kv_heads: int, profile: HeadGroups) -> HeadGroups:
    """What two choices come to on a model of ``kv_heads`` with the groups of its ``profile``."""
    quads = next(count for count in range(1, kv_heads + 1) if kv_heads % count == 0 and kv_heads // count <= 4)
    fixed = {"per-head": kv_heads, "four-heads": quads, "all": 1}
    return HeadGroups(k=fixed.get(keys, profile.k), v=fixed.get(values, profile.v))
