"""What a fused cache never changes: tables of every layer, and the shape of the model's attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aatc_cli.config import Geometry, Window
from aatc_cli.core import SIDES, Side
from aatc_cli.core.codec import TransformCodec
from aatc_cli.errors import AatcError
from aatc_cli.runtime.kernels.encode import EncodeTables
from aatc_cli.runtime.kernels.launch import on_hopper
from aatc_cli.runtime.kernels.tables import HeadSide, LayerTables


@dataclass(frozen=True)
class FusedLayer:
    """Static tables of one layer."""

    codecs: dict[Side, TransformCodec]
    tables: LayerTables
    encode: EncodeTables


def fused_layer(codecs: Mapping[Side, Any], geometry: Geometry, like: Tensor, fast: int) -> FusedLayer:
    """Tables of one layer on the device of ``like``; raises `AatcError` for codecs that mix kv heads.

    fast: pairs of a head whose angles are computed anew for every token (`kernels.tables.fast_pairs`).
    """
    pair: dict[Side, TransformCodec] = {}
    for side in SIDES:
        codec = codecs[side]
        if not isinstance(codec, TransformCodec) or codec.groups != geometry.kv_heads:
            problem = "the fused kernels need a plan with every kv head on its own"
            raise AatcError(problem, "use recipe loss-aware-fused")
        pair[side] = codec.to(like.device, torch.promote_types(like.dtype, torch.float32))
    keys, values = ([HeadSide.of(pair[side], head) for head in range(geometry.kv_heads)] for side in SIDES)
    tables = LayerTables.of(keys, values, geometry.head_dim, fast, on_hopper(like.device))
    return FusedLayer(pair, tables, EncodeTables.of(pair, tables))


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
