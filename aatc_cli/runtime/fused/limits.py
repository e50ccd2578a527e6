"""Limits of the fused kernels: windows and models that they do not hold."""

from __future__ import annotations

from aatc_cli.config import Window
from aatc_cli.core.tiles import TILE
from aatc_cli.errors import AatcError
from aatc_cli.models.adapter import AttentionLayer, AttentionSite


def check_form(layers: list[AttentionLayer], window: Window, group: int, dim: int) -> None:
    """Raise `AatcError` naming what of a window or a model the kernels do not have.

    group: query heads of a kv head; dim: of a head.
    """
    other = "use the packed cache without fused kernels"
    if not window.exact:
        raise AatcError("the fused cache holds no window of 8 bits", other)
    if window.flush != TILE or window.recent < TILE:
        raise AatcError(f"fused kernels pack {TILE} tokens at once, this window {window.flush}", other)
    if dim not in (64, 96, 128, 256) or group > 8:
        raise AatcError(f"the fused kernels have no heads of {dim} with {group} queries each", other)
    for layer in layers:
        if not isinstance(layer, AttentionSite):
            raise AatcError("the fused kernels have no layers that stay exact", "use the packed cache")
        if layer.k_bias is not None or layer.v_bias is not None or layer.rope != "half" or layer.sliding_window:
            raise AatcError(f"{layer.name} has a bias, a sliding window or another rotation than fused kernels", other)
        if layer.sinks is not None or layer.softcap is not None:
            raise AatcError(f"{layer.name} has sinks or capped scores, which fused kernels do not compute", other)
