"""The backend's caches driven as vLLM drives them, without vLLM: a model over flat batches, requests coming and going.

What it generates is compared with the fused cache under `generate`, one request at a time.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import random
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AttentionInterface

from aatc_cli.config import Window
from aatc_cli.core import SIDES
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.received import received_near
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.core.tile_rule import TileRule
from aatc_cli.errors import AatcError
from aatc_cli.models.adapter import attention_layers
from aatc_cli.models.loading import empty_model, find_model, load_config, load_model
from aatc_cli.runtime.fused_tiles.encode import EncodeTables
from aatc_cli.runtime.fused_tiles.tables import TileTables
from aatc_cli.runtime.kernels import keep_rows
from aatc_cli.runtime.session import Session
from aatc_cli.runtime.stored.opening import biases_of
from aatc_cli.runtime.tiles.form import tiles_spec
from aatc_cli.serve.vllm_backend import served
from aatc_cli.serve.vllm_backend.decoding import Decoding, launch_size
from aatc_cli.serve.vllm_backend.places import Places
from aatc_cli.serve.vllm_backend.plans import Prepared
from aatc_cli.serve.vllm_backend.rows import ExactSlots
from aatc_cli.serve.vllm_backend.start import engine_for

TILE, BLOCKS, LIMIT = 64, 40, 512
WINDOW = Window(sinks=4, recent=128, flush=64)


@pytest.fixture(scope="module")
def model(tmp_path_factory, new_model):
    folder = new_model(tmp_path_factory.mktemp("models") / "wide", head_dim=64, num_hidden_layers=2)
    source = find_model(str(folder))
    loaded = load_model(source, dtype="float32").eval()
    return source, loaded


@pytest.fixture(scope="module")
def codecs():
    rule, found = TileRule((32, 16, 16), "head"), []
    for layer in range(2):
        pair = {}
        for index, side in enumerate(SIDES):
            generator = torch.Generator().manual_seed(10 * layer + index)
            encode = torch.linalg.qr(torch.randn(2, 64, 64, generator=generator))[0]
            spread = torch.linspace(1.5, 0.1, 64).repeat(2) * (0.6 if side == "k" else 1.0)
            bits = torch.stack([(spread * w).round().clamp(0, 8).long() for w in (2, 3, 4)])
            codec = TransformCodec(
                encode, encode.mT.contiguous(), torch.ones(128), bits[0], spread.square(), "uniform", scale_bits=8
            )
            pair[side] = TileCodec(codec, bits, rule)
        found.append(pair)
    return found


class Driver:
    """As much of an engine as the backend sees: blocks that are handed out, and a model over flat batches."""

    def __init__(self, model, codecs, slots=4, blocks=BLOCKS, shared=False):
        source, self.model = model
        empty = empty_model(source, load_config(source))
        prepared = Prepared("codecs", codecs, WINDOW, biases_of(empty), empty)
        config = SimpleNamespace(
            model_config=SimpleNamespace(dtype=self.model.dtype, max_model_len=LIMIT),
            scheduler_config=SimpleNamespace(max_num_seqs=slots),
            cache_config=SimpleNamespace(enable_prefix_caching=shared),
        )
        self.engine = engine_for(prepared, config, torch.device("cpu"))
        # what was in the blocks before must not matter
        self.engine.caches = [torch.full((blocks, n), 255, dtype=torch.uint8) for n in self.engine.page_bytes]
        self.free, self.tables, self.cached = list(range(blocks)), {}, {}

    def drop(self, name, preempted=False):
        self.free += self.tables.pop(name)
        self.cached.pop(name)
        self.engine.forget([] if preempted else [name], [name] if preempted else [])

    def join(self, name, blocks):
        """Let a request begin behind full blocks of another."""
        self.tables[name], self.cached[name] = list(blocks), TILE * len(blocks)

    def leave(self, name, blocks):
        """End a request whose first blocks are of another."""
        self.tables[name] = [block for block in self.tables[name] if block not in blocks]
        self.drop(name)

    def step(self, batch: dict[str, list[int]]) -> dict[str, int]:
        """Feed new tokens of some requests, single ones first; the next token of each."""
        order = sorted(batch, key=lambda name: len(batch[name]) != 1)
        table = torch.zeros(len(order), LIMIT // TILE, dtype=torch.int32)
        positions, requests = [], []
        for row, name in enumerate(order):
            done = self.cached.get(name, 0)
            blocks = self.tables.setdefault(name, [])
            while len(blocks) * TILE < done + len(batch[name]):
                blocks.append(self.free.pop())
            table[row, : len(blocks)] = torch.tensor(blocks)
            positions += range(done, done + len(batch[name]))
            requests.append((name, done, len(batch[name])))
            self.cached[name] = done + len(batch[name])
        step = self.engine.begin(requests, table, table.numpy())

        def attend(module, query, key, value, mask, scaling, **rest):
            rows = tuple(x[0].transpose(0, 1) for x in (query, key, value))
            layer = module.layer_idx
            out = torch.full_like(rows[0], torch.nan)
            return self.engine.attend(layer, rows, self.engine.caches[layer], step, out)[None], None

        AttentionInterface.register("driven", attend)
        before, self.model.config._attn_implementation = self.model.config._attn_implementation, "driven"
        try:
            ids = torch.tensor([[token for name in order for token in batch[name]]])
            with torch.no_grad():
                logits = self.model(ids, position_ids=torch.tensor([positions]), use_cache=False).logits[0]
        finally:
            self.model.config._attn_implementation = before
        ends = torch.tensor([len(batch[name]) for name in order]).cumsum(0) - 1
        return dict(zip(order, logits[ends].argmax(-1).tolist(), strict=True))


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def alone(model, codecs, tokens, steps):
    """What the fused cache generates greedily."""
    _, loaded = model
    layers = attention_layers(loaded)
    session = Session.of("tiles", loaded, layers, tiles_spec(loaded, layers, codecs, WINDOW, None, "fused"))
    with session.attached(), torch.no_grad():
        cache = {session.keyword: session.new_cache()}
        ids = torch.tensor([tokens])
        out = loaded.generate(ids, max_new_tokens=steps, do_sample=False, eos_token_id=None, **cache)
    return out[0, len(tokens) :].tolist()


@contextmanager
def default_type(dtype):
    """torch's own default, as vLLM sets it while it makes a model; nothing that was made before is at hand."""
    for each in gc.get_objects():
        if type(each) is functools._lru_cache_wrapper and each.__module__.startswith("aatc_cli."):
            each.cache_clear()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def tensors_in(thing, seen) -> list[torch.Tensor]:
    """All tensors that an object of this package holds, in order."""
    if isinstance(thing, torch.Tensor):
        return [thing]
    if id(thing) in seen or isinstance(thing, torch.nn.Module):
        return []
    seen.add(id(thing))
    if isinstance(thing, dict):
        inner = [*thing.values()]
    elif isinstance(thing, list | tuple):
        inner = [*thing]
    else:
        inner = [*vars(thing).values()] if type(thing).__module__.startswith("aatc_cli.") else []
    return [tensor for part in inner for tensor in tensors_in(part, seen)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_an_engine_is_made_of_does_not_depend_on_the_type_that_vllm_sets(model, codecs, dtype):
    """Exact rows, sums, angles, tables of the packing and of the decode kernel, and what they answer."""
    made, tokens, answers = [], prompt(3, 200), []
    for default in (torch.float32, dtype):
        with default_type(default):
            driver = Driver(model, codecs)
            engine = driver.engine
            tables = [EncodeTables.of(fused.layer.held) for fused in engine.form.layers]
            tables += [
                TileTables.of(fused.layer.codecs, fused.layer.held, fused.layer.biases) for fused in engine.form.layers
            ]
            parts = (engine.form, engine.exact, engine.turning, engine.back, engine.decoding)
            made.append([tensor.clone() for tensor in tensors_in((*parts, tables), set())])
            token = driver.step({"a": tokens})["a"]
            answers.append([token, *(driver.step({"a": [token]})["a"] for _ in range(70))])
            made[-1] += [engine.exact.received.clone(), *(cache.clone() for cache in engine.caches)]
    assert len(made[0]) == len(made[1]) > 50
    for wanted, found in zip(*made, strict=True):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
    assert answers[0] == answers[1]


def test_a_plan_is_opened_in_float32_whatever_vllm_sets(monkeypatch):
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={}), device_config=SimpleNamespace(device="cpu")
    )
    monkeypatch.setattr(served, "open_engine", lambda config, device: torch.get_default_dtype())
    monkeypatch.setattr(served, "_SERVED", {})
    with default_type(torch.bfloat16):
        assert served.served_of(config).engine is torch.float32
        assert torch.get_default_dtype() is torch.bfloat16


