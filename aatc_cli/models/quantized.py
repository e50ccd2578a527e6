"""The quantizers of transformers' own quantized caches (quanto, HQQ) as codecs; both are packages of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from aatc_cli.core.overheads import QUANTO_GROUP
from aatc_cli.errors import AatcError

Backend = Literal["quanto", "hqq"]
# the package of each backend, and the widths and the class of transformers that it serves
_BACKENDS: dict[Backend, tuple[str, tuple[int, ...], str]] = {
    "quanto": ("optimum-quanto", (2, 4), "QuantoQuantizedLayer"),
    "hqq": ("hqq", (1, 2, 3, 4, 8), "HQQQuantizedLayer"),
}


@dataclass(frozen=True)
class QuantizedCacheCodec:
    """One site of ``heads`` heads under a backend at ``bits`` bits, ``flush`` tokens at a time as the cache packs them.

    Groups are of 64 neighbouring numbers of a head's tokens (axis 0), transformers' default. Tokens behind the last
    whole block are returned as they are.
    """

    layer: Any
    heads: int
    flush: int

    @classmethod
    def of(cls, backend: Backend, bits: int, heads: int, flush: int) -> QuantizedCacheCodec:
        """Raises `AatcError` when the backend's package is missing, or has no such width."""
        from transformers import cache_utils

        package, widths, name = _BACKENDS[backend]
        if bits not in widths:
            raise AatcError(f"{backend} has no {bits}-bit form", f"use one of {', '.join(map(str, widths))} bits")
        try:
            layer = getattr(cache_utils, name)(nbits=bits, axis_key=0, axis_value=0, q_group_size=QUANTO_GROUP)
        except ImportError as error:
            raise AatcError(f"the {backend} cache needs the package {package}", f"pip install {package}") from error
        return cls(layer, heads, flush)

    def reconstruct(self, x: Tensor) -> Tensor:
        """The vectors [B, T, C] as the cache returns them, in the dtype of ``x``."""
        whole = x.shape[1] // self.flush * self.flush
        parts = [self._coded(block) for block in torch.split(x[:, :whole], self.flush, 1) if block.shape[1]]
        return torch.cat([*parts, x[:, whole:]], 1)

    def to(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> QuantizedCacheCodec:
        """Nothing to move."""
        return self

    def _coded(self, block: Tensor) -> Tensor:
        rows = torch.unflatten(block, -1, (self.heads, -1)).transpose(1, 2).contiguous().to(torch.float32)
        if rows.shape[2] * rows.shape[3] % QUANTO_GROUP:
            problem = f"groups of {QUANTO_GROUP} numbers do not fill {rows.shape[2]} tokens of {rows.shape[3]} channels"
            raise AatcError(problem, "use another recipe for this model")
        # HQQ asks its layer where the numbers are and in what dtype
        self.layer.keys = rows[:0]
        found: Tensor = self.layer._dequantize(self.layer._quantize(rows, 0))
        return found.reshape(rows.shape).transpose(1, 2).flatten(2).to(block.dtype)
