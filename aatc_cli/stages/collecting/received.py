"""Attention that the tokens of a window receive in one layer, before they are packed."""

from __future__ import annotations

from torch import Tensor

from aatc_cli.config import Window
from aatc_cli.core.received import received_by_head
from aatc_cli.core.received_bins import watched_lags
from aatc_cli.core.tile_classes import tile_lags
from aatc_cli.models.attention import LayerInputs


def received_in(inputs: LayerInputs, window: Window) -> tuple[Tensor, Tensor]:
    """What every token receives over all heads [B, T], while it is watched, and by kv head [B, H, T] for its tile."""
    return _received(inputs, watched_lags(window)).sum(1), _received(inputs, tile_lags(window.recent))


def _received(inputs: LayerInputs, lags: tuple[int, int]) -> Tensor:
    """r of every token and kv head [B, H, T] by the exact attention of one layer."""
    site = inputs.site
    return received_by_head(
        inputs.query,
        inputs.key,
        inputs.scaling,
        lags,
        sliding=inputs.sliding_window,
        sinks=site.sinks,
        softcap=site.softcap,
    )
