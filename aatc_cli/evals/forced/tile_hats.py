"""What tiles give back in the place of exact keys and values: of every class, or of the one that a token is of."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aatc_cli.core import SIDES, Side
from aatc_cli.core.rope import apply_rope
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.models.adapter import rebias
from aatc_cli.models.attention import LayerInputs

TileCodecs = Mapping[Side, TileCodec]


def class_hats(inputs: LayerInputs, codecs: TileCodecs, packed: slice) -> tuple[Tensor, Tensor]:
    """Keys (rotated) and values of the tokens in ``packed`` as each class gives them back. [n, B, H, P, D] each."""
    site, (heads, dim) = inputs.site, inputs.key.shape[1::2]
    sides = []
    for side, raw, bias in zip(SIDES, (inputs.k_raw, inputs.v_raw), (site.k_bias, site.v_bias), strict=True):
        rows = rebias(codecs[side].reconstruct(raw[:, packed]), bias)
        sides.append(torch.unflatten(rows, -1, (heads, dim)).transpose(2, 3))
    return _rotated(inputs, sides[0], packed), sides[1]


def _rotated(inputs: LayerInputs, keys: Tensor, places: slice) -> Tensor:
    """Keys [n, B, H, P, D] from before RoPE of the tokens at ``places``, rotated as the model does."""
    count, batch = keys.shape[:2]
    cos, sin = (table[:, places].expand(batch, -1, -1).repeat(count, 1, 1) for table in (inputs.cos, inputs.sin))
    return torch.unflatten(apply_rope(keys.flatten(0, 1), cos, sin, inputs.site.rope), 0, (count, batch))


def code_prompt(
    inputs: LayerInputs, codecs: TileCodecs, leaving: slice, classes: Tensor, held: tuple[Tensor, Tensor]
) -> None:
    """As `code_tile` of tokens that are many at once: none is coded for a class that it is not of. [B, orders, P]."""
    site, (heads, dim) = inputs.site, inputs.key.shape[1::2]
    sources = zip(SIDES, (inputs.k_raw, inputs.v_raw), (site.k_bias, site.v_bias), held, strict=True)
    for side, raw, bias, exact in sources:
        rows = rebias(codecs[side].reconstruct_chosen(raw[:, leaving], classes), bias)
        vectors = torch.unflatten(rows, -1, (heads, dim)).transpose(1, 2)
        if side == "k":
            vectors = _rotated(inputs, vectors[None], leaving)[0]
        exact[:, :, leaving] = vectors.to(exact.dtype)


def code_tile(
    leaving: slice, done: int, classes: Tensor, hats: tuple[Tensor, Tensor], held: tuple[Tensor, Tensor]
) -> None:
    """Put what the class of each token gives back in the place of the exact token. classes [B, H, t]."""
    index = classes[None, ..., None]
    for exact, hat in zip(held, hats, strict=True):
        tile = hat[:, :, :, done : done + classes.shape[2]]
        chosen = tile.gather(0, index.expand(1, *tile.shape[1:]))[0]
        exact[:, :, leaving] = chosen.to(exact.dtype)


def dropped_classes(codecs: TileCodecs, heads: int) -> Tensor | None:
    """What is added to the scores of a head for tokens of a class, -inf where it keeps none: [n, H], or None."""
    kept = [coded.repeat_interleave(heads // coded.shape[1], 1) for coded in (codecs[side].coded() for side in SIDES)]
    gone = ~(kept[0] | kept[1])
    # on a GPU a mask of nothing costs less than waiting for the answer whether it is one
    if not gone.is_cuda and not bool(gone.any()):
        return None
    return torch.zeros_like(gone, dtype=torch.float32).masked_fill(gone, -torch.inf)


def hide_tokens(hidden: Tensor, classes: Tensor, dropped: Tensor) -> None:
    """Fill the mask ``hidden`` [B, H, t] of tokens of ``classes`` [B, orders, t]."""
    heads = torch.arange(hidden.shape[1], device=hidden.device)[:, None]
    hidden.copy_(dropped[classes, heads])
