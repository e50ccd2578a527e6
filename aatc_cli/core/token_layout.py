"""The byte law of a cache with token rates: one packed stream for each class, and a tag that says which token is where.

Of P packed tokens, class k of layer l holds those between the P-fold cumulated shares, rounded: whole tokens, P in all.
Its keys take one row each, its values whole blocks of f tokens of the stream, of which the last may be part empty, and
its token scales none where it codes nothing. Beside the streams a layer keeps ceil(log2 n) bits per packed token, in
whole bytes per flush block: its class, from which a token's place in its stream and its position follow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Self

from aatc_cli.config import Geometry, HeadGroups, Window
from aatc_cli.core import Side
from aatc_cli.core.layout import CacheLayout, SiteWidths, Widths

THRESHOLD_BYTES = 4  # float32
_MANY_BLOCKS = 1 << 16
Shares = Sequence[Sequence[float]]
Streams = tuple[tuple[SiteWidths, SiteWidths], ...]


@dataclass(frozen=True)
class TokenLayout(CacheLayout):
    """Bytes of a cache with n classes of tokens. ``widths`` are those of the channels that any class codes.

    streams[class][layer] = (key site, value site); shares[layer][class] of the packed tokens.
    """

    streams: tuple[Streams, ...] = ()
    shares: tuple[tuple[float, ...], ...] = ()

    @classmethod
    def of_classes(
        cls,
        geometry: Geometry,
        window: Window,
        groups: HeadGroups,
        bits: Sequence[Widths],
        shares: Shares,
        scale_bits: int = 16,
    ) -> Self:
        """From the widths bits[class][layer] of a plan and the shares of its classes."""
        streams = tuple(cls.of_bits(geometry, window, groups, layers, scale_bits).widths for layers in bits)
        widest: list[dict[Side, list[int]]] = [
            {
                side: [max(widths) for widths in zip(*(layer[side] for layer in layers), strict=True)]
                for side in layers[0]
            }
            for layers in zip(*bits, strict=True)
        ]
        base = CacheLayout.of_bits(geometry, window, groups, widest, scale_bits)
        return cls.of_streams(base, streams, shares)

    @classmethod
    def of_streams(cls, base: CacheLayout, streams: tuple[Streams, ...], shares: Shares) -> Self:
        """The law ``base`` of one stream, with a stream for every class."""
        held = tuple(tuple(float(share) for share in layer) for layer in shares)
        return cls(base.geometry, base.window, base.groups, base.widths, base.scale_bits, streams=streams, shares=held)

    def with_shares(self, shares: Shares) -> TokenLayout:
        """The same streams under other shares[layer][class]."""
        return replace(self, shares=tuple(tuple(float(share) for share in layer) for layer in shares))

    @property
    def mean_bits(self) -> float:
        """Code bits per channel of a packed token, on average over classes by their shares."""
        total = math.fsum(
            share * sum(site.code_bits for site in self.streams[k][layer])
            for layer, shares in enumerate(self.shares)
            for k, share in enumerate(shares)
        )
        return total / (2 * self.geometry.layers * self.geometry.channels)

    @property
    def bits_packed(self) -> float:
        """As of one stream, over so many blocks that the last ones of the streams, part empty, do not matter."""
        return self._bits_of_blocks(_MANY_BLOCKS)

    def stream_tokens(self, packed: int) -> list[list[int]]:
        """Tokens of every layer and class when ``packed`` tokens are packed."""
        edges = [[round(packed * math.fsum(layer[:k])) for k in range(len(layer))] + [packed] for layer in self.shares]
        return [[high - low for low, high in pairwise(layer)] for layer in edges]

    def _codes(self, packed: int) -> tuple[float, float, float]:
        keys, values, stored = [], [], []
        flush = self.window.flush
        for layer, counts in enumerate(self.stream_tokens(packed)):
            for stream, count in zip(self.streams, counts, strict=True):
                key, value = stream[layer]
                keys.append(count * key.code_bits / 8)
                values.append(count * value.code_bits / 8)
                stored.append(count * key.key_row_bytes + math.ceil(count / flush) * value.value_block_bytes)
        return math.fsum(keys), math.fsum(values), math.fsum(stored)

    def _beside_codes(self, packed: int) -> dict[str, int]:
        scales = 0
        for layer, counts in enumerate(self.stream_tokens(packed)):
            for stream, count in zip(self.streams, counts, strict=True):
                for site, groups in zip(stream[layer], (self.groups.k, self.groups.v), strict=True):
                    scales += count * groups if site.active else 0
        tag = math.ceil(math.ceil(math.log2(len(self.streams))) * self.window.flush / 8)
        blocks = packed // self.window.flush
        return {"token_scales": scales * self.scale_bits // 8, "class_tags": blocks * tag * self.geometry.layers}

    def static_breakdown(self) -> dict[str, int]:
        """As of one stream, with widths and thresholds for every class; matrices and scales serve all of them."""
        parts, count = super().static_breakdown(), len(self.streams)
        return {
            "decode_matrices": parts["decode_matrices"],
            "channel_scales": parts["channel_scales"],
            "widths": count * parts["widths"],
            "thresholds": self.geometry.layers * (count - 1) * THRESHOLD_BYTES,
        }
