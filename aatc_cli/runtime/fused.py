"""The compressed cache in tiles, at a fixed capacity, decoded by fused kernels (or by their torch twins on a CPU).

Lengths live on the device and every decode step does the same work, so that a step can be captured in a CUDA graph. A
batch has one length; beams and steps back are left to the packed cache of `runtime.session`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aatc_cli.config import Window
from aatc_cli.core import SIDES, Side
from aatc_cli.core.codec import Codec, TransformCodec
from aatc_cli.core.layout import packed_tokens
from aatc_cli.core.tiles import TILE
from aatc_cli.errors import AatcError
from aatc_cli.models.adapter import AttentionSite, attention_layers, geometry_of
from aatc_cli.models.attention import exact_attention
from aatc_cli.models.cache_hooks import CacheCall, hosted
from aatc_cli.models.compressed import CacheState, HostedCache, cache_keyword
from aatc_cli.models.refusals import check_model
from aatc_cli.models.rotary import rotary_frequencies
from aatc_cli.runtime.kernels.angles import slot_angles, tile_angles
from aatc_cli.runtime.kernels.append import Appender
from aatc_cli.runtime.kernels.decode import Decoder, DecodeShape
from aatc_cli.runtime.kernels.encode import EncodeTables, tiles_of
from aatc_cli.runtime.kernels.launch import fused_available, on_hopper
from aatc_cli.runtime.kernels.tables import HeadSide, LayerTables, fast_pairs
from aatc_cli.runtime.reference import decode_attention

# tiles of a prompt that are encoded at once
_CHUNK = 32


@dataclass(frozen=True)
class FusedLayer:
    """Static tables of one layer."""

    codecs: dict[Side, TransformCodec]
    tables: LayerTables
    encode: EncodeTables


@dataclass(frozen=True)
class FusedSpec:
    """What the caches of one model, plan and window share. frequencies float32 [D / 2]."""

    layers: tuple[FusedLayer, ...]
    window: Window
    dtype: torch.dtype
    heads: int
    kv_heads: int
    dim: int
    frequencies: Tensor
    scaling: float

    @property
    def slots(self) -> int:
        """Exact rows per sequence: sinks and ring."""
        return self.window.sinks + self.window.recent

    @property
    def channels(self) -> int:
        """Channels of one side."""
        return self.kv_heads * self.dim


class FusedState:
    """One cache of ``batch`` sequences and at most ``capacity`` tokens; implements `models.compressed.CacheState`.

    tokens, tiles, hidden int32 [B] on the device: cached tokens, packed tiles, first visible token.
    """

    def __init__(self, spec: FusedSpec, batch: int, capacity: int) -> None:
        self.spec, self.batch, self.capacity = spec, batch, capacity
        self.columns, self.recording = 0, False
        device, tiles = spec.frequencies.device, packed_tokens(capacity, spec.window) // TILE
        self.max_tiles = max(tiles, 1)
        self.data = [
            torch.zeros(batch, self.max_tiles, layer.tables.tile_bytes, dtype=torch.uint8, device=device)
            for layer in spec.layers
        ]
        shape = (batch, spec.slots, spec.channels)
        self.keys = [torch.zeros(shape, dtype=spec.dtype, device=device) for _ in spec.layers]
        self.values = [torch.zeros(shape, dtype=spec.dtype, device=device) for _ in spec.layers]
        self.tokens, self.tiles, self.hidden = (torch.zeros(batch, dtype=torch.int32, device=device) for _ in range(3))
        self.slot_angles = slot_angles(spec.frequencies, torch.zeros(spec.slots, device=device))
        self.tile_angles = tile_angles(spec.frequencies, spec.window.sinks, self.max_tiles)
        self.token_angles = [layer.tables.token_angles(spec.frequencies) for layer in spec.layers]
        self._kernels = _Kernels(spec, batch, self.max_tiles) if device.type == "cuda" else None

    def bytes_live(self) -> int:
        """Bytes allocated for tokens at this capacity."""
        return sum(tensor.nbytes for tensors in (self.data, self.keys, self.values) for tensor in tensors)

    def select(self, rows: Tensor) -> None:
        """Refused: rows of a fused cache stay where they are."""
        raise AatcError("a fused cache has no beams", "use the packed cache for beam search")

    def crop(self, count: int) -> None:
        """Refused, but for nothing to take back."""
        if count:
            raise AatcError("a fused cache takes no steps back", "use the packed cache for assisted decoding")

    def reset(self) -> None:
        """Forget everything."""
        self.columns = 0
        for counter in (self.tokens, self.tiles, self.hidden):
            counter.zero_()

    @torch.no_grad()
    def attend(self, call: CacheCall) -> Tensor:
        """Attention of one layer, whose new tokens enter the cache. -> [B, Hq, q, D]."""
        place, count = call.site.place, call.query.shape[2]
        if place == 0:
            self._begin(call, count)
        if self.columns == count:
            self._fill(place, call)
            assert isinstance(call.site, AttentionSite)
            return exact_attention(call.site, call.query, call.key, call.value, call.scaling)
        rows = (call.k_rows[:, 0].contiguous(), call.v_rows[:, 0].contiguous())
        query = call.query[:, :, 0].contiguous()
        layer = self.spec.layers[place]
        if self._kernels is not None:
            self._kernels.append(
                *rows, self.keys[place], self.values[place], self.data[place], layer.tables, layer.encode, self.tokens
            )
            out = torch.empty_like(query)
            self._kernels.decode(
                query,
                self.data[place],
                layer.tables,
                self.spec.frequencies,
                self.tile_angles,
                self.token_angles[place],
                self.keys[place],
                self.values[place],
                self.slot_angles,
                self.tokens,
                self.tiles,
                self.hidden,
                out,
            )
        else:
            self._append(place, *rows)
            out = decode_attention(
                query,
                self.data[place],
                layer.tables,
                self.spec.frequencies,
                self.keys[place],
                self.values[place],
                self.tokens,
                self.tiles,
                self.hidden,
                sinks=self.spec.window.sinks,
                scaling=self.spec.scaling,
            ).to(query.dtype)
        return out.unsqueeze(2)

    def _begin(self, call: CacheCall, count: int) -> None:
        """Count the new tokens and turn the slot of the newest to its position."""
        if call.query.shape[0] != self.batch:
            raise AatcError(f"a batch of {call.query.shape[0]} does not fit a cache of {self.batch}", "make another")
        if self.columns and count != 1:
            raise AatcError("a fused cache takes one prompt and then single tokens", "use the packed cache")
        if self.columns + count > self.capacity:
            raise AatcError(
                f"{self.columns + count} tokens are more than the capacity of {self.capacity}", "make a larger cache"
            )
        if not self.columns and call.mask is not None and not bool(call.mask.all()):
            raise AatcError("a fused cache takes batches of one length", "group prompts by length")
        self.columns += count
        sinks, ring = self.spec.window.sinks, self.spec.window.recent
        if self.columns == count:
            self.jump(count)
            return
        index = self.tokens[:1].to(torch.int64)
        slot = torch.where(index < sinks, index, sinks + (index - sinks) % ring)
        self.slot_angles.index_copy_(0, slot, slot_angles(self.spec.frequencies, index))
        self.tokens += 1
        excess = (self.tokens - (sinks + ring)).clamp_min(0)
        self.tiles.copy_((excess + TILE - 1) // TILE)

    def jump(self, count: int) -> None:
        """Set the counters and angles of ``count`` cached tokens, whose contents are put in place otherwise."""
        window, device = self.spec.window, self.tokens.device
        self.columns = count
        self.tokens.fill_(count)
        self.tiles.fill_(packed_tokens(count, window) // TILE)
        recent = torch.arange(min(window.sinks + packed_tokens(count, window), count), count, device=device)
        index = torch.cat((torch.arange(min(window.sinks, count), device=device), recent))
        slots = torch.where(index < window.sinks, index, window.sinks + (index - window.sinks) % window.recent)
        self.slot_angles[slots] = slot_angles(self.spec.frequencies, index)

    def _fill(self, place: int, call: CacheCall) -> None:
        """Store a prompt: sinks and window exactly, the rest in tiles."""
        window, length = self.spec.window, call.query.shape[2]
        packed = packed_tokens(length, window)
        sinks = min(window.sinks, length)
        for rows, cache in ((call.k_rows, self.keys[place]), (call.v_rows, self.values[place])):
            cache[:, :sinks] = rows[:, :sinks]
            recent = torch.arange(min(window.sinks + packed, length), length, device=rows.device)
            cache[:, window.sinks + (recent - window.sinks) % window.recent] = rows[:, window.sinks + packed :]
        layer, step = self.spec.layers[place], _CHUNK * TILE
        for row in range(self.batch):
            for start in range(0, packed, step):
                span = slice(window.sinks + start, window.sinks + min(start + step, packed))
                new = tiles_of({"k": call.k_rows[row, span], "v": call.v_rows[row, span]}, layer.codecs, layer.tables)
                self.data[place][row, start // TILE : start // TILE + new.shape[0]] = new

    def _append(self, place: int, key: Tensor, value: Tensor) -> None:
        """Torch twin of the append kernel. key, value [B, C]."""
        window, layer = self.spec.window, self.spec.layers[place]
        before = int(self.tokens[0]) - 1
        done = packed_tokens(before, window)
        caches: dict[Side, Tensor] = {"k": self.keys[place], "v": self.values[place]}
        if packed_tokens(before + 1, window) > done:
            slots = window.sinks + (done + torch.arange(TILE, device=key.device)) % window.recent
            for row in range(self.batch):
                old = {side: caches[side][row, slots] for side in SIDES}
                self.data[place][row, done // TILE] = tiles_of(old, layer.codecs, layer.tables)[0]
        slot = before if before < window.sinks else window.sinks + (before - window.sinks) % window.recent
        caches["k"][:, slot], caches["v"][:, slot] = key, value


class _Kernels:
    """The compiled kernels of one cache shape."""

    def __init__(self, spec: FusedSpec, batch: int, max_tiles: int) -> None:
        device, tables = spec.frequencies.device, [layer.tables for layer in spec.layers]
        self.append = Appender(spec.dim, spec.window.sinks, spec.dtype, device)
        head = max(int((table.offsets[1:] - table.offsets[:-1]).max()) for table in tables)
        self.by_shape: dict[tuple[int, int, int], Decoder] = {}
        for table in tables:
            kind = table.tile_bytes, table.key.steps, table.key.kinds
            if kind not in self.by_shape:
                shape = DecodeShape(
                    batch,
                    spec.kv_heads,
                    spec.heads // spec.kv_heads,
                    spec.dim,
                    spec.slots,
                    spec.window.sinks,
                    max_tiles,
                    table.tile_bytes,
                    head,
                    table.fast,
                    table.key.halves,
                    table.key.steps,
                    table.key.kinds,
                    spec.scaling,
                )
                self.by_shape[kind] = Decoder(shape, spec.dtype, device)

    def decode(self, query: Tensor, data: Tensor, tables: LayerTables, *rest: Tensor) -> Tensor:
        """Decode attention with the launch made for this layer's tile size."""
        return self.by_shape[tables.tile_bytes, tables.key.steps, tables.key.kinds](query, data, tables, *rest)


