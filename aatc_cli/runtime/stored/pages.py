"""Pages: keys and values of neighbouring tokens as an engine keeps them, and as the rows that are coded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from aatc_cli.core import SIDES, Side
from aatc_cli.core.casting import saturated
from aatc_cli.errors import AatcError

# numbers that pages may hold, by what a chunk calls them
TYPES = {1: torch.float16, 2: torch.bfloat16, 3: torch.float32, 4: torch.float8_e4m3fn}
CODES = {dtype: code for code, dtype in TYPES.items()}
# of pages in 8-bit floats: what a number of each layer is worth, [L] by side
Scales = Mapping[Side, Tensor]


@dataclass(frozen=True)
class Pages:
    """Keys, rotated, and values of n neighbouring tokens of all compressed layers: [L, n, H, D] each, of one dtype."""

    keys: Tensor
    values: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """[L, n, H, D]."""
        return tuple(self.keys.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all its numbers."""
        return self.keys.nbytes + self.values.nbytes

    def of(self, side: Side) -> Tensor:
        """Keys or values."""
        return self.keys if side == "k" else self.values

    def part(self, first: int, count: int) -> Pages:
        """``count`` tokens from ``first`` on, of the same numbers."""
        return Pages(self.keys[:, first : first + count], self.values[:, first : first + count])

    @classmethod
    def joined(cls, parts: Sequence[Pages]) -> Self:
        """Pages of neighbouring tokens as one."""
        return cls(torch.cat([part.keys for part in parts], 1), torch.cat([part.values for part in parts], 1))

    def check(self, layers: int, tokens: int, heads: int, dim: int) -> None:
        """Raise `AatcError` unless it holds ``tokens`` tokens of this geometry in a type that is known."""
        wanted = (layers, tokens, heads, dim)
        if self.keys.dtype not in CODES or self.values.dtype != self.keys.dtype:
            raise AatcError(
                f"pages of {self.keys.dtype} and {self.values.dtype} are not coded",
                "give both in float16, bfloat16, float32 or float8_e4m3fn",
            )
        if tuple(self.keys.shape) != wanted or tuple(self.values.shape) != wanted:
            raise AatcError(
                f"pages are {list(self.keys.shape)} and {list(self.values.shape)}, a chunk is {list(wanted)}",
                "give whole chunks of the plan's model",
            )

    def rows(self, scales: Scales | None) -> dict[Side, Tensor]:
        """The rows [L, n, C] in float32; raises `AatcError` for one that is not finite."""
        found: dict[Side, Tensor] = {}
        for side in SIDES:
            rows = self.of(side).to(torch.float32).flatten(2)
            if scales is not None:
                rows = rows * scales[side].to(rows).view(-1, 1, 1)
            if not bool(torch.isfinite(rows).all()):
                raise not_finite()
            found[side] = rows
        return found

    @classmethod
    def of_rows(cls, rows: Mapping[Side, Tensor], heads: int, dtype: torch.dtype, scales: Scales | None) -> Self:
        """Pages of rows [L, n, C], saturated where ``dtype`` does not reach."""
        made = {}
        for side in SIDES:
            part = rows[side] if scales is None else rows[side] / scales[side].to(rows[side]).view(-1, 1, 1)
            made[side] = torch.unflatten(saturated(part, dtype), -1, (heads, -1))
        return cls(made["k"], made["v"])

    def exact(self, count: int) -> bytes:
        """The numbers of the first ``count`` tokens, as they are: keys, then values."""
        parts = [self.of(side)[:, :count].contiguous().cpu().view(torch.uint8).flatten() for side in SIDES]
        return torch.cat(parts).numpy().tobytes()

    def put_exact(self, data: memoryview, dtype: torch.dtype, scales: Scales | None) -> None:
        """Put the numbers that `exact` gave for pages of ``dtype`` in the place of the first tokens."""
        layers, _, heads, dim = self.keys.shape
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(2, layers, -1, heads, dim)
        for side, part in zip(SIDES, flat, strict=True):
            mine = self.of(side)
            wide = part.to(mine.device)
            if dtype != mine.dtype:
                wide = saturated(_scaled(wide.to(torch.float32), side, scales, dtype, mine.dtype), mine.dtype)
            mine[:, : part.shape[1]] = wide


def not_finite() -> AatcError:
    """The error for pages that are no keys and values."""
    return AatcError("keys or values of a page are not finite", "compute the tokens of the page again")


def _scaled(rows: Tensor, side: Side, scales: Scales | None, held: torch.dtype, wanted: torch.dtype) -> Tensor:
    """Exact rows [L, n, H, D] of pages of one type as those of another: 8-bit floats alone count in ``scales``."""
    if scales is None:
        return rows
    scale = scales[side].to(rows).view(-1, 1, 1, 1)
    rows = rows * scale if held == torch.float8_e4m3fn else rows
    return rows / scale if wanted == torch.float8_e4m3fn else rows
