"""Prefixes in a store: a cache goes on exactly as the one that was stored, and nothing else ever comes out."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import random
import signal
import time

import pytest
import torch

from aatc_cli.artifacts import store as store_module
from aatc_cli.artifacts.store import Store, write_bytes
from aatc_cli.artifacts.store_keeping import collect_garbage, kept, problems
from aatc_cli.config import Window
from aatc_cli.core import SIDES
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.core.tile_rule import TileRule
from aatc_cli.errors import AatcError, ArtifactError
from aatc_cli.models.adapter import attention_layers
from aatc_cli.models.loading import find_model, load_model
from aatc_cli.runtime.attach import attach_codecs
from aatc_cli.runtime.session import Session
from aatc_cli.runtime.stored.header import ChunkHeader
from aatc_cli.runtime.stored.prefixes import find_prefix, get_prefix, objects_of, put_prefix, read_prefix
from aatc_cli.runtime.tiles.form import tiles_spec

WINDOW = Window(sinks=2, recent=32, flush=16)


@pytest.fixture(scope="module")
def model(tiny_llama):
    return load_model(find_model(str(tiny_llama)), dtype="bfloat16")


def tiles(seed=0):
    rule, found = TileRule((8, 4, 4)), []
    for layer in range(4):
        pair = {}
        for index, side in enumerate(SIDES):
            generator = torch.Generator().manual_seed(100 * seed + 10 * layer + index)
            encode = torch.linalg.qr(torch.randn(2, 16, 16, generator=generator))[0]
            ones = torch.ones(32)
            codec = TransformCodec(encode, encode.mT.contiguous(), ones, ones.long(), ones, "lloyd", scale_bits=8)
            pair[side] = TileCodec(codec, torch.tensor((1, 3, 5))[:, None].expand(-1, 32).clone(), rule)
        found.append(pair)
    return found


def session_of(model, seed=0):
    layers = attention_layers(model)
    return Session.of("tiles", model, layers, tiles_spec(model, layers, tiles(seed), WINDOW, None))


def tokens_of(length, seed=1):
    return torch.randint(0, 256, (1, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def filled(session, ids):
    cache = session.new_cache()
    session.model(ids, use_cache=True, **{session.keyword: cache})
    return cache


@pytest.fixture
def stored(model, tmp_path):
    """A store with prefixes of 150 tokens and of the first 90 of them."""
    store, ids = Store(tmp_path / "store", create=True), tokens_of(150)
    with session_of(model).attached() as session:
        for count in (90, 150):
            put_prefix(store, session, filled(session, ids[:, :count]), ids[0, :count].tolist())
    return store, ids


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 2, 40, 150, 151])
@pytest.mark.parametrize("held", ["tiles", "packed"])
def test_a_prefix_goes_on_exactly(model, codecs, tmp_path, length, held):
    def session():
        if held == "tiles":
            return session_of(model).attached()
        return attach_codecs(model, codecs(4, 32, 2, "mixed"), Window(sinks=2, recent=8, flush=4))

    store, ids = Store(tmp_path / "store", create=True), tokens_of(length)
    with session() as first:
        cache = filled(first, ids)
        put_prefix(store, first, cache, ids[0].tolist())
        kept_cache = copy.deepcopy(cache)
    with session() as second:
        found = get_prefix(Store(tmp_path / "store"), second, ids[0].tolist())
        for name, tensor in kept_cache.state.tensors().items():
            assert torch.equal(found.state.tensors()[name], tensor)
        ahead = tokens_of(40, seed=9)
        got, expected = (second.model(ahead, **{second.keyword: c}).logits for c in (found, kept_cache))
        assert torch.equal(got, expected)


def test_the_longest_prefix_is_found_and_objects_are_shared(model, stored):
    store, ids = stored
    records = [read_prefix(path) for path in store.all_prefixes()]
    shared = set.intersection(*({each.sha256 for each in record.objects} for record in records))
    # 90 tokens: 56 of them packed or more, less than 64; the tiles of the longer one begin with another object
    assert len(store.all_objects()) == sum(len(record.objects) for record in records) - len(shared)
    with session_of(model).attached() as session:
        longer = torch.cat((ids, tokens_of(10, seed=4)), 1)[0].tolist()
        assert find_prefix(store, session, longer).tokens == 150
        assert find_prefix(store, session, longer[:149]).tokens == 90
        assert find_prefix(store, session, longer[:89]) is None
        assert find_prefix(store, session, [7, *longer]) is None


def test_objects_of_tiles_are_shared_by_prefixes_that_begin_alike(model, tmp_path):
    store, ids = Store(tmp_path / "store", create=True), tokens_of(300)
    with session_of(model).attached() as session:
        cache = filled(session, ids[:, :200])
        put_prefix(store, session, cache, ids[0, :200].tolist())
        with torch.no_grad():
            session.model(ids[:, 200:], use_cache=True, **{session.keyword: cache})
        put_prefix(store, session, cache, ids[0].tolist())
    first, second = ([each.sha256 for each in read_prefix(path).objects] for path in store.all_prefixes())
    assert len(first) > 2
    assert first[:-1] == second[: len(first) - 1]


def test_another_plan_or_model_has_no_prefix(model, stored, new_model, tmp_path):
    store, ids = stored
    other = load_model(find_model(str(new_model(tmp_path / "other", seed=5))), dtype="bfloat16")
    for session in (session_of(model, seed=1), session_of(other)):
        with session.attached():
            assert find_prefix(store, session, ids[0].tolist()) is None
            with pytest.raises(ArtifactError, match="no prefix of these 150 tokens"):
                get_prefix(store, session, ids[0].tolist())


def moved_record(store):
    """The record of one plan in the place of another's."""
    path = store.all_prefixes()[-1]
    space = store.folder / "prefixes" / ("0" * 64)
    space.mkdir()
    os.rename(path, space / path.name)


