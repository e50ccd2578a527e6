"""What a fused cache never changes: tables of every layer, and the shape of the model's attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aatc_cli.config import Window
from aatc_cli.core import Side
from aatc_cli.core.codec import TransformCodec
from aatc_cli.runtime.kernels.encode import EncodeTables
from aatc_cli.runtime.kernels.tables import LayerTables


@dataclass(frozen=True)
class FusedLayer:
    """Static tables of one layer."""

    codecs: dict[Side, TransformCodec]
    tables: LayerTables
    encode: EncodeTables


@dataclass(frozen=True)
class FusedStatic:
    """Tables and shape of all layers. Every kv head is coded alone; frequencies float32 [D / 2]."""

    layers: tuple[FusedLayer, ...]
    window: Window
    dtype: torch.dtype
    heads: int
    kv_heads: int
    dim: int
    frequencies: Tensor
    scaling: float

    @property
    def slots(self) -> int:
        """Exact rows per sequence: sinks and ring."""
        return self.window.sinks + self.window.recent

    @property
    def channels(self) -> int:
        """Channels of one side."""
        return self.kv_heads * self.dim
