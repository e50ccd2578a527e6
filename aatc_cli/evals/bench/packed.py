"""Time of one layer's decode attention over the packed cache, whose head groups may be of any heads, on random codes.

Operators are launched one by one, as a session launches them; nothing is captured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from aatc_cli.config import Geometry, Window
from aatc_cli.core import SIDES, Side
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.layout import exact_slots, packed_tokens
from aatc_cli.core.packing import pack_keys, pack_values
from aatc_cli.core.rope import apply_rope
from aatc_cli.core.transform import decode
from aatc_cli.evals.bench.attention import Timing
from aatc_cli.evals.bench.synthetic import block_widths
from aatc_cli.runtime.packed.site import SiteCodec
from aatc_cli.runtime.packed.store import PackedStore
from aatc_cli.runtime.store import LayerView

BACKEND = "packed"
# sums in float32 and an output in bfloat16, relative root mean square
PACKED_BOUND = 0.01
# tokens whose codes are made at once: all others of a cache are packed already
_CHUNK = 4096
_BLOCK = 16


@dataclass
class PackedBench:
    """One layer's packed cache of random codes; ``codes`` [P, C] and scales [P, groups] of its last sequence by side.

    query [B, Hq, 1, D] in bfloat16; cos, sin [T, D] in its dtype.
    """

    geometry: Geometry
    codecs: dict[Side, TransformCodec]
    store: PackedStore
    codes: dict[Side, Tensor]
    scales: dict[Side, Tensor]
    query: Tensor
    cos: Tensor
    sin: Tensor

    @classmethod
    def of(
        cls,
        geometry: Geometry,
        window: Window,
        groups: int,
        bits: float,
        theta: float,
        batch: int,
        context: int,
        device: torch.device,
    ) -> PackedBench:
        """``groups`` head groups on both sides, widths of mean ``bits``; ``theta``: base of the rotary frequencies."""
        generator = torch.Generator(device).manual_seed(0)
        codecs: dict[Side, TransformCodec] = {
            side: random_codec(geometry.channels, groups, bits, place).to(device) for place, side in enumerate(SIDES)
        }
        sites = [SiteCodec(side, codecs[side], None, window.flush) for side in SIDES]
        store = PackedStore(sites[0], sites[1], window, batch, torch.bfloat16)
        packed = packed_tokens(context, window)
        found = {side: _stream(site, batch, packed, generator) for side, site in zip(SIDES, sites, strict=True)}
        (keys, key_scales, *_), (values, value_scales, *_) = found["k"], found["v"]
        names = [f"streams.0.{name}" for name in store.streams[0].NAMES]
        tensors = dict(zip(names, (keys, values, key_scales, value_scales), strict=True))
        sinks, slots = exact_slots(context, window)
        for name in store.exact.NAMES:
            shape = (batch, sinks if name.startswith("sink") else slots, geometry.channels)
            tensors[name] = torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)
        store.load(tensors, context)
        steps = torch.arange(0, geometry.head_dim, 2, device=device, dtype=torch.float64) / geometry.head_dim
        angle = torch.arange(context, device=device)[:, None] * (theta**-steps).repeat(2)
        one = (batch, geometry.heads, 1, geometry.head_dim)
        query = torch.randn(one, device=device, dtype=torch.bfloat16, generator=generator)
        codes, scales = ({side: found[side][place] for side in SIDES} for place in (2, 3))
        cos, sin = angle.cos().to(query.dtype), angle.sin().to(query.dtype)
        return cls(geometry, codecs, store, codes, scales, query, cos, sin)

    def attend(self) -> Tensor:
        """Attention of the query by the packed cache. -> [B, Hq, 1, D]."""
        view = LayerView(
            self.geometry.head_dim**-0.5, lambda first, n: (self.cos[first : first + n], self.sin[first : first + n])
        )
        return self.store.attend(self.query, view, None)

    def expected(self) -> Tensor:
        """The same of the last sequence in float64, from its codes as they were before packing. -> [Hq, D]."""
        recent_keys, recent_values, _ = self.store.recent()
        keys = apply_rope(
            self._rows("k", self.store.exact.sink_keys, recent_keys),
            self.cos[None].to(torch.float64),
            self.sin[None].to(torch.float64),
        )[0]
        values = self._rows("v", self.store.exact.sink_values, recent_values)[0]
        query = torch.unflatten(self.query[-1, :, 0].to(torch.float64), 0, (self.geometry.kv_heads, -1))
        weights = (query @ keys.transpose(1, 2) * self.geometry.head_dim**-0.5).softmax(-1)
        out: Tensor = (weights @ values).flatten(0, 1)
        return out

    def _rows(self, side: Side, sinks: Tensor, recent: Tensor) -> Tensor:
        """Vectors [1, H, T, D] of the last sequence."""
        codec = self.codecs[side].to(self.query.device, torch.float64)
        packed = decode(codec.dequantize(self.codes[side].to(torch.int32), self.scales[side]), codec.decode)
        whole = torch.cat([sinks[-1].to(torch.float64), packed, recent[-1].to(torch.float64)])
        return torch.unflatten(whole, -1, (self.geometry.kv_heads, -1)).transpose(0, 1)[None]

    def measure(self, repeats: int) -> tuple[Timing, float]:
        """Times of a call, and the relative error of the last sequence's output to `expected`."""
        expected = self.expected()
        got = self.attend()[-1, :, 0]
        error = float((got - expected).square().mean().sqrt() / expected.square().mean().sqrt())
        moved = sum(tensor.nbytes for tensor in self.store.tensors().values())
        return Timing(BACKEND, call_seconds(self.attend, repeats, self.query.device), moved), error


