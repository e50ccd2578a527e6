"""The Recipe: one method as data, a choice on every axis with what it is told beside them."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from aatc_cli.config import MAX_BITS, HeadGroups, Settings, Window

GroupChoice = Literal["profile", "per-head", "four-heads", "all"]
# quantizers whose codes the packed cache holds; the others are simulated
PACKED_QUANTIZERS = ("uniform-token-max", "lloyd", "uniform")


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


class TokenRates(Settings):
    """Tokens at several rates: classes by the attention a token received while exact, each with widths of its own."""

    shares: tuple[float, ...] = Field(
        min_length=2, max_length=16, strict=False, description="of the tokens, in every class, least attended first"
    )

    @model_validator(mode="after")
    def _shares_fit(self) -> Self:
        if min(self.shares) <= 0 or abs(sum(self.shares) - 1.0) > 1e-6:
            raise ValueError("shares must be positive and sum to 1")
        return self


class Recipe(Settings):
    """One method as a choice on the axes of the design: transform, weights, allocator, quantizer, window."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="part of file names: no space, no slash")
    summary: str
    transform: Literal["identity", "whiten", "metric", "hadamard", "query", "pca", "codebook", "global"] = "whiten"
    key_weight: Literal["none", "query", "fisher"] = "query"
    value_weight: Literal["none", "output", "fisher"] = "output"
    key_groups: GroupChoice = Field(
        "profile", description="heads whose keys are transformed jointly: the profile's groups, each alone, or all"
    )
    value_groups: GroupChoice = Field("profile", description="the same for values")
    allocator: Literal[
        "waterfill", "per-layer", "global", "uniform", "one-width", "rank", "per-head", "block-dp", "none"
    ] = "waterfill"
    pool: Literal["separate", "joint"] = Field(
        "separate", description="one budget for keys and one for values, or both in one"
    )
    curve: Literal["exponential", "lloyd", "uniform"] = Field(
        "exponential", description="distortion at b bits: 4^-b, Lloyd-Max's, or that of evenly spaced levels"
    )
    quantizer: Literal[
        "uniform-token-max",
        "lloyd",
        "uniform",
        "grouped-minmax",
        "lloyd-norm",
        "nonuniform-outlier",
        "block-max",
        "float8",
        "quanto",
        "hqq",
        "float16",
    ] = "uniform-token-max"
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
    tokens: TokenRates | None = Field(None, description="classes of tokens; others do not write this field")

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = handler(self)
        return data if self.tokens is not None else {key: part for key, part in data.items() if key != "tokens"}

    @model_validator(mode="after")
    def _axes_fit(self) -> Self:
        if self.min_bits > self.max_bits:
            raise ValueError(f"min_bits ({self.min_bits}) exceeds max_bits ({self.max_bits})")
        if self.widths is not None and (
            sorted(set(self.widths)) != list(self.widths)
            or not self.widths
            or self.widths[0] != self.min_bits
            or self.widths[-1] != self.max_bits
        ):
            raise ValueError("widths must rise from min_bits to max_bits")
        if (self.quantizer == "float16") != (self.allocator == "none"):
            raise ValueError('quantizer "float16" and allocator "none" go together')
        if self.tokens is not None and (not self.packed or self.allocator != "waterfill" or self.protect.layers):
            raise ValueError('tokens need a packed quantizer, allocator "waterfill" and no protected layers')
        if not self.window.exact and not self.packed:
            raise ValueError("a window of 8 bits needs a packed quantizer")
        if self.pool == "joint" and (self.allocator != "waterfill" or self.protect.layers):
            raise ValueError('pool "joint" needs allocator "waterfill" and no protected layers')
        if self.pool == "joint" and (self.key_weight == "fisher") != (self.value_weight == "fisher"):
            raise ValueError('pool "joint" weighs both sides by "fisher" or neither: nothing else is in nats')
        return self

    @model_validator(mode="after")
    def _methods_fit(self) -> Self:
        for axis, needs in _NEEDS.items():
            for choice, wanted in needs.items():
                for other, values in wanted.items() if getattr(self, axis) == choice else ():
                    if getattr(self, other) not in values:
                        listed = " or ".join(f'"{value}"' for value in values)
                        raise ValueError(f'{axis} "{choice}" goes with {other} {listed}')
        if self.coordinates == "post-rope" and (self.packed or self.transform not in ("identity", "hadamard")):
            raise ValueError(
                'coordinates "post-rope" go with what is not calibrated before RoPE: an "identity" or '
                '"hadamard" transform, and no packed quantizer'
            )
        if self.allocator == "per-head" and not 1 <= self.min_bits < self.max_bits <= 8:
            raise ValueError(
                'allocator "per-head" fits curves to widths from min_bits to max_bits, two of 1 .. 8 at least'
            )
        along_tokens = "channel" in (self.coding.key_axis, self.coding.value_axis)
        if along_tokens and (self.coding.group is None or self.window.flush % self.coding.group):
            raise ValueError("groups along a channel need a coding.group that divides window.flush")
        return self

    @property
    def packed(self) -> bool:
        """Whether the packed cache can hold its codes; other methods are simulated."""
        return self.quantizer in PACKED_QUANTIZERS

    @property
    def allowed_widths(self) -> tuple[int, ...]:
        """The widths a channel may have, rising."""
        return self.widths if self.widths is not None else tuple(range(self.min_bits, self.max_bits + 1))

    def head_groups(self, kv_heads: int, profile: HeadGroups) -> HeadGroups:
        """The recipe's head groups on a model of ``kv_heads`` with the groups of its ``profile``."""
        return chosen_groups(self.key_groups, self.value_groups, kv_heads, profile)

    @property
    def transform_name(self) -> str:
        """Folder of the recipe's Transform: ``metric``, ``metric-keys-per-head-values-all``."""
        return transform_name(self.transform, self.key_groups, self.value_groups)


