"""Speed of stored chunks: a codec of random matrices in the shape of a model, coded and read back."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from aatc_cli.config import Geometry
from aatc_cli.core import SIDES, Side
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.core.tile_rule import TileRule
from aatc_cli.runtime.stored.code import TileCode
from aatc_cli.runtime.stored.codec import StoredCodec
from aatc_cli.runtime.stored.device_decode import DeviceDecoder
from aatc_cli.runtime.stored.header import ChunkHeader
from aatc_cli.runtime.stored.opening import fastest
from aatc_cli.runtime.stored.pages import Pages
from aatc_cli.runtime.stored.rotation import Rotation

LLAMA = Geometry(layers=32, heads=32, kv_heads=8, head_dim=128, hidden_size=4096)
_ROUNDS = 5


@dataclass(frozen=True)
class Form:
    """What is timed: kv heads of a group, quotas of classes, bits of a number."""

    together: int
    quotas: tuple[int, ...]
    bits: float


def codec_of(geometry: Geometry, form: Form, device: str, tokens: int = 256) -> StoredCodec:
    """A codec of this form: orthonormal matrices, widths as water-filling finds them on a spectrum that falls."""
    layers = []
    rule = TileRule(form.quotas, "head" if form.together == 1 and len(form.quotas) > 1 else "layer")
    groups = geometry.kv_heads // form.together
    for layer in range(geometry.layers):
        pair: dict[Side, TileCodec] = {}
        for index, side in enumerate(SIDES):
            generator = torch.Generator().manual_seed(2 * layer + index)
            size = geometry.channels // groups
            random = torch.randn(groups, size, size, generator=generator)
            matrix = torch.linalg.qr(random.to(device))[0].to(device)
            variance = torch.exp(-torch.arange(size) / (size / 5)).repeat(groups) * 4
            bits = torch.stack([_widths(variance, form.bits + extra) for extra in _extras(form.quotas)])
            ones = torch.ones(geometry.channels)
            codec = TransformCodec(
                matrix.mT.contiguous(), matrix.contiguous(), ones, bits[0], variance, "lloyd", ones, 8, 0.5
            )
            pair[side] = TileCodec(codec.to(device), bits.to(device), rule)
        layers.append(pair)
    biases: list[dict[Side, Tensor | None]] = [dict.fromkeys(SIDES) for _ in range(geometry.layers)]
    code = TileCode.of(layers, biases, geometry.kv_heads)
    return StoredCodec(geometry, code, _rotation(geometry.head_dim), bytes(32), bytes(32), 4, tokens, device=device)


def measure(geometry: Geometry, form: Form, tokens: int, device: str = "cuda") -> dict[str, Any]:
    """Seconds of encoding and decoding whole chunks of so many tokens, beside the torch code, and the bytes of both.

    encode_run, decode_run: pages to bytes and back with checksums and copies. decode: of bytes that are on the GPU
    already; copy: what it takes to bring them there. error: relative RMS of keys and values beside the torch code.
    """
    plain = codec_of(geometry, form, device)
    codec, pages = fastest(plain, 1), random_pages(geometry, tokens, device)
    chunks = codec.encode_run(pages, 0)
    found: dict[str, Any] = {
        "raw_bytes": 4 * geometry.layers * geometry.channels * tokens,
        "coded_bytes": sum(map(len, chunks)),
        **_beside_torch(plain, codec, pages, chunks),
        "encode_run_seconds": timed(lambda: codec.encode_run(pages, 0), 2),
        "decode_run_seconds": timed(lambda: codec.decode_run(chunks, 0, torch.bfloat16), 3),
    }
    if isinstance(codec.fast, DeviceDecoder):
        decoder, (data, begins, places) = codec.fast, resident(codec, chunks)
        there = data.to(device)
        found["decode_seconds"] = timed(lambda: decoder.decode(there, begins, places, torch.bfloat16))
        found["copy_seconds"] = timed(lambda: data.to(device, non_blocking=True))
    return found


def resident(codec: StoredCodec, chunks: Sequence[bytes]) -> tuple[Tensor, Tensor, Tensor]:
    """Chunks as `DeviceDecoder.decode` takes them: bytes in pinned memory, where layers begin, places of tokens."""
    starts = torch.tensor([0, *map(len, chunks)]).cumsum(0)
    whole = torch.frombuffer(bytearray(b"".join(chunks)), dtype=torch.uint8)
    whole = whole.pin_memory() if codec.device.startswith("cuda") else whole
    first = torch.tensor([ChunkHeader.read(memoryview(data)).starts[1] for data in chunks])
    return whole, starts[:-1] + first, torch.arange(len(chunks) * codec.tokens, device=codec.device)


def random_pages(geometry: Geometry, tokens: int, device: str) -> Pages:
    """Normal pages in bfloat16."""
    shape = (geometry.layers, tokens, geometry.kv_heads, geometry.head_dim)
    return Pages(*(torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in SIDES))


def timed(work: Callable[[], object], rounds: int = _ROUNDS) -> float:
    """Median seconds of some rounds after one that is not counted."""
    found = []
    for _ in range(rounds + 1):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])


def _beside_torch(plain: StoredCodec, codec: StoredCodec, pages: Pages, chunks: Sequence[bytes]) -> dict[str, Any]:
    """Two chunks by the torch code: the same bytes, and pages that are near."""
    few = 2 * codec.tokens
    part = Pages(pages.keys[:, :few], pages.values[:, :few])
    slow = plain.encode_run(part, 0)
    changed = sum(a != b for mine, other in zip(slow, chunks, strict=False) for a, b in zip(mine, other, strict=True))
    got = codec.decode_run(chunks[:2], 0, torch.float32)
    wanted = replace(plain, fast=None).decode_run(chunks[:2], 0, torch.float32)
    errors = {
        f"error_{side}": float(
            (got.of(side) - wanted.of(side)).square().mean().sqrt() / wanted.of(side).square().mean().sqrt()
        )
        for side in SIDES
    }
    seconds = {
        "torch_encode_seconds": timed(lambda: plain.encode_run(part, 0), 1) * pages.shape[1] / few,
        "torch_decode_seconds": timed(lambda: plain.decode_run(slow, 0, torch.bfloat16), 1) * pages.shape[1] / few,
    }
    return {"bytes_changed": changed / sum(map(len, slow)), **errors, **seconds}


def _extras(quotas: tuple[int, ...]) -> list[float]:
    """Bits that classes have more than the mean, as plans of tiles have them."""
    return [0.0] if len(quotas) == 1 else [-0.8, 0.4, 1.2][: len(quotas)]


def _widths(variance: Tensor, bits: float) -> Tensor:
    """Widths [C] of this mean that water-filling gives, whole numbers from 0 to 8."""
    ideal = 0.5 * torch.log2(variance)
    low, high = -20.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        mean = float((ideal + middle).round().clamp(0, 8).mean())
        low, high = (middle, high) if mean < bits else (low, middle)
    return (ideal + low).round().clamp(0, 8).long()


def _rotation(dim: int) -> Rotation:
    inverse = 500000.0 ** (-torch.arange(0, dim, 2).float() / dim)

    def tables(positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None].float() * inverse.to(positions.device)
        whole = torch.cat((angles, angles), -1)
        return whole.cos(), whole.sin()

    return Rotation(tables, "half")
