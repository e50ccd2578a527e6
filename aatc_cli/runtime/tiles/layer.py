"""One layer between model vectors and tiles: what is packed, and what attention reads of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from aatc_cli.core import SIDES, Side
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.core.tile_packing import TilePacking
from aatc_cli.core.tile_rule import TileRule
from aatc_cli.core.transform import decode
from aatc_cli.models.adapter import debias, rebias

# tiles coded at once when a long prompt is packed, which bounds the float latents alive
_TILES = 16
_TILES_CUDA = 256


@dataclass(frozen=True)
class TileRows:
    """Tokens of tiles as attention reads them, by place: keys before RoPE and values [b, H, n, D], bias included.

    dropped [b, H, n]: true where a head keeps nothing of a token; None where all keep something of all.
    """

    keys: Tensor
    values: Tensor
    dropped: Tensor | None


class TileForm(Protocol):
    """How the tiles of a layer are held: as packed bytes, or as numbers that are given back the same."""

    nbytes: int

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
        self.biases = {side: None if bias is None else bias.detach() for side, bias in biases.items()}
        self.held: TileForm = TilePacking(codecs, rule, heads) if held is None else held
        kept = [self._by_head(codecs[side].coded()) for side in SIDES]
        gone = ~(kept[0] | kept[1])
        self.dropped = gone if bool(gone.any()) else None
        self.channels = int(codecs["k"].bits.shape[1])

    @property
    def device(self) -> torch.device:
        """Where its codecs are."""
        return self.codecs["k"].codec.encode.device

    def encode(self, rows: Mapping[Side, Tensor], received: Tensor, first: int) -> Tensor:
        """Tiles [b, m, n] of whole tiles of exact rows [b, m t, C], bias included; ``first`` counts packed tokens.

        received [b, orders, m t]: what attention the tokens received, by which they are ranked.
        """
        return self.encode_classes(rows, self.rule.classes_of(received, first, self.layer))

    def encode_classes(self, rows: Mapping[Side, Tensor], of_tokens: Tensor) -> Tensor:
        """As `encode`, of tokens whose classes [b, orders, m t] are known."""
        classes = torch.unflatten(of_tokens, -1, (-1, self.rule.tile)).transpose(1, 2)
        count = classes.shape[1]
        by_tile = {side: torch.unflatten(debias(rows[side], self.biases[side]), 1, (count, -1)) for side in SIDES}
        parts = []
        at_once = _TILES_CUDA if self.device.type == "cuda" else _TILES
        for start in range(0, count, at_once):
            part = slice(start, start + at_once)
            latents = {side: self.codecs[side].codec.latents(by_tile[side][:, part]) for side in SIDES}
            parts.append(self.held.pack(latents, classes[:, part]))
        return torch.cat(parts, 1)

    def read(self, data: Tensor) -> TileRows:
        """Tokens of tiles [b, m, n] in the order of their places."""
        latents, classes = self.held.unpack(data)
        found = {}
        for side in SIDES:
            rows = rebias(decode(latents[side], self.codecs[side].codec.decode), self.biases[side]).flatten(1, 2)
            found[side] = torch.unflatten(rows, -1, (self.heads, -1)).transpose(1, 2)
        dropped = None
        if self.dropped is not None:
            by_head = classes.transpose(1, 2).flatten(2).expand(-1, self.heads, -1)
            dropped = self.dropped[by_head, torch.arange(self.heads, device=by_head.device)[:, None]]
        return TileRows(found["k"], found["v"], dropped)

    def empty_tiles(self, batch: int) -> Tensor:
        """No tiles of ``batch`` sequences: [b, 0, n]."""
        return torch.empty(batch, 0, self.held.nbytes, dtype=torch.uint8, device=self.device)

    def _by_head(self, by_group: Tensor) -> Tensor:
        """What is of a head group [n, groups] as that of its heads [n, H]."""
        return by_group.repeat_interleave(self.heads // by_group.shape[1], 1)
