"""cache: a store of prefixes, filled from texts and read again, looked after and kept within a size."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aatc_cli.artifacts.store import ABOUT, Store, check_place
from aatc_cli.artifacts.store_keeping import Collected, Kept, collect_garbage, kept, problems, remove
from aatc_cli.config import parse_size
from aatc_cli.console import say, working
from aatc_cli.errors import AatcError, ArtifactError
from aatc_cli.models.compressed import HostedCache
from aatc_cli.models.loading import load_same
from aatc_cli.runtime.attach import attach
from aatc_cli.runtime.session import Session
from aatc_cli.runtime.stored.header import ChunkHeader
from aatc_cli.runtime.stored.prefixes import Found, find_prefix, get_prefix, objects_of, put_prefix, read_prefix
from aatc_cli.stages.storing.chunks import get_chunks, needs_chunks, put_chunks
from aatc_cli.stages.storing.using import Continued, Stored, Using, token_ids


@dataclass(frozen=True)
class Listed:
    """One prefix of a store; ``problem`` says what is wrong with its record."""

    record: str
    plan: str
    model: str
    tokens: int
    bytes: int
    used: float
    problem: str = ""


def put(using: Using, text: str, limit: str | None = None) -> Stored:
    """Read ``text`` into a cache and keep it; one that is there is left as it is. Raises `AatcError`.

    limit: bytes that the store may take; the least recently used go, and none for a prefix that is larger alone.
    """
    most = None if limit is None else parse_size(limit)
    # the store is made when plan, model and text are known to fit: what fails before leaves no empty one
    check_place(using.folder)
    done = put_chunks(using, text) if needs_chunks(using.plan) else _put_whole(using, text)
    size = max(done.bytes, done.new)
    if most is not None and size > most:
        problem = f"the prefix takes {size:,} bytes, and --limit leaves {most:,} to the whole store"
        raise AatcError(problem, "it is stored and nothing was removed: raise --limit, or aatc cache gc --limit")
    if most is not None:
        collect(using.folder, limit)
    return done


def _put_whole(using: Using, text: str) -> Stored:
    """Read ``text`` into the live cache of a plan and keep that."""
    with _session(using) as (session, tokenizer), torch.no_grad():
        ids = token_ids(tokenizer, text, using, session.model.config)
        there = (using.folder / ABOUT).is_file() and _holds(Store(using.folder), session, ids[0].tolist())
        cache = session.new_cache()
        if not there:
            with working(f"reading {ids.shape[1]} tokens"):
                session.model(ids, use_cache=True, **{session.keyword: cache})
        store = Store(using.folder, create=True)
        before = kept(store).bytes
        if not there:
            put_prefix(store, session, cache, ids[0].tolist())
        new = kept(store).bytes - before
        space = find_prefix(store, session, ids[0].tolist())
        assert space is not None
        live = session.bytes_live(space.cache)
    layout = using.plan.layout
    return Stored(ids.shape[1], live, new, layout.reference_bytes(ids.shape[1]), there)


def _holds(store: Store, session: Session, tokens: list[int]) -> bool:
    """Whether the whole of a prefix is in a store, and sound."""
    try:
        get_prefix(store, session, tokens)
    except ArtifactError:
        return False
    return True


def get(using: Using, text: str, new_tokens: int) -> Continued:
    """Go on from the longest stored prefix of ``text``, reading the rest of it, by ``new_tokens`` greedy tokens.

    Raises `ArtifactError` where no sound prefix of it is stored.
    """
    store = Store(using.folder)
    if needs_chunks(using.plan):
        return get_chunks(using, store, text, new_tokens)
    with _session(using) as (session, tokenizer), torch.no_grad():
        ids = token_ids(tokenizer, text, using, session.model.config, new_tokens)
        found = find_prefix(store, session, ids[0].tolist())
        if found is None:
            raise ArtifactError(
                f"{using.folder} has no sound prefix of this text for {using.plan.name}", "store it by aatc cache put"
            )
        say(f"cache: {found.tokens} of {ids.shape[1]} tokens from {using.folder}")
        if found.tokens == ids.shape[1] and new_tokens:
            found = _without_last(found.cache, found.tokens)
        model: Any = session.model
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            **{session.keyword: found.cache},
        )
        return Continued(found.tokens, ids.shape[1], tokenizer.decode(out[0, ids.shape[1] :]))


def listed(folder: Path) -> list[Listed]:
    """The prefixes of a store, the least recently used first."""
    store, found = Store(folder), []
    for path in store.all_prefixes():
        used, name = path.stat().st_mtime, str(path.relative_to(folder))
        try:
            record = read_prefix(path)
        except AatcError as error:
            found.append(Listed(name, "", "", 0, 0, used, error.message))
            continue
        size = sum(each.nbytes for each in record.objects)
        found.append(Listed(name, record.names[0], record.names[1], record.tokens, size, used))
    return sorted(found, key=lambda each: (each.used, each.record))


def summary(folder: Path) -> Kept:
    """What a store holds in all."""
    return kept(Store(folder))


def check(folder: Path, *, repair: bool = False) -> dict[str, str]:
    """What is damaged in a store, by file; with ``repair`` it is removed, so that it is computed again."""
    store = Store(folder)
    # nobody writes into a store that is mounted for reading alone
    with store.writing() if repair or os.access(folder, os.W_OK) else nullcontext():
        found = problems(store, objects_of, _check_chunk)
        if repair:
            remove(found)
    return {str(path.relative_to(folder)): reason for path, reason in found.items()}


def collect(folder: Path, limit: str | None) -> Collected:
    """Remove what nothing needs, and then what was used least recently down to ``limit`` bytes."""
    store, most = Store(folder), None if limit is None else parse_size(limit)
    with store.writing():
        return collect_garbage(store, most, objects_of)


@contextmanager
def _session(using: Using) -> Iterator[tuple[Session, Any]]:
    """The model of a plan with its caches attached, and its tokenizer."""
    plan = using.plan
    with working(f"opening {using.source.name}"):
        model, tokenizer = load_same(using.source, plan.model, str(plan.path), device=using.device, dtype=using.dtype)
    with attach(model, plan, using.cache) as session:
        yield session, tokenizer


def _without_last(cache: HostedCache, tokens: int) -> Found:
    """The same without its last token, which is read once more: `generate` needs what the model says after it."""
    cache.crop(-1)
    return Found(cache, tokens - 1)


def _check_chunk(data: bytes) -> None:
    view = memoryview(data)
    ChunkHeader.read(view).require_parts(view)
