"""Limits of the kernel of tiles: models and windows that it does not hold, and how the dimensions of a head lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from aatc_cli.config import Window
from aatc_cli.core import Side
from aatc_cli.core.rope import RopeStyle
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.errors import AatcError
from aatc_cli.models.adapter import AttentionSite
from aatc_cli.models.rotary import rotary_frequencies
from aatc_cli.runtime.kernels.launch import fused_available, on_hopper

DIMS, MOST_GROUP = (64, 80, 96, 128, 256), 16
_OTHER = "use --cache packed, under generate"


def check_sites(sites: Sequence[AttentionSite], group: int, dim: int, window: Window) -> None:
    """Raise `AatcError` naming what of a model the kernel does not have."""
    if dim not in DIMS or group > MOST_GROUP:
        raise AatcError(f"the kernel of tiles has no heads of {dim} with {group} queries each", _OTHER)
    if window.sinks > 64:
        raise AatcError(f"the kernel of tiles has at most 64 sinks, this window {window.sinks}", _OTHER)
    for site in sites:
        if problem := _missing(site):
            raise AatcError(f"{site.name} {problem}, which the kernel of tiles does not have", _OTHER)
        if site.rope == "none" or site.rope != sites[0].rope:
            raise AatcError(f"{site.name} does not rotate its keys as fused tiles do", _OTHER)


def _missing(site: AttentionSite) -> str | None:
    """What of an attention the kernel does not have, for people."""
    if site.sliding_window:
        return "has a sliding window"
    if site.sinks is not None:
        return "has attention sinks of its own"
    return "caps its scores" if site.softcap is not None else None


def require_even(codecs: Mapping[Side, TileCodec]) -> None:
    """Raise `AatcError` for codecs whose levels are not evenly spaced."""
    if any(codec.codec.quantizer != "uniform" for codec in codecs.values()):
        raise AatcError(
            "the kernel of tiles sums evenly spaced levels by their digits, and this plan's are not",
            "plan with loss-aware-tiles-even, or use --cache packed",
        )


def check_device(device: torch.device) -> None:
    """Raise `AatcError` for a GPU that the kernel does not run on; on a CPU torch reads the same records."""
    if device.type != "cuda":
        return
    if not on_hopper(device):
        major, minor = torch.cuda.get_device_capability(device)
        raise AatcError(
            f"fused tiles need a GPU of compute capability 9.0, and this one has {major}.{minor}",
            f"{_OTHER}, or plan with loss-aware-fused, whose kernels run from compute capability 8.0 on",
        )
    if not fused_available():
        raise AatcError("fused tiles need CuPy on a GPU", f"pip install 'aatc[cuda]', or {_OTHER}")


def rotation_of(model: nn.Module, dim: int, style: RopeStyle) -> tuple[Tensor, Tensor | None]:
    """Radians a token of all pairs of a head, float64 [D / 2], and the order of its dimensions as of `pair_order`.

    On the model's device. Raises `AatcError` where frequencies depend on the length, or cos and sin are scaled.
    """
    device = next(model.parameters()).device
    turning = rotary_frequencies(model, dim, partial=True).to(device)
    order = pair_order(dim, 2 * turning.numel(), style)
    still = torch.zeros(dim // 2 - turning.numel(), dtype=turning.dtype, device=device)
    return torch.cat((turning, still)), None if order is None else order.to(device)


def pair_order(dim: int, rotary: int, style: RopeStyle) -> Tensor | None:
    """Dimensions [D] of a head such that those that turn together lie half of it apart; None where they do.

    rotary: how many turn, the first of them; the others are pairs that do not.
    """
    whole = torch.arange(dim)
    turned, rest = whole[:rotary], whole[rotary:]
    halves = (turned[::2], turned[1::2]) if style == "interleaved" else turned.chunk(2)
    order = (
        torch.cat([part for pair in zip(halves, rest.chunk(2), strict=True) for part in pair])
        if dim > rotary
        else (torch.cat(halves))
    )
    return None if torch.equal(order, whole) else order
