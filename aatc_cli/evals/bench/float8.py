"""A cache of 8-bit floats (e4m3), as a baseline: half the bytes of float16 with nothing but a scale per head.

torch has no attention that reads one, so `float8_triton` has a split-KV kernel; here are the cache, its float64 twin,
and the launch. Keys are stored after RoPE, as serving engines do, and one float32 scale is kept per sequence, kv head
and side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor

from aatc_cli.errors import AatcError

Operands = Literal["float8", "float16", "bfloat16"]

LARGEST = 448.0
_LOG2E = 1.4426950408889634
_ROWS = 16
# tokens of a block, warps, pipeline stages, programs per multiprocessor
_LAUNCHES = ((64, 4, 3, 2), (128, 4, 3, 2), (128, 8, 2, 2), (64, 4, 3, 4))


@dataclass(frozen=True)
class Float8Cache:
    """Keys after RoPE and values, e4m3 [B, H, N, D], with scales float32 [B, H]: a vector is its numbers times that."""

    keys: Tensor
    values: Tensor
    key_scale: Tensor
    value_scale: Tensor

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> Float8Cache:
        """From vectors [B, H, N, D] in any float dtype; the largest of a head becomes 448."""
        parts, scales = [], []
        for side in (keys, values):
            scale = side.abs().amax((2, 3)).to(torch.float32).clamp_min(1e-20) / LARGEST
            parts.append((side / scale[:, :, None, None].to(side.dtype)).to(torch.float8_e4m3fn))
            scales.append(scale)
        return cls(*parts, *scales)

    @classmethod
    def random(cls, shape: tuple[int, int, int, int], device: torch.device, generator: torch.Generator) -> Float8Cache:
        """Of normal vectors [B, H, N, D], one sequence at a time."""
        numbers = [torch.empty(shape, dtype=torch.float8_e4m3fn, device=device) for _ in range(2)]
        scales = [torch.empty(shape[:2], dtype=torch.float32, device=device) for _ in range(2)]
        whole = cls(*numbers, *scales)
        for row in range(shape[0]):
            one = cls.of(*(torch.randn(1, *shape[1:], device=device, generator=generator) for _ in range(2)))
            for name in ("keys", "values", "key_scale", "value_scale"):
                getattr(whole, name)[row] = getattr(one, name)[0]
        return whole

    @property
    def nbytes(self) -> int:
        """Bytes of numbers and scales."""
        return sum(part.nbytes for part in (self.keys, self.values, self.key_scale, self.value_scale))

    def copy(self) -> Float8Cache:
        """The same numbers elsewhere in memory."""
        return Float8Cache(self.keys.clone(), self.values.clone(), self.key_scale.clone(), self.value_scale.clone())

    def __getitem__(self, rows: slice) -> Float8Cache:
        return Float8Cache(self.keys[rows], self.values[rows], self.key_scale[rows], self.value_scale[rows])


def float8_attention(query: Tensor, cache: Float8Cache, lengths: Tensor, scaling: float) -> Tensor:
    """Torch twin of `Float8Decoder`: rotated queries [B, Hq, D] over the first ``lengths`` [B] tokens, in float64."""
    out = []
    for row, length in enumerate(lengths.tolist()):
        for head in range(cache.keys.shape[1]):
            keys, values = (
                side[row, head, :length].to(torch.float64) * scale[row, head].to(torch.float64)
                for side, scale in ((cache.keys, cache.key_scale), (cache.values, cache.value_scale))
            )
            mine = torch.unflatten(query[row], 0, (cache.keys.shape[1], -1))[head].to(torch.float64)
            out.append((mine @ keys.T * scaling).softmax(-1) @ values)
    return torch.stack(out).view(query.shape)


def rounded_query(query: Tensor) -> Tensor:
    """Queries [B, Hq, D] as a product of two e4m3 operands reads them: against one scale per head. -> float64."""
    unit = query.to(torch.float32).abs().amax(-1, keepdim=True).clamp_min(1e-20) / LARGEST
    return (query.to(torch.float32) / unit).to(torch.float8_e4m3fn).to(torch.float64) * unit.to(torch.float64)


@dataclass(frozen=True)
class Float8Config:
    """How the kernel is compiled and launched.

    operands: of the key product, e4m3 times e4m3, or e4m3 converted; values are converted to 16 bits always, since
    weights in 8 would be another approximation. tokens_first: tokens are rows of both products, queries their
    columns. ``fill``: programs per multiprocessor.
    """

    operands: Operands
    tokens_first: bool
    block: int
    warps: int
    stages: int
    fill: int

    @property
    def name(self) -> str:
        """Of operands and launch shape, for people."""
        form = "tokens" if self.tokens_first else "queries"
        return f"{self.operands} {form} first, {self.block} x {self.warps} warps x {self.stages} stages x {self.fill}"


def float8_configs() -> Iterator[Float8Config]:
    """What is tried; the plainest come first."""
    forms: list[tuple[Operands, bool]] = [("float16", False), ("float8", False), ("float16", True), ("float8", True)]
    for (operands, tokens_first), launch in product(forms, _LAUNCHES):
        yield Float8Config(operands, tokens_first, *launch)
    yield Float8Config("bfloat16", False, *_LAUNCHES[0])


def triton_missing() -> str | None:
    """Why the kernel cannot run, or None where Triton is installed."""
    try:
        import_module("triton")
    except ImportError:
        return "Triton is not installed (it comes with CUDA builds of torch)"
    return None


@lru_cache
def _kernels() -> Any:
    if reason := triton_missing():
        raise AatcError(f"the float8 baseline cannot run: {reason}", "pip install triton")
    return import_module("aatc_cli.evals.bench.float8_triton")


class Float8Decoder:
    """Decode attention over caches of one shape; launches are the same at every length, so they can be captured.

    ``processors``: multiprocessors of the device.
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        group: int,
        dim: int,
        capacity: int,
        config: Float8Config,
        processors: int,
        device: torch.device,
    ) -> None:
        self.kernels, self.config = _kernels(), config
        self.batch, self.kv_heads, self.group, self.dim, self.capacity = batch, kv_heads, group, dim, capacity
        blocks = -(-capacity // config.block)
        wanted = max(1, min(config.fill * processors // (batch * kv_heads), blocks))
        # every split whole blocks, and as many of them as another
        self.span = -(-blocks // wanted) * config.block
        self.splits = -(-capacity // self.span)
        rows = batch * kv_heads * self.splits * group
        self.part = torch.empty(rows, dim, dtype=torch.float32, device=device)
        self.stat = torch.empty(rows, 2, dtype=torch.float32, device=device)

    def __call__(self, query: Tensor, cache: Float8Cache, lengths: Tensor, scaling: float, out: Tensor) -> Tensor:
        """Rotated queries [B, Hq, D] over the first ``lengths`` (int32 [B], on the device) tokens -> ``out``."""
        c, tl = self.config, self.kernels.tl
        types = {"float8": tl.float8e4nv, "float16": tl.float16, "bfloat16": tl.bfloat16}
        padded = _power_of_two(self.dim)
        self.kernels.split_kernel[(self.batch * self.kv_heads, self.splits)](
            query,
            cache.keys,
            cache.values,
            cache.key_scale,
            lengths,
            self.part,
            self.stat,
            scaling * _LOG2E,
            self.capacity,
            self.span,
            self.kv_heads,
            G=self.group,
            M=max(_ROWS, _power_of_two(self.group)),
            D=self.dim,
            DP=padded,
            BLOCK=c.block,
            LARGEST=LARGEST if c.operands == "float8" else 1.0,
            KEY_TYPE=types[c.operands],
            VALUE_TYPE=tl.bfloat16 if c.operands == "bfloat16" else tl.float16,
            TOKENS_FIRST=c.tokens_first,
            num_warps=c.warps,
            num_stages=c.stages,
        )
        self.kernels.combine_kernel[(self.batch * self.kv_heads, self.group)](
            self.part,
            self.stat,
            cache.value_scale,
            out,
            self.splits,
            G=self.group,
            D=self.dim,
            DP=padded,
            S=_power_of_two(self.splits),
            num_warps=4,
        )
        return out


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
