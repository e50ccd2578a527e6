"""cache, by chunks: prefixes as engines keep them, of plans that no live cache holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from aatc_cli.artifacts.plan import Plan
from aatc_cli.artifacts.store import Store
from aatc_cli.artifacts.store_keeping import kept
from aatc_cli.console import say, working
from aatc_cli.errors import AatcError, ArtifactError
from aatc_cli.models.adapter import attention_sites
from aatc_cli.models.compressed import cache_keyword
from aatc_cli.models.generation import plain_cache
from aatc_cli.models.loading import load_same
from aatc_cli.runtime.stored.chunked import ChunkedPrefixes, require_chunk
from aatc_cli.runtime.stored.live import fill, pages_of
from aatc_cli.runtime.stored.opening import codec_for, fastest
from aatc_cli.stages.storing.using import Continued, Stored, Using, token_ids


@dataclass(frozen=True)
class _Opened:
    """A model, its tokenizer, the layers that are compressed, and what makes chunks of them."""

    model: Any
    tokenizer: Any
    sites: list[Any]
    codec: Any


def needs_chunks(plan: Plan) -> bool:
    """Whether no live cache holds the plan: one that predicts layers from one another."""
    return plan.recipe.choices.prediction.predicts


@torch.no_grad()
def put_chunks(using: Using, text: str) -> Stored:
    """Read ``text`` and keep its whole chunks; raises `AatcError` for a text that has none."""
    with _opened(using) as opened:
        ids = token_ids(opened.tokenizer, text, using, opened.model.config)
        require_chunk(ids.shape[1], opened.codec.tokens)
        store = Store(using.folder, create=True)
        chunks = ChunkedPrefixes(store, opened.codec)
        tokens, before = ids[0].tolist(), kept(store).bytes
        there = bool(chunks.names(tokens)) and not chunks.missing(tokens)
        if not there:
            cache = plain_cache(opened.model)
            with working(f"reading {len(tokens)} tokens"):
                opened.model(ids, use_cache=True, **{cache_keyword(opened.model): cache})
            dtype = next(opened.model.parameters()).dtype
            narrow = dtype if dtype.itemsize == 2 else torch.float16
            chunks.put(pages_of(cache, opened.sites, 0, len(tokens), narrow), tokens)
        step = opened.codec.tokens
        whole = len(tokens) // step
        raw = whole * opened.codec.raw_bytes
        return Stored(whole * step, chunks.size(tokens), kept(store).bytes - before, raw, there)


@torch.no_grad()
def get_chunks(using: Using, store: Store, text: str, new_tokens: int) -> Continued:
    """Go on from the chunks that are there of ``text``, reading the rest of it; raises `ArtifactError` without one."""
    with _opened(using) as opened:
        ids = token_ids(opened.tokenizer, text, using, opened.model.config, new_tokens)
        model, dtype = opened.model, next(opened.model.parameters()).dtype
        # the last token is read in any case: `generate` needs what the model says after it
        pages = ChunkedPrefixes(store, opened.codec).find(ids[0, :-1].tolist(), dtype)
        if pages is None:
            raise ArtifactError(
                f"{using.folder} has no sound chunk of this text for {using.plan.name}", "store it by aatc cache put"
            )
        say(f"cache: {pages.shape[1]} of {ids.shape[1]} tokens from {using.folder}")
        cache = plain_cache(model)
        fill(cache, opened.sites, pages, dtype)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            **{cache_keyword(model): cache},
        )
        return Continued(pages.shape[1], ids.shape[1], opened.tokenizer.decode(out[0, ids.shape[1] :]))


@contextmanager
def _opened(using: Using) -> Iterator[_Opened]:
    plan = using.plan
    with working(f"opening {using.source.name}"):
        model, tokenizer = load_same(using.source, plan.model, str(plan.path), device=using.device, dtype=using.dtype)
    sites = attention_sites(model)
    if plan.geometry.sliding_layers:
        raise AatcError(
            f"{plan.geometry.sliding_layers} layers of this model are sliding, and chunks hold none of them",
            "store prefixes of it by a plan that a live cache holds",
        )
    codec = fastest(codec_for(plan, model, device=using.device))
    yield _Opened(model, tokenizer, sites, codec)
