"""advise: is a stored cache worth it on a link? Bytes, seconds to move and decode, seconds to compute, break-even."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aatc_cli.artifacts.plan import Plan
from aatc_cli.core import SIDES
from aatc_cli.errors import UsageError
from aatc_cli.models.loading import ModelSource, load_same
from aatc_cli.runtime.stored.codec import CHUNK, StoredCodec
from aatc_cli.runtime.stored.opening import fastest
from aatc_cli.runtime.stored.pages import Pages
from aatc_cli.runtime.stored.rotation import UNTURNED

_LINK = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([KMGT])(bps|B/s)\s*")
_POWERS = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_ROUNDS = 5
# chunks that are decoded together
_CHUNKS = 4


@dataclass(frozen=True)
class Question:
    """What is asked: tokens of a prefix, links by name, raw bytes decoded a second, seconds to compute the prefix."""

    context: int
    links: tuple[str, ...]
    decode: float
    recompute: float | None


@dataclass(frozen=True)
class Advice:
    """One link. Seconds to move the prefix raw, to move it coded, to do that and decode; the quickest way.

    move and decode overlap chunk by chunk, so their larger one counts, and a chunk of the other.
    """

    link: str
    bytes_per_second: float
    raw_seconds: float
    coded_seconds: float
    stored_seconds: float
    best: str


@dataclass(frozen=True)
class Answer:
    """The prefix, its bytes, and advice for every link.

    worth_below: bytes a second of a link above which raw pages arrive sooner than chunks can be decoded. worth_above:
    below it computing the prefix again is quicker; None where that time is not known.
    """

    context: int
    raw_bytes: int
    coded_bytes: int
    ratio: float
    decode_seconds: float
    recompute_seconds: float | None
    worth_below: float
    worth_above: float | None
    links: tuple[Advice, ...]


def advise(plan: Plan, question: Question) -> Answer:
    """The answer for a plan, of chunks without a fixed size at the bits it expects; raises `UsageError` for a link."""
    codec = _codec(plan, "cpu")
    chunks = -(-question.context // codec.tokens)
    expected = math.ceil(codec.raw_bytes * plan.layout.bits_packed / 16)
    first, other = (codec.nbytes(place) or expected for place in (0, codec.tokens))
    coded, raw = first + (chunks - 1) * other, chunks * codec.raw_bytes
    decode = raw / question.decode
    links = tuple(_advice(name, raw, coded, decode, chunks, question.recompute) for name in question.links)
    above = None
    if question.recompute is not None:
        above = coded / question.recompute if question.recompute > decode else float("inf")
    return Answer(
        question.context,
        raw,
        coded,
        raw / coded,
        decode,
        question.recompute,
        question.decode,
        None if above == float("inf") else above,
        links,
    )


def link_speed(text: str) -> float:
    """Bytes a second of ``25Gbps`` or ``3.1GB/s``; raises `UsageError`."""
    match = _LINK.fullmatch(text)
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"cannot read the link {text!r}", "write bits or bytes a second: 25Gbps, 3.1GB/s")
    return float(match[1]) * _POWERS[match[2]] / (8 if match[3] == "bps" else 1)


def measured_decode(plan: Plan, device: str) -> float:
    """Raw bytes a second that this machine decodes of the plan: the best of some rounds over a few chunks together."""
    codec = fastest(_codec(plan, device))
    g = codec.geometry
    generator = torch.Generator().manual_seed(0)
    both = torch.randn(2, g.layers, _CHUNKS * codec.tokens, g.kv_heads, g.head_dim, generator=generator)
    chunks = codec.encode_run(Pages(both[0].half(), both[1].half()), CHUNK)
    best = float("inf")
    for _ in range(_ROUNDS + 1):
        began = time.perf_counter()
        codec.decode_run(chunks, CHUNK)
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return _CHUNKS * codec.raw_bytes / best


def measured_recompute(plan: Plan, source: ModelSource, context: int, device: str, dtype: str) -> float:
    """Seconds that the model takes to read ``context`` tokens here, the better of two."""
    model, _ = load_same(source, plan.model, str(plan.path), device=device, dtype=dtype)
    ids = torch.zeros(1, context, dtype=torch.int64, device=device)
    best = float("inf")
    inner: Any = model
    for _ in range(2):
        began = time.perf_counter()
        with torch.no_grad():
            inner(ids, use_cache=True, logits_to_keep=1)
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best


def _advice(name: str, raw: int, coded: int, decode: float, chunks: int, recompute: float | None) -> Advice:
    speed = link_speed(name)
    moved, whole = coded / speed, raw / speed
    stored = max(moved, decode) + min(moved, decode) / chunks
    ways: Sequence[tuple[str, float | None]] = (("stored", stored), ("raw", whole), ("recompute", recompute))
    best = min((seconds, way) for way, seconds in ways if seconds is not None)[1]
    return Advice(name, speed, whole, moved, stored, best)


def _codec(plan: Plan, device: str) -> StoredCodec:
    """The codec of a plan without a model: sizes and speed do not depend on biases and angles."""
    biases = [dict.fromkeys(SIDES) for _ in range(plan.geometry.layers)]
    return StoredCodec.of(plan, UNTURNED, biases, device=device)