def random_codec(channels: int, groups: int, bits: float, seed: int) -> TransformCodec:
    """Orthonormal encode matrices and shuffled falling widths of mean ``bits`` for every head group.

    Raises `AatcError` for a mean that blocks of 16 channels cannot have.
    """
    generator, size = torch.Generator().manual_seed(seed), channels // groups
    widths = torch.zeros(groups, size, dtype=torch.int64)
    for group in range(groups):
        found = torch.tensor(block_widths(size // _BLOCK, bits, group + seed)).repeat_interleave(_BLOCK)
        widths[group, torch.randperm(size, generator=generator)[: found.numel()]] = found
    encode, _ = torch.linalg.qr(torch.randn(groups, size, size, generator=generator))
    ones = torch.ones(channels)
    return TransformCodec(encode, encode.transpose(1, 2).contiguous(), 3 * ones, widths.flatten(), ones)


def _stream(
    site: SiteCodec, batch: int, packed: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Packed random codes and float16 scales [B, groups, P] of all sequences; int8 codes and scales of the last one."""
    bits, device, flush = site.codec.bits, site.codec.bits.device, site.plan.flush
    step = _CHUNK // flush * flush
    data, codes = [], []
    for row in range(batch):
        made = []
        for start in range(0, packed, step):
            count = min(step, packed - start)
            each = torch.rand(count, site.channels, device=device, generator=generator) * torch.exp2(bits)
            part = (each.floor() - torch.exp2(bits - 1.0).floor()).to(torch.int32)
            if site.side == "k":
                made.append(pack_keys(part, site.plan))
            else:
                made.append(pack_values(torch.unflatten(part, 0, (-1, flush)), site.plan))
            if row == batch - 1:
                codes.append(part.to(torch.int8))
        size = site.plan.row_bytes if site.side == "k" else site.plan.block_bytes
        data.append(torch.cat(made) if made else torch.empty(0, size, dtype=torch.uint8, device=device))
    scales = 0.5 + torch.rand(batch, site.groups, packed, device=device, generator=generator)
    scales = scales.to(torch.float16)
    kept = torch.cat(codes) if codes else torch.empty(0, site.channels, dtype=torch.int8, device=device)
    return torch.stack(data), scales, kept, scales[-1].T


def call_seconds(work: Callable[[], object], repeats: int, device: torch.device) -> list[float]:
    """Seconds of every one of ``repeats`` calls after two that warm up, the device waited for."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    found = []
    for _ in range(repeats + 2):
        wait()
        began = time.perf_counter()
        work()
        wait()
        found.append(time.perf_counter() - began)
    return found[2:]