def generate(driver, prompts, steps, budget=10_000):
    """Greedy tokens of requests that come one after another, in batches; long prompts go in chunks of ``budget``."""
    waiting, fed, out = dict(prompts), {}, {name: [] for name in prompts}
    while waiting or fed:
        batch = {name: [out[name][-1]] for name in fed if not fed[name]}
        if waiting and len(fed) < driver.engine.places.count:
            name = next(iter(waiting))
            fed[name] = waiting.pop(name)
        for name, left in fed.items():
            if left:
                batch[name], fed[name] = left[:budget], left[budget:]
        for name, token in driver.step(batch).items():
            if not fed[name]:
                out[name].append(token)
                if len(out[name]) == steps:
                    driver.drop(name)
                    del fed[name]
    return out


LENGTHS = {"a": 300, "b": 1, "c": 131, "d": 197, "e": 3, "f": 64}


def test_requests_that_come_and_go_are_answered_as_if_alone(model, codecs):
    prompts = {name: prompt(seed, length) for seed, (name, length) in enumerate(LENGTHS.items())}
    found = generate(Driver(model, codecs), prompts, 24)
    for name, tokens in prompts.items():
        assert found[name] == alone(model, codecs, tokens, 24), name


def test_a_request_that_lost_its_blocks_is_read_anew(model, codecs):
    driver, tokens = Driver(model, codecs), prompt(7, 150)
    out = [driver.step({"a": tokens})["a"]]
    driver.step({"b": prompt(8, 80)})
    for _ in range(24):
        out.append(driver.step({"a": [out[-1]]})["a"])
    driver.drop("a", preempted=True)
    assert [*driver.engine.places.lost.latest] == [("a", 174)]
    first = list(out)
    again = [driver.step({"a": tokens + first})["a"]]
    for _ in range(10):
        again.append(driver.step({"a": [again[-1]]})["a"])
    assert first == alone(model, codecs, tokens, 25)
    assert again == alone(model, codecs, tokens + first, 11)


