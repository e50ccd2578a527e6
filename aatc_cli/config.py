"""Settings: what is computed. They are frozen, strict, and hashed into manifests; run options are not here."""

from __future__ import annotations

import math
import re
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from aatc_cli.errors import UsageError

MAX_BITS = 16
# of a context: more than any cache can hold, and counts of its bytes stay exact
_MOST_TOKENS = 2**40


class Settings(BaseModel):
    """Base of every settings model: immutable; a misspelt field or a value of another type is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Window(Settings):
    """Tokens kept exact or in 8 bits, the first ``sinks`` and the ``recent`` latest, flushed in blocks of ``flush``."""

    sinks: int = Field(4, ge=0, description="first tokens kept in full precision (s)")
    recent: int = Field(128, ge=1, description="recent tokens kept in full precision (w)")
    flush: int = Field(16, ge=1, description="tokens quantized at once when the window is full (f)")
    key_bits: Literal[8, 16] = Field(
        16, description="of keys in sinks and window: the model's dtype, or bytes with a scale per head; 16 not written"
    )
    value_bits: Literal[8, 16] = Field(16, description="the same of values")

    @property
    def exact(self) -> bool:
        """Whether sinks and window are held in the model's dtype."""
        return self.key_bits == self.value_bits == 16

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = handler(self)
        return {key: part for key, part in data.items() if not (key in ("key_bits", "value_bits") and part == 16)}

    @model_validator(mode="after")
    def _flush_fits(self) -> Self:
        if self.flush > self.recent:
            raise ValueError(f"flush ({self.flush}) must not exceed the recent window ({self.recent})")
        return self


class Geometry(Settings):
    """Shape of a model's key-value cache: everything the byte law and the allocator need to know of a model.

    The last three fields are of models that mix sliding layers, kept exact, with full ones; others do not write them.
    """

    layers: int = Field(ge=1, description="layers whose cache is compressed")
    heads: int = Field(ge=1, description="query heads")
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    sliding_layers: int = Field(0, ge=0, description="sliding layers beside full ones, kept exact")
    sliding_window: int | None = Field(None, ge=1, description="tokens that each of those holds at most")
    full_layers: tuple[int, ...] = Field((), strict=False, description="places of the full layers among all")

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = handler(self)
        mixed = ("sliding_layers", "sliding_window", "full_layers")
        return data if self.sliding_layers else {k: v for k, v in data.items() if k not in mixed}

    @model_validator(mode="after")
    def _sliding_fits(self) -> Self:
        if not (self.sliding_layers > 0) == (self.sliding_window is not None) == bool(self.full_layers):
            raise ValueError("sliding_layers, sliding_window and full_layers go together")
        places = sorted(set(self.full_layers))
        if places and (
            list(self.full_layers) != places
            or len(places) != self.layers
            or places[0] < 0
            or places[-1] >= self.layers + self.sliding_layers
        ):
            raise ValueError("full_layers must be the places of all full layers among all layers, in order")
        return self

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        return self

    def of_full_layers(self) -> Self:
        """The same without the sliding layers."""
        return self.model_copy(update={"sliding_layers": 0, "sliding_window": None, "full_layers": ()})

    def leading(self, count: int) -> int:
        """Compressed layers among the first ``count`` layers of the model."""
        return sum(place < count for place in self.full_layers) if self.full_layers else min(count, self.layers)

    @property
    def channels(self) -> int:
        """Channels of one site: kv_heads * head_dim (C)."""
        return self.kv_heads * self.head_dim


class HeadGroups(Settings):
    """How many groups the kv heads of a layer are cut into, for keys and for values; each is transformed jointly."""

    k: int = Field(ge=1, description="groups of the keys")
    v: int = Field(ge=1, description="groups of the values")

    @classmethod
    def both(cls, groups: int) -> Self:
        """The same number for keys and values."""
        return cls(k=groups, v=groups)

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


class Budget(Settings):
    """How much the packed cache may cost, in exactly one of three units."""

    unit: Literal["bits", "ratio", "bytes"]
    value: float = Field(gt=0)
    context: int | None = Field(
        None, ge=1, le=_MOST_TOKENS, description="tokens at which a ratio or a byte size must hold"
    )

    @model_validator(mode="after")
    def _unit_fits(self) -> Self:
        if self.unit == "bits" and self.value > MAX_BITS:
            raise ValueError(f"a budget of {self.value:g} bits is above the {MAX_BITS} bits a channel can hold")
        if self.unit != "bits" and self.context is None:
            raise ValueError(f"a budget in {self.unit} needs --context, the number of tokens it must hold at")
        return self

    @property
    def label(self) -> str:
        """Short name used in file names and tables: ``2``, ``2.5``, ``5.82x-8192``, ``184000000B-8192``.

        Budgets that differ have labels that differ, since plans lie under them.
        """
        number = str(self.value).removesuffix(".0")
        if self.unit == "bits":
            return number
        suffix = {"ratio": "x", "bytes": "B"}[self.unit]
        return f"{number}{suffix}-{self.context}"


_SIZES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str) -> int:
    """Bytes of ``184MB``, ``1.5GiB`` or ``1000``; raises `UsageError` on an unknown unit or a bad number."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _SIZES:
        raise UsageError(f"cannot read the size {text!r}", "write a number with B, KB, MB, GB, KiB, MiB or GiB: 184MB")
    size = float(match[1]) * _SIZES[match[2].upper()]
    if not math.isfinite(size):
        raise UsageError(f"the size {text[:20]}... is no number of bytes", "try 184MB")
    return int(size)


def make_budget(
    *, bits: float | None = None, ratio: float | None = None, size: str | None = None, context: int | None = None
) -> Budget:
    """Build a `Budget` from command-line values; raises `UsageError` naming the option that is wrong."""
    given = [name for name, value in (("--budget", bits), ("--ratio", ratio), ("--bytes", size)) if value is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise UsageError(f"exactly one of --budget, --ratio and --bytes is needed, got {found}", "try --budget 2.5")
    if bits is not None:
        unit, value = "bits", bits
    elif ratio is not None:
        unit, value = "ratio", ratio
    else:
        assert size is not None
        unit, value = "bytes", float(parse_size(size))
    if not math.isfinite(value) or value <= 0:
        example = {"bits": "--budget 2.5", "ratio": "--ratio 5.8", "bytes": "--bytes 184MB"}[unit]
        raise UsageError(f"{given[0]} must be a positive number, got {value:g}", f"try {example}")
    if unit != "bits" and context is None:
        raise UsageError(f"{given[0]} needs --context, the number of tokens it must hold at", "try --context 8192")
    try:
        return Budget.model_validate({"unit": unit, "value": value, "context": context if unit != "bits" else None})
    except ValidationError as error:
        message = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        raise UsageError(message, "budgets run from a little above 0 to 16 bits per channel") from error
