"""One layer between model vectors and tiles: what is packed, and what attention reads of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from aatc_cli.core import SIDES, Side
from aatc_cli.core.tile_classes import TileRule
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.core.tile_packing import TilePacking
from aatc_cli.core.transform import decode
from aatc_cli.models.adapter import debias, rebias

# tiles coded at once when a long prompt is packed, which bounds the float latents alive
_TILES = 16


@dataclass(frozen=True)
class TileRows:
    """Tokens of tiles as attention reads them, by place: keys before RoPE and values [b, H, n, D], bias included.

    hidden [b, H, n]: what is added to the scores, -inf where a head keeps nothing of a token; None if all keep all.
    """

    keys: Tensor
    values: Tensor
    hidden: Tensor | None


class TileForm(Protocol):
    """How the tiles of a layer are held: as packed bytes, or as vectors that are given back the same."""

    def pack(self, latents: Mapping[Side, Tensor], classes: Tensor) -> Tensor:
        """Tiles [..., n] of latents [..., t, C] of both sides and classes [..., orders, t]."""
        ...

    def unpack(self, data: Tensor) -> tuple[dict[Side, Tensor], Tensor]:
        """Latents [..., t, C] of both sides by place, and classes [..., orders, t], of tiles [..., n]."""
        ...


class TileLayer:
    """The codecs of one layer of a plan with tiles, on the model's device; no state per token."""

    def __init__(
        self,
        layer: int,
        codecs: Mapping[Side, TileCodec],
        biases: Mapping[Side, Tensor | None],
        rule: TileRule,
        heads: int,
        held: TileForm | None = None,
    ) -> None:
        self.layer, self.codecs, self.rule, self.heads = layer, dict(codecs), rule, heads
        self.biases = {side: None if biases[side] is None else biases[side].detach() for side in SIDES}  # type: ignore[union-attr]
        self.held: TileForm = TilePacking(codecs, rule, heads) if held is None else held
        kept = [self._by_head(codecs[side].coded()) for side in SIDES]
        gone = ~(kept[0] | kept[1])
        self.dropped = torch.zeros(gone.shape).masked_fill(gone, -torch.inf).to(gone.device) if bool(gone.any()) else None

    @property
    def device(self) -> torch.device:
        """Where its codecs are."""
        return self.codecs["k"].codec.encode.device

    def encode(self, rows: Mapping[Side, Tensor], received: Tensor, first: int) -> Tensor:
        """Tiles [b, m, n] of whole tiles of exact rows [b, m t, C], bias included; ``first`` counts packed tokens.

        received [b, orders, m t]: what attention the tokens received, by which they are ranked.
        """
        classes = self.rule.classes_of(received, first, self.layer).unflatten(-1, (-1, self.rule.tile)).transpose(1, 2)
        count = classes.shape[1]
        by_tile = {side: debias(rows[side], self.biases[side]).unflatten(1, (count, -1)) for side in SIDES}
        parts = []
        for start in range(0, count, _TILES):
            part = slice(start, start + _TILES)
            latents = {side: self.codecs[side].codec.latents(by_tile[side][:, part]) for side in SIDES}
            parts.append(self.held.pack(latents, classes[:, part]))
        return torch.cat(parts, 1)

    def read(self, data: Tensor) -> TileRows:
        """Tokens of tiles [b, m, n] in the order of their places."""
        latents, classes = self.held.unpack(data)
        found = {}
        for side in SIDES:
            rows = rebias(decode(latents[side], self.codecs[side].codec.decode), self.biases[side]).flatten(1, 2)
            found[side] = rows.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        hidden = None
        if self.dropped is not None:
            by_head = classes.transpose(1, 2).flatten(2).expand(-1, self.heads, -1)
            hidden = self.dropped[by_head, torch.arange(self.heads, device=by_head.device)[:, None]]
        return TileRows(found["k"], found["v"], hidden)

    def _by_head(self, by_group: Tensor) -> Tensor:
        """What is of a head group [n, groups] as that of its heads [n, H]."""
        return by_group.repeat_interleave(self.heads // by_group.shape[1], 1)