def test_chunks_of_a_prompt_read_what_is_packed(model, codecs):
    """As the fused cache does that is fed the same chunks."""
    _, loaded = model
    tokens = prompt(9, 350)
    found = generate(Driver(model, codecs), {"a": tokens, "b": prompt(3, 30)}, 20, budget=150)["a"]
    layers = attention_layers(loaded)
    session = Session.of("tiles", loaded, layers, tiles_spec(loaded, layers, codecs, WINDOW, None, "fused"))
    out = []
    with session.attached(), torch.no_grad():
        kwargs = {session.keyword: session.new_cache(), "use_cache": True}
        for start in range(0, 350, 150):
            logits = loaded(torch.tensor([tokens[start : start + 150]]), **kwargs).logits
        for _ in range(20):
            out.append(int(logits[0, -1].argmax()))
            logits = loaded(torch.tensor([[out[-1]]]), **kwargs).logits
    assert found == out


def test_a_shared_prefix_is_read_from_its_blocks(model, codecs):
    """Who goes on from full blocks of another reads exact sinks and packed tokens, with the other there or gone."""
    _, loaded = model
    text = prompt(11, 270)
    driver = Driver(model, codecs, shared=True)
    driver.step({"a": text})
    blocks = list(driver.tables["a"])
    found = []
    for name in ("b", "c"):
        driver.join(name, blocks[:3])
        out = [driver.step({name: text[192:250]})[name]]
        for _ in range(8):
            out.append(driver.step({name: [out[-1]]})[name])
        found.append(out)
        driver.leave(name, blocks[:3])
        if name == "b":
            driver.drop("a")
    assert found[0] == found[1]
    # the same by the store of the fused cache, with these tiles in place
    layers, window = attention_layers(loaded), WINDOW.model_copy(update={"sinks": 64})
    spec = tiles_spec(loaded, layers, codecs, window, None, "fused")
    session = Session.of("tiles", loaded, layers, spec)
    with session.attached(), torch.no_grad():
        cache = session.new_cache()
        kwargs = {session.keyword: cache, "use_cache": True}
        loaded(torch.tensor([text[:192]]), **kwargs)
        for layer, store in enumerate(cache.state.groups[0].stores):
            tiles = driver.engine.caches[layer][blocks[1:3], : store.layer.held.nbytes]
            store.pages.count = 0
            store.pages.append(tiles[None])
        logits = loaded(torch.tensor([text[192:250]]), **kwargs).logits
        wanted = [int(logits[0, -1].argmax())]
        for _ in range(8):
            logits = loaded(torch.tensor([[wanted[-1]]]), **kwargs).logits
            wanted.append(int(logits[0, -1].argmax()))
    assert found[0] == wanted


