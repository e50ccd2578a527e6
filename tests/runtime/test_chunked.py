"""Prefixes in whole chunks of a store: what is found again, and everything that must not be."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import replace

import pytest
import torch

from aatc_cli.artifacts import store as store_module
from aatc_cli.artifacts.store import Store
from aatc_cli.errors import AatcError
from aatc_cli.runtime.stored.chunked import ChunkedPrefixes
from tests.runtime.test_stored_codec import codec_of, pages_of

TEXT = list(range(500))


@pytest.fixture
def chunks(tmp_path):
    return ChunkedPrefixes(Store(tmp_path / "store", create=True), codec_of())


def whole(count=500, seed=0):
    return pages_of(count, seed=seed)


def test_the_longest_prefix_of_whole_chunks_comes_back(chunks):
    chunks.put(whole(), TEXT)
    got = chunks.find(TEXT, torch.float16)
    assert got.shape[1] == 384
    one = chunks.codec.encode_run(whole().part(0, 384), 0)
    assert torch.equal(got.keys, chunks.codec.decode_run(one, 0).keys)
    # a text that parts from it behind the first chunk shares that one, and its own chunks lie beside
    other = [*TEXT[:200], *range(1000, 1300)]
    assert chunks.find(other, torch.float16).shape[1] == 128
    assert chunks.missing(other) == 2
    assert chunks.find(TEXT[1:], torch.float16) is None
    assert chunks.find(TEXT[:100], torch.float16) is None
    with pytest.raises(AatcError, match="no whole chunk"):
        chunks.put(whole(), TEXT[:100])


@pytest.mark.parametrize("what", ["plan", "model"])
def test_another_plan_or_model_has_none(chunks, what):
    chunks.put(whole(), TEXT)
    other = replace(chunks, codec=replace(chunks.codec, **{what: b"q" * 32}))
    assert other.find(TEXT, torch.float16) is None
    # not even where its file lies under the name of the other
    for mine in chunks.store.all_chunks():
        path = other.store.chunk_path(other.codec.digest, mine.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(mine.read_bytes())
    assert other.find(TEXT, torch.float16) is None


@pytest.mark.parametrize(("place", "left"), [(0, None), (1, 128), (2, 256)])
def test_a_damaged_chunk_ends_the_prefix(chunks, place, left):
    """A changed byte, a file cut short, the chunk of another place: the tokens from there on are computed."""
    chunks.put(whole(), TEXT)
    paths = [chunks.store.chunk_path(chunks.codec.digest, name.hex()) for name in chunks.names(TEXT)]
    good = paths[place].read_bytes()
    for bad in (good[:-70] + b"xyz" + good[-67:], good[:-1], b"", paths[place - 1].read_bytes()):
        paths[place].write_bytes(bad)
        got = chunks.find(TEXT, torch.float16)
        assert (None if got is None else got.shape[1]) == left


def test_a_full_disk_leaves_whole_chunks(chunks, monkeypatch):
    done, real = [], os.replace

    def full(source, target):
        if len(done) == 2:
            raise OSError(28, "No space left on device")
        done.append(target)
        real(source, target)

    monkeypatch.setattr(store_module.os, "replace", full)
    with pytest.raises(AatcError, match="No space left"):
        chunks.put(whole(), TEXT)
    monkeypatch.undo()
    assert chunks.find(TEXT, torch.float16).shape[1] == 256
    assert len(chunks.store.all_chunks()) == 2


def writer_of(folder, rounds):
    chunks = ChunkedPrefixes(Store(folder), codec_of())
    for _ in range(rounds):
        chunks.put(whole(), TEXT)


def test_two_writers_and_a_reader_of_one_text(chunks):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=writer_of, args=(chunks.store.folder, 3)) for _ in range(2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        got = chunks.find(TEXT, torch.float16)
        assert got is None or got.shape[1] in (128, 256, 384)
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert chunks.find(TEXT, torch.float16).shape[1] == 384
