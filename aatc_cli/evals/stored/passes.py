"""One window: its prefix through the codec, and what the model says behind it, exact and stored."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from aatc_cli.core.metrics import kl_divergence
from aatc_cli.evals.stored.prefill import Prefill
from aatc_cli.models.compressed import cache_keyword
from aatc_cli.runtime.stored.codec import StoredCodec

# positions compared at once
_POSITIONS = 256


@dataclass
class Found:
    """Per window: KL and agreement of every position, bytes of the chunks; seconds of all chunks."""

    kl: list[Tensor] = field(default_factory=list)
    agree: list[Tensor] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    encode: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)


def through(codec: StoredCodec, stored: Prefill, tokens: int, found: Found) -> None:
    """Write every chunk of the prefix to bytes and read it back into the cache."""
    pages = stored.pages(0, tokens, torch.float16)
    ranks = None if stored.received is None else _ranks(stored.received, codec)
    began = time.perf_counter()
    chunks = codec.encode_run(pages, 0, ranks)
    middle = time.perf_counter()
    for index, data in enumerate(chunks):
        first = index * codec.tokens
        stored.with_pages(first, codec.decode(data, first, torch.float16))
    found.encode.append((middle - began) / len(chunks))
    found.decode.append((time.perf_counter() - middle) / len(chunks))
    found.bytes.append(sum(map(len, chunks)))


def _ranks(received: Tensor, codec: StoredCodec) -> Tensor:
    """What was received [L, H, T] in the orders of the plan."""
    return received if codec.code.orders == received.shape[1] else received.sum(1, keepdim=True)


@torch.no_grad()
def compare(model: Any, tokens: Tensor, first: int, both: tuple[Prefill, Prefill], found: Found) -> None:
    """Add the KL of every prediction from token ``first`` behind the prefix on, but the last: exact, stored."""
    keyword = cache_keyword(model)
    logits = [model(tokens, use_cache=True, **{keyword: each.cache}).logits[0, first:-1].float() for each in both]
    parts: list[Sequence[Tensor]] = []
    for start in range(0, logits[0].shape[0], _POSITIONS):
        reference, got = (each[start : start + _POSITIONS] for each in logits)
        parts.append((kl_divergence(reference, got), (reference.argmax(-1) == got.argmax(-1)).to(torch.float32)))
    found.kl.append(torch.cat([part[0] for part in parts]).cpu())
    found.agree.append(torch.cat([part[1] for part in parts]).cpu())