def test_a_prefix_is_shared_within_one_step_and_by_what_was_answered(model, codecs):
    driver, text = Driver(model, codecs, shared=True), prompt(12, 130)
    # b goes on from blocks that a fills in the same step, c with a single token
    driver.tables["a"] = [driver.free.pop() for _ in range(3)]
    for name, count in (("b", 128), ("c", 64)):
        driver.join(name, driver.tables["a"][: count // 64])
    driver.engine.forget([], [], ["a", "b", "c"])
    first = driver.step({"a": text, "b": text[128:130], "c": text[64:65]})
    later = Driver(model, codecs, shared=True)
    later.step({"a": text})
    later.join("b", later.tables["a"][:2])
    later.join("c", later.tables["a"][:1])
    assert later.step({"b": text[128:130]})["b"] == first["b"]
    assert later.step({"c": text[64:65]})["c"] == first["c"]
    # a block that an answer fills is there for others when the step is over
    token = first["a"]
    for _ in range(62):
        token = driver.step({"a": [token]})["a"]
    assert driver.cached["a"] == 192
    third = driver.tables["a"][2]
    assert bool((driver.engine.caches[0][third] == 255).all())
    driver.drop("a")
    assert not bool((driver.engine.caches[0][third] == 255).all())
    driver.join("d", driver.tables["b"][:2])
    assert driver.step({"d": text[128:130]})["d"] == first["b"]


def test_the_sinks_of_a_forgotten_first_block_are_read_packed(model, codecs):
    driver, text = Driver(model, codecs, shared=True), prompt(13, 140)
    driver.step({"a": text})
    driver.join("b", driver.tables["a"][:1])
    exact = driver.step({"b": text[64:70]})["b"]
    driver.engine.prefixes._places.clear()
    driver.join("c", driver.tables["a"][:1])
    assert isinstance(driver.step({"c": text[64:70]})["c"], int)
    slot = {name: driver.engine.places.held[name].slot for name in "bc"}
    keys = driver.engine.exact.keys[0]
    assert torch.equal(keys[slot["b"], :64], driver.engine.prefixes.keys[0, 0])
    near = (keys[slot["c"], :64] - keys[slot["b"], :64]).norm() / keys[slot["b"], :64].norm()
    assert 0 < float(near) < 0.7
    assert isinstance(exact, int)


def test_tokens_from_elsewhere_are_refused(model, codecs):
    driver = Driver(model, codecs)
    driver.cached["a"] = 64
    with pytest.raises(AatcError, match="64 cached tokens, of which 0"):
        driver.step({"a": prompt(1, 5)})


def test_a_step_of_nobody_changes_nothing(model, codecs):
    driver, tokens = Driver(model, codecs), prompt(2, 140)
    token = driver.step({"a": tokens})["a"]
    before = [part.clone() for part in (driver.engine.exact.keys[:, :4], driver.engine.exact.received[:, :4])]
    step = driver.engine.idle(4, torch.zeros(4, 8, dtype=torch.int32))
    rows = [torch.ones(4, heads, 64) for heads in (4, 2, 2)]
    driver.engine.attend(0, tuple(rows), driver.engine.caches[0], step, torch.empty(4, 4, 64))
    after = driver.engine.exact.keys[:, :4], driver.engine.exact.received[:, :4]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert [token, driver.step({"a": [token]})["a"]] == alone(model, codecs, tokens, 2)


def test_requests_at_random_are_answered_as_if_alone(model, codecs):
    """Beside others that begin, decode and end in any step, in any order of the batch."""
    drawn, driver = random.Random(0), Driver(model, codecs, slots=5, blocks=60)
    prompts, out, left = {}, {}, {}
    for number in range(70):
        batch = {name: [out[name][-1]] for name in left}
        if len(left) < 5 and number < 45 and drawn.random() < 0.5:
            name = f"r{number}"
            prompts[name], left[name] = prompt(number, drawn.choice([1, 2, 64, 131, 133, 180, 197, 260])), 15
            out[name], batch[name] = [], prompts[name]
        names = drawn.sample([*batch], len(batch))
        for name, token in (driver.step({name: batch[name] for name in names}) if batch else {}).items():
            out[name].append(token)
            left[name] -= 1
            if not left[name] or drawn.random() < 0.02:
                del left[name]
                driver.drop(name)
    assert len(out) > 10
    for name, tokens in prompts.items():
        assert out[name] == alone(model, codecs, tokens, len(out[name])), name


def test_slots_follow_the_rows_that_decode():
    places = Places(4)
    assert places.arrange([], ["a", "b"]) == []
    assert {name: held.slot for name, held in places.held.items()} == {"a": 0, "b": 1}
    # a is not in this batch and makes room
    assert sorted(places.arrange(["b", "c"], ["d"])) == [(0, 2), (1, 0)]
    assert {name: held.slot for name, held in places.held.items()} == {"b": 0, "c": 1, "a": 2, "d": 3}
    with pytest.raises(AatcError, match="exact rows for 4"):
        places.arrange(["e", "b"], [])
    places.release(["a", "nobody"])
    places.arrange(["e", "b"], [])
    assert places.held["e"].slot == 0
    assert places.held["b"].slot == 1


def test_what_a_chunk_pays_is_what_its_queries_pay():
    """`received_near` of queries behind others that are not there, as chunks of prompts use it."""
    generator, lags = torch.Generator().manual_seed(0), (32, 64)
    query, keys = torch.randn(4, 300, 8, generator=generator), torch.randn(2, 300, 8, generator=generator)
    scores = torch.einsum("jtd,jsd->jts", query, keys.repeat_interleave(2, 0)) * 0.3
    scores = scores.masked_fill(torch.ones(300, 300).triu(1).bool(), -torch.inf)
    lag = torch.arange(300)[:, None] - torch.arange(300)
    watched = (lag >= lags[0]) & (lag <= lags[1]) & (torch.arange(300)[:, None] >= 230)
    wanted = (scores.softmax(-1) * watched).square().unflatten(0, (2, 2)).sum((1, 2))
    sums = scores.logsumexp(-1)
    sums[:, :230], query[:, :230] = torch.inf, 0.0
    torch.testing.assert_close(received_near(query[None], keys[None], sums[None], 0.3, lags)[0], wanted)


PRELUDE = """
#define __global__
#define __device__
#define __forceinline__ inline
typedef float T;
static struct { int x, y; } blockIdx, threadIdx;
static float element(const void* p, long long e) { return ((const float*)p)[e]; }
static void store(void* p, long long e, float v) { ((float*)p)[e] = v; }
"""
ENTRY = """
extern "C" void run(int count, int heads, int keys, int values, void** t) {
  for (blockIdx.x = 0; blockIdx.x < count; blockIdx.x++)
    for (blockIdx.y = 0; blockIdx.y < heads; blockIdx.y++)
      for (threadIdx.x = 0; threadIdx.x < D / 2; threadIdx.x++)
        keep_rows(heads, keys, values, t[0], t[1], (float*)t[2], (float*)t[3], (long long*)t[4], (long long*)t[5],
                  t[6], t[7], (float*)t[8]);
}
"""


def test_the_kernel_of_rows_writes_what_torch_does(tmp_path):
    """Its source as C++, thread after thread: none of them asks another."""
    if shutil.which("g++") is None:
        pytest.skip("needs a compiler of C++")
    source = (Path(keep_rows.__file__).parent / "keep_rows.cu").read_text().replace('#include "device.cuh"', PRELUDE)
    (tmp_path / "rows.cpp").write_text(source + ENTRY)
    flags = ("-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-DD=64", "-DQTYPE=2")
    subprocess.run(["g++", *flags, "-o", tmp_path / "rows.so", tmp_path / "rows.cpp"], check=True)
    library = ctypes.CDLL(str(tmp_path / "rows.so"))

    class Emulated:
        def __call__(self, rows, back, places, kept):
            tensors = (*rows, *back, *places, *kept)
            pointers = (ctypes.c_void_p * 9)(*(tensor.data_ptr() for tensor in tensors))
            library.run(rows[0].shape[0], rows[0].shape[1], rows[0].stride(0), rows[1].stride(0), pointers)

    generator = torch.Generator().manual_seed(0)
    made = [ExactSlots(2, 4, WINDOW, (2, 64), torch.empty(0)) for _ in range(2)]
    for exact in made:
        exact.received.fill_(1.0)
    made[0].keeper = Emulated()
    # keys and values as halves of one tensor, as projections leave them
    both = torch.randn(3, 4, 64, generator=generator)
    angle = torch.rand(3, 32, generator=generator).repeat(1, 2)
    back = angle.cos() * 0.9, -angle.sin() * 0.9
    places = made[0].places(torch.tensor([2, 140, 3]), torch.tensor([0, 3, 4]))
    for exact in made:
        exact.write(1, (both[:, :2], both[:, 2:]), back, places)
    for name in ("keys", "values", "received"):
        torch.testing.assert_close(getattr(made[0], name), getattr(made[1], name))


def test_answers_that_are_no_numbers_end_the_engine(model, codecs):
    driver = Driver(model, codecs)
    token = {"a": driver.step({"a": prompt(1, 150)})["a"], "b": driver.step({"b": prompt(2, 90)})["b"]}
    # rows that belong to nobody are none of anybody's answer
    driver.engine.exact.keys[:, 2:] = torch.nan
    driver.step({name: [each] for name, each in token.items()})
    driver.engine.forget([], [])
    driver.engine.exact.keys[0, 1] = torch.nan
    driver.step({name: [each] for name, each in token.items()})
    with pytest.raises(AatcError, match="attention of 1 decoding requests of codecs became no number"):
        driver.engine.forget([], [])


def test_lengths_that_do_not_arrive_end_the_engine(model, codecs, monkeypatch):
    driver = Driver(model, codecs)
    token = driver.step({"a": prompt(1, 150)})["a"]
    attend = Decoding._attend

    def without(self, *given):
        # to the kernel the request is none: its attention is zero, which is a number
        self.tokens.zero_()
        attend(self, *given)

    monkeypatch.setattr(Decoding, "_attend", without)
    driver.step({"a": [token]})
    with pytest.raises(AatcError, match="attention of 1 decoding requests of codecs became no number"):
        driver.engine.forget([], [])


def test_a_launch_has_no_more_rows_than_there_are_slots():
    # the engine's table of blocks has a row for every slot, and the kernel reads as many as the launch has
    assert [launch_size(batch, 60) for batch in (1, 3, 33, 49, 60)] == [1, 4, 48, 60, 60]