@dataclass(frozen=True)
class FusedSession:
    """An attached model: makes empty caches for it; ``keyword`` names the argument that takes one."""

    spec: FusedSpec
    keyword: str

    def new_cache(self, batch: int, capacity: int) -> HostedCache:
        """An empty cache for ``batch`` sequences of at most ``capacity`` tokens."""
        return HostedCache(FusedState(self.spec, batch, capacity), len(self.spec.layers))


@contextmanager
def fused(model: nn.Module, codecs: Sequence[Mapping[Side, Codec]], window: Window) -> Iterator[FusedSession]:
    """Attach the fused cache to ``model`` while the block lasts; on a CPU its torch twin, which is slow and exact.

    Raises `AatcError` for plans, windows and models that tiles cannot hold, or when CuPy is missing on a GPU.
    """
    check_model(model)
    layers = attention_layers(model)
    spec = fused_spec(model, [layer for layer in layers if isinstance(layer, AttentionSite)], codecs, window)
    if len(spec.layers) != len(layers):
        raise AatcError("the fused kernels have no layers that stay exact", "use the packed cache")
    with hosted(model, layers, attend_fused):
        yield FusedSession(spec, cache_keyword(model))


def fused_spec(
    model: nn.Module, sites: list[AttentionSite], codecs: Sequence[Mapping[Side, Codec]], window: Window
) -> FusedSpec:
    """Tables of every layer on the model's device; raises `AatcError` for what the kernels do not do."""
    config: Any = model.config
    geometry, parameter = geometry_of(config), next(model.parameters())
    _check(sites, window, geometry.heads // geometry.kv_heads, geometry.head_dim)
    if parameter.device.type == "cuda" and not fused_available():
        raise AatcError("the fused kernels need CuPy", "pip install 'aatc[cuda]', or use the packed cache")
    frequencies = rotary_frequencies(model, geometry.head_dim).to(parameter.device)
    fast = fast_pairs(frequencies)
    made = []
    for layer in codecs:
        pair: dict[Side, TransformCodec] = {}
        for side in SIDES:
            codec = layer[side]
            if not isinstance(codec, TransformCodec) or codec.groups != geometry.kv_heads:
                raise AatcError(
                    "the fused kernels need a plan with every kv head on its own", "use recipe loss-aware-fused"
                )
            pair[side] = codec.to(parameter.device, torch.promote_types(parameter.dtype, torch.float32))
        keys, values = ([HeadSide.of(pair[side], head) for head in range(geometry.kv_heads)] for side in SIDES)
        tables = LayerTables.of(keys, values, geometry.head_dim, fast, on_hopper(parameter.device))
        made.append(FusedLayer(pair, tables, EncodeTables.of(pair, tables)))
    scaling = float(getattr(sites[0].module, "scaling", geometry.head_dim**-0.5))
    return FusedSpec(
        tuple(made),
        window,
        parameter.dtype,
        geometry.heads,
        geometry.kv_heads,
        geometry.head_dim,
        frequencies.to(torch.float32),
        scaling,
    )


def _check(sites: list[AttentionSite], window: Window, group: int, dim: int) -> None:
    other = "use the packed cache without fused kernels"
    if window.flush != TILE or window.recent < TILE:
        raise AatcError(f"fused kernels pack {TILE} tokens at once, this window {window.flush}", other)
    if dim not in (64, 96, 128, 256) or group > 8:
        raise AatcError(f"the fused kernels have no heads of {dim} with {group} queries each", other)
    for site in sites:
        if site.k_bias is not None or site.v_bias is not None or site.rope != "half" or site.sliding_window:
            raise AatcError(f"{site.name} has a bias, a sliding window or another rotation than fused kernels", other)
        if site.sinks is not None or site.softcap is not None:
            raise AatcError(f"{site.name} has sinks or capped scores, which fused kernels do not compute", other)


def attend_fused(state: CacheState, call: CacheCall) -> Tensor:
    """The attention function of a fused cache, for `models.cache_hooks.hosted`."""
    assert isinstance(state, FusedState)
    return state.attend(call)