# what a choice on one axis asks of the others: the published methods are not built of parts that all fit together
_PACKABLE = ("identity", "whiten", "metric", "hadamard", "query")
_PACKED_NEED: dict[str, tuple[str, ...]] = {
    "transform": _PACKABLE,
    "allocator": ("waterfill", "per-layer", "global", "uniform"),
}
_ONE_WIDTH: dict[str, tuple[str, ...]] = {"allocator": ("one-width",)}
_NEEDS: dict[str, dict[str, dict[str, tuple[str, ...]]]] = {
    "quantizer": {
        **dict.fromkeys(PACKED_QUANTIZERS, _PACKED_NEED),
        "grouped-minmax": {"transform": _PACKABLE, "allocator": ("one-width", "rank", "per-head")},
        "lloyd-norm": _ONE_WIDTH | {"transform": ("identity", "hadamard")},
        "nonuniform-outlier": _ONE_WIDTH | {"transform": ("codebook",)},
        "block-max": {"allocator": ("block-dp",)},
        "float8": _ONE_WIDTH | {"transform": ("identity",)},
        "quanto": _ONE_WIDTH | {"transform": ("identity",)},
        "hqq": _ONE_WIDTH | {"transform": ("identity",)},
    },
    "allocator": {
        "rank": {"transform": ("whiten",)},
        "per-head": {"transform": ("hadamard",), "key_groups": ("per-head",), "value_groups": ("per-head",)},
        "block-dp": {"transform": ("pca", "global")},
    },
    "transform": {
        "pca": {"quantizer": ("block-max",)},
        "global": {"quantizer": ("block-max",)},
        "codebook": {"quantizer": ("nonuniform-outlier",)},
        "query": {"key_groups": ("per-head",), "value_groups": ("per-head",)},
    },
}


def transform_name(kind: str, keys: GroupChoice, values: GroupChoice) -> str:
    """Folder name of a Transform: its kind, then every choice of head groups that is not the profile's."""
    return "".join(
        [kind, *(f"-{side}-{choice}" for side, choice in (("keys", keys), ("values", values)) if choice != "profile")]
    )


def chosen_groups(keys: GroupChoice, values: GroupChoice, kv_heads: int, profile: HeadGroups) -> HeadGroups:
    """What two choices come to on a model of ``kv_heads`` with the groups of its ``profile``."""
    quads = next(count for count in range(1, kv_heads + 1) if kv_heads % count == 0 and kv_heads // count <= 4)
    fixed = {"per-head": kv_heads, "four-heads": quads, "all": 1}
    return HeadGroups(k=fixed.get(keys, profile.k), v=fixed.get(values, profile.v))
