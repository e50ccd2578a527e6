"""The byte law: how many bytes a compressed cache takes, explained cause by cause. Nothing else counts bytes.

Window rule: after token t is appended, blocks of f oldest non-sink tokens are packed while more than w recent ones are
left. Packed keys lie along channels (one row of bytes per token and bit plane), packed values along tokens (one run of
bytes per channel and flush block); a width is the sum of its power-of-two planes (5 = 4 + 1), so no code straddles a
byte. The recent window is a ring of w slots in the model's dtype, counted whole once it has been filled. Sliding layers
beside full ones are not compressed: each holds at most its own window of tokens as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from aatc_cli.config import Geometry, HeadGroups, Window
from aatc_cli.core import Side
from aatc_cli.core.overheads import Overheads
from aatc_cli.core.site_widths import SiteWidths

Widths = Sequence[Mapping[Side, Sequence[int]]]  # [layer][side], [C] each
HALF_BYTES = 2  # float16 and bfloat16, the reference and the exact part of the cache
# causes whose bytes are of the model's dtype
IN_FULL = ("sinks", "window", "sliding_layers")
CHANNEL_SCALE_BYTES = 4  # s_c is float32


def packed_tokens(tokens: int, window: Window) -> int:
    """Tokens in packed form when ``tokens`` are cached: whole flush blocks, leaving at most w recent ones exact."""
    excess = tokens - window.sinks - window.recent
    return window.flush * math.ceil(excess / window.flush) if excess > 0 else 0


def exact_slots(tokens: int, window: Window) -> tuple[int, int]:
    """Rows held in full precision: (sinks, slots of the recent ring)."""
    sinks = min(tokens, window.sinks)
    return sinks, min(tokens - sinks, window.recent)


@dataclass(frozen=True)
class CacheLayout:
    """Bytes of a whole model's cache. ``widths[layer] = (key site, value site)`` of the compressed layers.

    overheads: of a published method, in place of the token scales and matrices of the packed codecs. maps: bytes of
    those that predict.
    """

    geometry: Geometry
    window: Window
    groups: HeadGroups
    widths: tuple[tuple[SiteWidths, SiteWidths], ...]
    scale_bits: int = 16
    overheads: Overheads | None = None
    maps: int = 0

    @classmethod
    def of_bits(
        cls, geometry: Geometry, window: Window, groups: HeadGroups, bits: Widths, scale_bits: int = 16
    ) -> CacheLayout:
        """From a plan's widths: per layer a mapping with the widths of "k" and "v"."""
        pairs = tuple(
            (SiteWidths.of(layer["k"], window.flush), SiteWidths.of(layer["v"], window.flush)) for layer in bits
        )
        return cls(geometry, window, groups, pairs, scale_bits)

    @classmethod
    def nominal(
        cls, geometry: Geometry, window: Window, groups: HeadGroups, bits: float, scale_bits: int = 16
    ) -> CacheLayout:
        """From an average width alone, before any plan exists."""
        site = SiteWidths.nominal(geometry.channels, bits, window.flush)
        return cls(geometry, window, groups, ((site, site),) * geometry.layers, scale_bits)

    def breakdown(self, tokens: int, batch: int = 1) -> dict[str, int]:
        """Live cache bytes at ``tokens`` tokens per sequence, by cause; the values sum to `bytes`."""
        packed = packed_tokens(tokens, self.window)
        sinks, slots = exact_slots(tokens, self.window)
        row = exact_row_bytes(self.geometry, self.window)
        key_codes, value_codes, stored = self._codes(packed)
        parts = {
            "codes_keys": round(key_codes),
            "codes_values": round(value_codes),
            "padding": round(stored) - round(key_codes) - round(value_codes),
            **self._beside_codes(packed),
            "sinks": sinks * self.geometry.layers * row,
            "window": slots * self.geometry.layers * row,
        }
        if self.geometry.sliding_layers:
            parts["sliding_layers"] = sliding_bytes(self.geometry, tokens)
        return {cause: batch * count for cause, count in parts.items()}

    def _codes(self, packed: int) -> tuple[float, float, float]:
        """Bytes of the codes of ``packed`` tokens, of keys and of values, and what both take with padding."""
        keys = packed * math.fsum(k.code_bits for k, _ in self.widths) / 8
        values = packed * math.fsum(v.code_bits for _, v in self.widths) / 8
        stored = packed * math.fsum(k.key_row_bytes for k, _ in self.widths)
        stored += packed / self.window.flush * math.fsum(v.value_block_bytes for _, v in self.widths)
        return keys, values, stored

    def _beside_codes(self, packed: int) -> dict[str, int]:
        """Bytes that go with the codes of ``packed`` tokens, by cause."""
        if self.overheads is None:
            groups = self.groups.k + self.groups.v
            return {"token_scales": packed * groups * self.geometry.layers * self.scale_bits // 8}
        return {cause: packed // self.window.flush * count for cause, count in self.overheads.live.items()}

    def bytes(self, tokens: int, batch: int = 1) -> int:
        """Live cache bytes at ``tokens`` tokens per sequence."""
        return sum(self.breakdown(tokens, batch).values())

    def static_breakdown(self) -> dict[str, int]:
        """Bytes that do not grow with tokens: decode rows of coded channels in float16, scales and widths.

        The encode matrix A costs nothing extra (it is folded into the projection, Eq. transformed-cache).
        """
        if self.overheads is not None:
            return dict(self.overheads.static)
        keys, values = sum(k.active for k, _ in self.widths), sum(v.active for _, v in self.widths)
        channels = self.geometry.channels
        return {
            "decode_matrices": (keys * (channels // self.groups.k) + values * (channels // self.groups.v)) * HALF_BYTES,
            "channel_scales": (keys + values) * CHANNEL_SCALE_BYTES,
            "widths": 2 * self.geometry.layers * self.geometry.channels,
            **({"prediction_maps": self.maps} if self.maps else {}),
        }

    def with_maps(self, nbytes: int) -> Self:
        """The same with maps of so many bytes."""
        return replace(self, maps=nbytes) if nbytes else self

    def reference_bytes(self, tokens: int, batch: int = 1) -> int:
        """Bytes of the float16 cache of the same tokens."""
        return fp16_bytes(self.geometry, tokens, batch)

    def ratio(self, tokens: int) -> float:
        """Compression ratio as the paper counts it: float16 cache over codes, scales, sinks and window."""
        return self.reference_bytes(tokens) / self.bytes(tokens)

    def bits_at(self, tokens: int) -> float:
        """All live bytes at a context as bits per cached number; 16 for the float16 cache."""
        return 16.0 * self.bytes(tokens) / self.reference_bytes(tokens)

    @property
    def mean_bits(self) -> float:
        """Code bits per channel of a packed token, on average over sites."""
        total = math.fsum(site.code_bits for pair in self.widths for site in pair)
        return total / (2 * self.geometry.layers * self.geometry.channels)

    @property
    def keep(self) -> float:
        """Share of the packed tokens that stay, the rest being evicted."""
        return 1.0

    def of_prompt(self, tokens: int, shares: Sequence[Sequence[float]] = ()) -> CacheLayout:
        """The same behind a prompt of ``tokens`` tokens of which kv heads were found to keep ``shares`` [layer][head].

        Where all tokens stay it is the same law.
        """
        return self

    @property
    def bits_packed(self) -> float:
        """Bits that a number of a packed token takes with all that goes with it: no sinks, window or sliding layers.

        What `bits_at` tends to as the context grows; padding is that of whole flush blocks.
        """
        return self._bits_of_blocks(1)

    def _bits_of_blocks(self, blocks: int) -> float:
        window, apart = self.window, (*IN_FULL, "received")
        parts = self.breakdown(window.sinks + window.recent + blocks * window.flush)
        packed = sum(count for cause, count in parts.items() if cause not in apart)
        return 16.0 * packed / fp16_bytes(self.geometry.of_full_layers(), blocks * window.flush)

    def of_full_layers(self) -> CacheLayout:
        """The law of the compressed layers alone, as if the model had no sliding ones."""
        return replace(self, geometry=self.geometry.of_full_layers())

    def summary(self, tokens: int, batch: int = 1) -> dict[str, object]:
        """Everything above at one context, as JSON-ready data; with sliding layers, the full ones apart as well."""
        total, static = self.bytes(tokens, batch), self.static_breakdown()
        reference = self.reference_bytes(tokens, batch)
        full = self.of_full_layers()
        apart = {"ratio_full_layers": full.ratio(tokens), "bits_at_context_full_layers": full.bits_at(tokens)}
        return {
            "context": tokens,
            "batch": batch,
            "bytes_fp16": reference,
            "bytes_total": total,
            "bytes_static": sum(static.values()),
            "ratio": reference / total,
            "ratio_with_static": reference / (total + sum(static.values())),
            "bits_packed": self.bits_packed,
            "bits_at_context": 16.0 * total / reference,
            "breakdown": self.breakdown(tokens, batch),
            "breakdown_static": static,
            **(apart if self.geometry.sliding_layers else {}),
        }

    def recorded(self, tokens: int) -> dict[str, object]:
        """`summary` under the names of version 2 of a plan's manifest, which its digest covers."""
        old = {"bits_at_context": "bits_effective", "bits_at_context_full_layers": "bits_effective_full_layers"}
        parts = self.summary(tokens)
        return {old.get(name, name): value for name, value in parts.items() if name != "bits_packed"}


def exact_row_bytes(geometry: Geometry, window: Window) -> int:
    """Bytes of one token of one layer in sinks or window; 8 bits are a byte per channel and a scale per head."""
    narrow = geometry.channels + geometry.kv_heads * HALF_BYTES
    return sum(narrow if bits == 8 else geometry.channels * HALF_BYTES for bits in (window.key_bits, window.value_bits))


def fp16_bytes(geometry: Geometry, tokens: int, batch: int = 1) -> int:
    """Bytes of an uncompressed float16 cache: 2 sites per layer, C channels; of sliding layers at most a window."""
    full = tokens * 2 * geometry.layers * geometry.channels * HALF_BYTES
    return batch * (full + sliding_bytes(geometry, tokens))


def sliding_bytes(geometry: Geometry, tokens: int) -> int:
    """Bytes that the exact sliding layers of a model hold of one sequence of ``tokens`` tokens."""
    held = min(tokens, geometry.sliding_window or 0)
    return held * 2 * geometry.sliding_layers * geometry.channels * HALF_BYTES
