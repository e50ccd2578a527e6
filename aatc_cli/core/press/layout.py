"""The byte law of a cache of which a press keeps some tokens, others in every kv head.

Of n packed tokens every head keeps floor(keep n), or the heads of a layer or model as many on average; min(keep, n)
where keep is a number of tokens, and bits of a packed number are then those of texts that are no longer. What stays of
a head is a stream of its own: keys a row each, values in whole blocks of f tokens, of which the last may be part empty.
Which tokens they are is a bit for every packed token and head, evicted or not (``class_tags``), in whole bytes; their
positions follow from it. A press that sums attention holds 32 bits for every token of a head that is held at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from aatc_cli.core.layout import CacheLayout, Widths, exact_slots, packed_tokens
from aatc_cli.core.press.choice import kept_count, longest_share
from aatc_cli.core.site_widths import SiteWidths

SUM_BYTES = 4  # float32
_MANY_BLOCKS = 1 << 16
Heads = tuple[tuple[SiteWidths, SiteWidths], ...]


@dataclass(frozen=True)
class PressLayout(CacheLayout):
    """Bytes of a pressed cache. heads[layer][head] = (keys, values) of one kv head.

    shares [layer][head]: what heads were found to keep of the packed tokens; empty: ``keep`` of them each. at_end: the
    press acts when a prompt ends, and what leaves the window later is kept whole; prompt: its tokens, None for all.
    """

    keep: float = 1.0
    heads: tuple[Heads, ...] = ()
    sums: bool = False
    at_end: bool = False
    prompt: int | None = None
    shares: tuple[tuple[float, ...], ...] = ()

    @classmethod
    def of(cls, law: CacheLayout, bits: Widths | None, keep: float, *, sums: bool, at_end: bool) -> Self:
        """Of the law of all tokens and the widths of every site, or without widths as if heads were alike."""
        count, dim, flush = law.geometry.kv_heads, law.geometry.head_dim, law.window.flush
        if bits is None:
            heads = tuple(((_part(keys, count), _part(values, count)),) * count for keys, values in law.widths)
        else:
            spans = [slice(head * dim, (head + 1) * dim) for head in range(count)]
            heads = tuple(
                tuple(
                    (SiteWidths.of(layer["k"][span], flush), SiteWidths.of(layer["v"][span], flush)) for span in spans
                )
                for layer in bits
            )
        parts: dict[str, Any] = {part.name: getattr(law, part.name) for part in fields(CacheLayout)}
        return cls(**parts, keep=keep, heads=heads, sums=sums, at_end=at_end)

    def of_prompt(self, tokens: int, shares: Sequence[Sequence[float]] = ()) -> PressLayout:
        """The same behind a prompt of so many tokens, where heads keep ``shares`` [layer][head]; none: even ones."""
        found = tuple(tuple(float(share) for share in layer) for layer in shares)
        return replace(self, prompt=tokens if self.at_end else None, shares=found)

    def token_bytes(self) -> tuple[tuple[float, ...], ...]:
        """What a token of a kv head takes that stays, by layer and head: codes, scales and its sum of attention.

        Overheads of published quantizers are alike in all heads.
        """
        flush, beside = self.window.flush, SUM_BYTES if self.sums else 0
        extra, scale = 0.0, self.scale_bits / 8
        if self.overheads is not None:
            places = flush * self.geometry.layers * self.geometry.kv_heads
            extra, scale = sum(self.overheads.live.values()) / places, 0.0
        return tuple(
            tuple(
                k.key_row_bytes
                + v.value_block_bytes / flush
                + scale * ((k.active > 0) + (v.active > 0))
                + extra
                + beside
                for k, v in layer
            )
            for layer in self.heads
        )

    def kept(self, packed: int) -> list[list[int]]:
        """Tokens that every head of every layer keeps of ``packed`` ones."""
        chosen = packed
        if self.at_end and self.prompt is not None:
            chosen = min(packed_tokens(self.prompt, self.window), packed)
        if not self.shares:
            one = kept_count(chosen, self.keep) + packed - chosen
            return [[one] * self.geometry.kv_heads] * self.geometry.layers
        return [[round(chosen * share) + packed - chosen for share in layer] for layer in self.shares]

    @property
    def mean_bits(self) -> float:
        """Code bits per channel of a packed token, evicted ones having none."""
        if not self.shares:
            return longest_share(self.keep) * super().mean_bits
        total = math.fsum(
            share * (keys.code_bits + values.code_bits)
            for layer, shares in zip(self.heads, self.shares, strict=True)
            for (keys, values), share in zip(layer, shares, strict=True)
        )
        return total / (2 * self.geometry.layers * self.geometry.channels)

    @property
    def bits_packed(self) -> float:
        """Over so many blocks that whole tokens do not matter; all of them of a prompt."""
        return replace(self, prompt=None, keep=longest_share(self.keep))._bits_of_blocks(_MANY_BLOCKS)

    def breakdown(self, tokens: int, batch: int = 1) -> dict[str, int]:
        """As without a press; what tokens in sinks and window have received is apart, as in tiles: ``received``."""
        parts = super().breakdown(tokens, batch)
        if not self.sums:
            return parts
        held = sum(exact_slots(tokens, self.window)) * self.geometry.layers * self.geometry.kv_heads
        return parts | {"received": batch * held * SUM_BYTES}

    def _codes(self, packed: int) -> tuple[float, float, float]:
        found = list(self._streams(packed))
        keys = math.fsum(count * k.code_bits / 8 for count, k, _ in found)
        values = math.fsum(count * v.code_bits / 8 for count, _, v in found)
        stored = math.fsum(
            count * k.key_row_bytes + math.ceil(count / self.window.flush) * v.value_block_bytes
            for count, k, v in found
        )
        return keys, values, stored

    def _beside_codes(self, packed: int) -> dict[str, int]:
        streams = list(self._streams(packed))
        tags = self.geometry.layers * self.geometry.kv_heads * math.ceil(packed / 8)
        parts = {"class_tags": tags}
        if self.sums:
            parts["attention_sums"] = SUM_BYTES * sum(count for count, _, _ in streams)
        if self.overheads is None:
            scales = sum(count * ((k.active > 0) + (v.active > 0)) for count, k, v in streams)
            return {"token_scales": scales * self.scale_bits // 8, **parts}
        share = sum(count for count, _, _ in streams) / len(streams) / self.window.flush
        return {cause: math.ceil(share * count) for cause, count in self.overheads.live.items()} | parts

    def _streams(self, packed: int) -> Iterator[tuple[int, SiteWidths, SiteWidths]]:
        """Tokens and widths of every head of every layer."""
        for layer, counts in zip(self.heads, self.kept(packed), strict=True):
            for (keys, values), count in zip(layer, counts, strict=True):
                yield count, keys, values


def _part(site: SiteWidths, count: int) -> SiteWidths:
    """A site's share of one of ``count`` heads that are alike."""
    return SiteWidths(
        site.code_bits / count, -(-site.active // count), site.key_row_bytes / count, site.value_block_bytes / count
    )