def edited(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def longest(store):
    return max(store.all_prefixes(), key=lambda path: int(path.name.split("-")[0]))


DAMAGE = {
    "an object is gone": lambda s: s.object_path(objects_of(longest(s))[-1]).unlink(),
    "an object has another byte": lambda s: flip(s.object_path(objects_of(longest(s))[-1])),
    "an object is cut short": lambda s: cut(s.object_path(objects_of(longest(s))[-1])),
    "the record is empty": lambda s: longest(s).write_text(""),
    "the record is newer": lambda s: edited(longest(s), schema_version=2),
    "the record is of another plan": lambda s: edited(longest(s), plan="0" * 64),
    "the record has a field more": lambda s: edited(longest(s), extra=1),
    "the record counts wrong": lambda s: edited(longest(s), columns=151),
    "the record is a link": lambda s: link(longest(s)),
}


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def link(path):
    moved = path.with_suffix(".moved")
    path.rename(moved)
    path.symlink_to(moved)


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_passed_over_and_told(model, stored, what):
    store, ids = stored
    DAMAGE[what](store)
    with session_of(model).attached() as session:
        with pytest.raises(ArtifactError):
            get_prefix(store, session, ids[0].tolist())
        # the shorter one is sound: its tokens are read from the store, the others computed again
        assert find_prefix(store, session, ids[0].tolist()).tokens == 90
    found = problems(store, objects_of, lambda data: None)
    assert longest(store) in found


def test_a_record_in_another_place_is_refused(model, stored):
    store, ids = stored
    path = longest(store)
    swapped = path.with_name("90-" + path.name.split("-")[1])
    os.rename(path, swapped)
    with session_of(model).attached() as session:
        assert find_prefix(store, session, ids[0].tolist()).tokens == 90
    other = path.parent.with_name("0" * 64)
    os.rename(path.parent, other)
    with session_of(model).attached() as session:
        assert find_prefix(store, session, ids[0].tolist()) is None


@pytest.mark.parametrize("when", [0, 1])
def test_a_full_disk_leaves_what_was_there(model, stored, monkeypatch, when):
    store, ids = stored
    before = {path: path.read_bytes() for path in store.folder.rglob("*") if path.is_file() and path.suffix != ".lock"}
    count, real = [], os.replace

    def full(source, target):
        count.append(target)
        if len(count) > when:
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(store_module.os, "replace", full)
    more = tokens_of(220, seed=3)
    with session_of(model).attached() as session, pytest.raises(AatcError, match="No space left"):
        put_prefix(store, session, filled(session, more), more[0].tolist())
    monkeypatch.undo()
    after = {path: path.read_bytes() for path in store.folder.rglob("*") if path.is_file() and path.suffix != ".lock"}
    assert {path: data for path, data in after.items() if path in before} == before
    assert len(after) - len(before) == when
    with store.writing():
        assert collect_garbage(store, None, objects_of).objects == when
    with session_of(model).attached() as session:
        assert find_prefix(store, session, ids[0].tolist()).tokens == 150
        assert find_prefix(store, session, more[0].tolist()) is None


def slow_writer(folder, ready):
    real = store_module.os.replace

    def waits(source, target):
        ready.set()
        time.sleep(60)
        real(source, target)

    store_module.os.replace = waits
    store = Store(folder)
    with store.writing():
        store.add_object(b"x" * 1000)


def test_a_killed_writer_leaves_nothing_that_is_read_and_no_lock(stored):
    store, _ = stored
    before = kept(store)
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    writer = context.Process(target=slow_writer, args=(store.folder, ready))
    writer.start()
    assert ready.wait(30)
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()
    assert kept(store) == before
    assert list(store.folder.rglob(".*tmp-aatc-*"))
    with store.writing():
        collect_garbage(store, None, objects_of)
    assert not list(store.folder.rglob(".*tmp-aatc-*"))
    assert kept(store) == before


def writer_of(folder, seed, rounds):
    store, source = Store(folder), random.Random(seed)
    for _ in range(rounds):
        data = source.randbytes(500)
        with store.writing():
            store.add_object(data)
        store.write_chunk("a" * 64, "b" * 64, data)


def test_two_engines_on_one_store(tmp_path):
    """Two processes write objects and one and the same chunk, while a third collects: every file is whole."""
    store = Store(tmp_path / "store", create=True)
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=writer_of, args=(store.folder, seed, 40)) for seed in (1, 2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        with store.writing():
            collect_garbage(store, None, objects_of)
        chunk = store.read_chunk("a" * 64, "b" * 64)
        assert chunk is None or len(chunk) == 500
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert problems(store, objects_of, lambda data: None) == {}


def test_a_limit_takes_what_was_used_least_recently(model, stored):
    store, ids = stored
    short, long = sorted(store.all_prefixes(), key=lambda path: int(path.name.split("-")[0]))
    os.utime(short, (1, 1))
    os.utime(long, (2, 2))
    with session_of(model).attached() as session:
        get_prefix(store, session, ids[0, :90].tolist())
    size = kept(store).bytes
    with store.writing():
        done = collect_garbage(store, size - 1, objects_of)
    assert done.prefixes == 1
    assert not long.exists()
    assert short.exists()
    assert problems(store, objects_of, lambda data: None) == {}
    with store.writing():
        assert collect_garbage(store, 0, objects_of).bytes == 0


def test_another_folder_is_no_store(tmp_path):
    with pytest.raises(ArtifactError, match="no store at"):
        Store(tmp_path / "none")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ArtifactError, match="no store"):
        Store(tmp_path, create=True)
    store = Store(tmp_path / "new", create=True)
    (store.folder / "store.json").write_text(json.dumps({"kind": "store", "schema_version": 2}))
    with pytest.raises(ArtifactError, match="no store of version 1"):
        Store(store.folder)
    with pytest.raises(ArtifactError, match="names nothing"):
        store.chunk_path("../..", "b" * 64)


def test_a_chunk_that_a_power_cut_tore_is_told(tmp_path):
    store = Store(tmp_path / "store", create=True)
    write_bytes(store.chunk_path("a" * 64, "b" * 64), b"", flush=False)
    found = problems(store, objects_of, lambda data: ChunkHeader.read(memoryview(data)))
    assert list(found.values()) == ["this is no stored chunk"]


def test_a_batch_or_other_tokens_are_no_prefix(model, tmp_path):
    store, ids = Store(tmp_path / "store", create=True), tokens_of(50)
    with session_of(model).attached() as session:
        two = filled(session, ids.repeat(2, 1))
        for cache in (two, filled(session, ids)):
            with pytest.raises(AatcError, match="one sequence of its own tokens"):
                put_prefix(store, session, cache, ids[0, :49].tolist())
