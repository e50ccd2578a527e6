"""Attention that the tokens of a window receive in one layer, by which they are ranked in their tiles."""

from __future__ import annotations

from torch import Tensor

from aatc_cli.config import Window
from aatc_cli.core.received import received_by_head
from aatc_cli.core.tile_rule import tile_lags
from aatc_cli.models.attention import LayerInputs


def received_in(inputs: LayerInputs, window: Window) -> Tensor:
    """What every token receives from the queries that count for its tile, by kv head [B, H, T]; exact attention."""
    site = inputs.site
    return received_by_head(
        inputs.query,
        inputs.key,
        inputs.scaling,
        tile_lags(window.recent),
        sliding=inputs.sliding_window,
        sinks=site.sinks,
        softcap=site.softcap,
    )
