"""The quantizers of transformers' own quantized caches (quanto, HQQ) as codecs; both are packages of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aatc_cli.errors import AatcError
from aatc_cli.methods.quantizers.packages import GROUP, LibraryQuantizer


@dataclass(frozen=True)
class QuantizedCacheCodec:
    """One site of ``heads`` heads under a backend at ``bits`` bits, ``flush`` tokens at a time as the cache packs them.

    Groups are of 64 neighbouring numbers of a head's tokens (axis 0), transformers' default. Tokens behind the last
    whole block are returned as they are.
    """

    layer: Any
    heads: int
    flush: int

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
        if rows.shape[2] * rows.shape[3] % GROUP:
            problem = f"groups of {GROUP} numbers do not fill {rows.shape[2]} tokens of {rows.shape[3]} channels"
            raise AatcError(problem, "use another recipe for this model")
        # HQQ asks its layer where the numbers are and in what dtype
        self.layer.keys = rows[:0]
        found: Tensor = self.layer._dequantize(self.layer._quantize(rows, 0))
        return found.reshape(rows.shape).transpose(1, 2).flatten(2).to(block.dtype)


def library_codec(quantizer: LibraryQuantizer, bits: int, heads: int, flush: int) -> QuantizedCacheCodec:
    """The codec of one site; raises `AatcError` when the package is missing, or has no such width."""
    from transformers import cache_utils

    if bits not in quantizer.widths:
        listed = ", ".join(map(str, quantizer.widths))
        raise AatcError(f"{quantizer.name} has no {bits}-bit form", f"use one of {listed} bits")
    try:
        layer = getattr(cache_utils, quantizer.layer)(nbits=bits, axis_key=0, axis_value=0, q_group_size=GROUP)
    except ImportError as error:
        problem = f"the {quantizer.name} cache needs the package {quantizer.package}"
        raise AatcError(problem, f"pip install {quantizer.package}") from error
    return QuantizedCacheCodec(layer, heads, flush)
