"""Plugins for engines over stand-ins of the engines' abstract classes, which are compared with the real ones if there.

A stand-in has the names and parameters of what a plugin subclasses or is called by, and nothing else.
"""

# methods of a stand-in that are not abstract do nothing
# ruff: noqa: B027

from __future__ import annotations

import importlib
import inspect
import sys
import types
from abc import ABC, abstractmethod
from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch

from aatc_cli.artifacts.store import Store
from aatc_cli.config import Geometry
from aatc_cli.core import SIDES
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.core.tile_rule import TileRule
from aatc_cli.errors import AatcError, UsageError
from aatc_cli.runtime.stored.code import TileCode
from aatc_cli.runtime.stored.codec import StoredCodec
from aatc_cli.runtime.stored.header import ChunkError
from aatc_cli.runtime.stored.rotation import UNTURNED, Rotation
from aatc_cli.serve import opening
from aatc_cli.serve.chunks import EngineChunks

GEOMETRY = Geometry(layers=2, heads=4, kv_heads=2, head_dim=16, hidden_size=64)
REAL = {
    "sglang": "sglang.srt.mem_cache.hicache_storage",
    "vllm": "vllm.v1.kv_offload.base",
    "lmcache": "lmcache.v1.distributed.serde.base",
}


class HiCacheStorage(ABC):
    def register_mem_pool_host(self, mem_pool_host):
        self.mem_pool_host = mem_pool_host

    @abstractmethod
    def get(self, key, target_location=None, target_sizes=None): ...
    @abstractmethod
    def batch_get(self, keys, target_locations=None, target_sizes=None): ...
    @abstractmethod
    def set(self, key, value=None, target_location=None, target_sizes=None): ...
    @abstractmethod
    def batch_set(self, keys, values=None, target_locations=None, target_sizes=None): ...
    @abstractmethod
    def exists(self, key): ...

    def batch_get_v1(self, keys, host_indices, extra_info=None): ...
    def batch_set_v1(self, keys, host_indices, extra_info=None): ...


class Serializer(ABC):
    @abstractmethod
    def serialize(self, src, dst, key): ...
    @abstractmethod
    def estimate_serialized_size(self, layout_desc): ...


class Deserializer(ABC):
    @abstractmethod
    def deserialize(self, src, dst, key): ...


class LoadStoreSpec:
    pass


class OffloadingManager(ABC):
    @abstractmethod
    def lookup(self, key, req_context): ...
    @abstractmethod
    def prepare_load(self, keys, req_context): ...
    def touch(self, keys, req_context): ...
    def complete_load(self, keys, req_context): ...
    @abstractmethod
    def prepare_store(self, keys, req_context): ...
    def complete_store(self, keys, req_context, success=True): ...
    @abstractmethod
    def on_new_request(self, req_context): ...
    def reset_cache(self): ...


class OffloadingWorker(ABC):
    @abstractmethod
    def submit_store(self, job_id, src_spec, dst_spec): ...
    @abstractmethod
    def submit_load(self, job_id, src_spec, dst_spec, expedited=False): ...
    @abstractmethod
    def get_finished(self): ...
    @abstractmethod
    def wait(self, job_ids): ...


class OffloadingSpec(ABC):
    def __init__(self, config):
        self.config, self.extra_config = config, config.extra_config
        self.tokens_per_block = tuple(group.tokens_per_block for group in config.groups)
        self.blocks_per_chunk = config.cache.blocks_per_chunk

    @abstractmethod
    def get_manager(self): ...
    @abstractmethod
    def get_worker(self, kv_caches): ...


@dataclass
class PrepareStoreOutput:
    keys_to_store: list
    store_spec: object
    evicted_keys: list


@dataclass
class TransferResult:
    job_id: int
    success: bool


class LookupResult:
    MISS, HIT, HIT_PENDING = "miss", "hit", "pending"


class RequestOffloadingContext:
    pass


STAND_INS = {
    "sglang": [HiCacheStorage],
    "lmcache": [Serializer, Deserializer],
    "vllm": [
        *(LoadStoreSpec, OffloadingManager, OffloadingWorker, OffloadingSpec, PrepareStoreOutput, TransferResult),
        *(LookupResult, RequestOffloadingContext),
    ],
}


def real(engine: str):
    try:
        return importlib.import_module(REAL[engine])
    except Exception:
        return None


@pytest.mark.parametrize("engine", REAL)
def test_stand_ins_are_those_of_the_engine(engine):
    """Every method of a stand-in is one of the real class, with the same parameters; all abstract ones are there."""
    module = real(engine)
    if module is None:
        pytest.skip(f"{REAL[engine]} cannot be imported here")
    for mine in STAND_INS[engine]:
        theirs = getattr(module, mine.__name__)
        for name, method in vars(mine).items():
            if name.startswith("__") or not inspect.isfunction(method):
                continue
            wanted = [p.name for p in inspect.signature(method).parameters.values()]
            assert [p.name for p in inspect.signature(getattr(theirs, name)).parameters.values()] == wanted, name
        assert getattr(theirs, "__abstractmethods__", frozenset()) <= set(dir(mine))


def plugin(monkeypatch, engine: str, name: str, *others: str):
    """The plugin's module over the stand-ins, or over the engine's own classes where they can be imported."""
    module = real(engine)
    if module is None:
        module = types.ModuleType(REAL[engine])
        for one in STAND_INS[engine]:
            setattr(module, one.__name__, one)
        for count in range(1, len(parts := REAL[engine].split(".")) + 1):
            path = ".".join(parts[:count])
            monkeypatch.setitem(sys.modules, path, module if count == len(parts) else types.ModuleType(path))
    for other in (*others, name):
        monkeypatch.delitem(sys.modules, f"aatc_cli.serve.{other}", raising=False)
    return importlib.import_module(f"aatc_cli.serve.{name}")


def codec_of(tokens: int = 64) -> StoredCodec:
    rule, codecs = TileRule((32, 16, 16), "head"), []
    for layer in range(2):
        pair = {}
        for index, side in enumerate(SIDES):
            generator = torch.Generator().manual_seed(10 * layer + index)
            encode = torch.linalg.qr(torch.randn(2, 16, 16, generator=generator))[0]
            ones = torch.ones(32)
            codec = TransformCodec(encode, encode.mT.contiguous(), ones, ones.long(), ones, "lloyd", scale_bits=8)
            pair[side] = TileCodec(codec, torch.tensor((4, 5, 6))[:, None].expand(-1, 32).clone(), rule)
        codecs.append(pair)
    code = TileCode.of(codecs, [dict.fromkeys(SIDES)] * 2, 2)
    return StoredCodec(GEOMETRY, code, UNTURNED, b"p" * 32, b"m" * 32, sinks=4, tokens=tokens)


def settings(tmp_path, **changes):
    given = {"plan": "p", "model": "m", "store": str(tmp_path / "store")} | changes
    return opening.settings_of({"aatc": given})


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return float((a.float() - b.float()).norm() / b.float().norm()) < 0.2


class HostPool:
    """The pool of HiCache that a backend is given: pages of ``page_size`` tokens in one buffer."""

    dtype, page_size = torch.float16, 64

    def __init__(self, layout):
        self.layout = layout
        shape = (2, 2, 256, 2, 16) if layout == "layer_first" else (2, 256, 2, 2, 16)
        self.kv_buffer = torch.randn(shape, generator=torch.Generator().manual_seed(0)).half()

    def get_data_page(self, index, flat=True):
        first = self.layout == "layer_first"
        page = self.kv_buffer[:, :, index : index + 64] if first else self.kv_buffer[:, index : index + 64]
        return page.flatten() if flat else page

    def set_from_flat_data_page(self, index, data):
        page = self.get_data_page(index, flat=False)
        page.copy_(data.reshape(page.shape))


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_pages_of_sglang_come_back_at_their_positions_alone(monkeypatch, tmp_path, layout):
    module = plugin(monkeypatch, "sglang", "sglang")
    monkeypatch.setattr(module, "require_version", lambda *args: "")
    monkeypatch.setattr(module, "codec_of", lambda settings, tokens: codec_of(tokens))
    extra = {"interface_v1": 1, "aatc": {"plan": "p", "model": "m", "store": str(tmp_path / "store")}}
    config = types.SimpleNamespace(is_mla_model=False, pp_size=1, tp_size=1, extra_config=extra, model_name="m")
    backend, pool = module.AatcStorage(config, {}), HostPool(layout)
    backend.register_mem_pool_host(pool)
    before, indices = pool.kv_buffer.clone(), torch.arange(256)
    told = types.SimpleNamespace(prefix_keys=[])
    assert backend.batch_set_v1(["a", "b"], indices[:128], told) == [True, True]
    assert backend.exists("a")
    assert not backend.exists("c")
    pool.kv_buffer.zero_()
    assert backend.batch_get_v1(["a", "b", "c"], indices[:192], told) == [True, True, False]
    span = (slice(None), slice(None), slice(0, 128)) if layout == "layer_first" else (slice(None), slice(0, 128))
    assert close(pool.kv_buffer[span], before[span])
    later = types.SimpleNamespace(prefix_keys=["z"])
    assert backend.batch_get_v1(["a"], indices[:64], later) == [False]
    assert backend.batch_get_v1(["a"], indices[:64], None) == [False]
    assert backend.batch_set_v1(["d"], indices[:64], types.SimpleNamespace(prefix_keys=None)) == [False]
    with pytest.raises(AatcError, match="whole models"):
        module.AatcStorage(types.SimpleNamespace(**vars(config) | {"tp_size": 2}), {})
    with pytest.raises(AatcError, match="interface v1"):
        module.AatcStorage(types.SimpleNamespace(**vars(config) | {"extra_config": {}}), {})


def test_a_serde_of_lmcache_fills_what_it_read_and_nothing_else(monkeypatch):
    module = plugin(monkeypatch, "lmcache", "lmcache")
    codec = replace(codec_of(), sinks=0)
    key = types.SimpleNamespace(chunk_hash=b"h", model_name="m", kv_rank=0, object_group_id=0, cache_salt="")
    src = types.SimpleNamespace(tensor=torch.randn(2, 2, 64, 32).bfloat16())
    writer, reader = module.AatcSerializer(codec), module.AatcDeserializer(codec)
    room = types.SimpleNamespace(tensor=torch.zeros(writer.estimate_serialized_size(None), dtype=torch.uint8))
    assert writer.serialize(src, room, key) == room.tensor.numel()
    dst = types.SimpleNamespace(tensor=torch.zeros(2, 2, 64, 32, dtype=torch.bfloat16))
    reader.deserialize(room, dst, key)
    assert close(dst.tensor, src.tensor)
    kept = dst.tensor.clone()
    room.tensor[-100] ^= 1
    for damaged, other in ((room, key), (room, types.SimpleNamespace(**vars(key) | {"cache_salt": "s"}))):
        with pytest.raises(ChunkError):
            reader.deserialize(damaged, dst, other)
        room.tensor[-100] ^= 1
    assert torch.equal(dst.tensor, kept)
    with pytest.raises(AatcError, match="no chunk of 64 tokens"):
        writer.serialize(types.SimpleNamespace(tensor=torch.zeros(2, 2, 32, 32).half()), room, key)
    monkeypatch.setattr(module, "require_version", lambda *args: "")
    turned = replace(codec, rotation=replace(UNTURNED, style="half"))
    monkeypatch.setattr(module, "codec_of", lambda settings: turned)
    with pytest.raises(AatcError, match="before RoPE"):
        module.create({"aatc": {"plan": "p", "model": "m"}})


class Request:
    def __init__(self, positions):
        self.positions = positions

    def get_offload_key_position(self, key):
        return self.positions.get(key)


def test_the_tier_of_vllm_holds_chunks_by_the_plan_s_bytes(monkeypatch):
    module = plugin(monkeypatch, "vllm", "vllm", "vllm_manager", "vllm_worker")
    monkeypatch.setattr(module, "require_version", lambda *args: "")
    monkeypatch.setattr(module, "codec_of", lambda settings, tokens: codec_of(tokens))
    size = codec_of().nbytes(0)
    space = types.SimpleNamespace
    extra = {"cpu_bytes_to_use": 3 * size + 5, "aatc": {"plan": "p", "model": "m"}}
    config = space(
        groups=(space(tokens_per_block=16),), cache=space(blocks_per_chunk=4, tokens_per_hash=16),
        parallel=space(world_size=1), extra_config=extra, model=space(dtype="float16"), enable_kv_cache_events=False,
        kv_cache_layout="LBHNC",
    )  # fmt: skip
    spec = module.AatcOffloadingSpec(config)
    assert spec.slots == 3
    tensors = [space(tensor=torch.randn(40, 2 * 16 * 32).half().view(torch.int8), page_size_bytes=2048) for _ in "ab"]
    refs = [[space(tensor_idx=i, page_size_bytes=2048) for i in range(2)]]
    worker = spec.get_worker(space(tensors=tensors, group_data_refs=refs))
    manager, request = spec.get_manager(), Request({b"a": 64, b"b": 128, b"c": 192, b"d": 256})
    before = [each.tensor.clone() for each in tensors]

    def store(keys, blocks):
        out = manager.prepare_store(keys, request)
        assert out is not None
        worker.submit_store(1, space(block_ids=blocks), out.store_spec)
        worker.wait({1})
        [result] = worker.get_finished()
        manager.complete_store(out.keys_to_store, request, result.success)
        return out

    assert store([b"a", b"b", b"x"], list(range(8))).keys_to_store == [b"a", b"b"]
    assert manager.lookup(b"a", request) == manager.lookup(b"b", request)
    assert manager.lookup(b"a", request) != manager.lookup(b"x", request)
    for each in tensors:
        each.tensor.zero_()
    held = manager.prepare_load([b"a", b"b"], request)
    # two blocks of the first chunk are there already; the others go to blocks 20 to 25
    worker.submit_load(2, held, space(block_ids=list(range(20, 26)), block_indices=[2]))
    worker.wait({2})
    assert worker.get_finished()[0].success
    for each, old in zip(tensors, before, strict=True):
        assert close(each.tensor[20:26].view(torch.float16), old[2:8].view(torch.float16))
        assert not bool(each.tensor[:20].any())
    assert manager.prepare_store([b"c", b"d"], request) is None
    manager.complete_load([b"a", b"b"], request)
    manager.touch([b"a"], request)
    assert store([b"c", b"d"], list(range(8, 16))).evicted_keys == [b"b"]
    # a slot that holds another chunk than the manager says: the load fails, and nothing is written
    held_slots = worker.transfers.slots
    held_slots[held.slots[0]] = held_slots[manager.entries[b"d"].slot]
    for each in tensors:
        each.tensor.zero_()
    worker.submit_load(3, manager.prepare_load([b"a"], request), space(block_ids=[1, 2, 3, 4], block_indices=[0]))
    worker.wait({3})
    assert not worker.get_finished()[0].success
    assert not any(bool(each.tensor.any()) for each in tensors)
    worker.shutdown()


class OffloadingHandler(ABC):
    @abstractmethod
    def transfer_async(self, job_id, spec): ...
    @abstractmethod
    def get_finished(self): ...
    @abstractmethod
    def wait(self, job_ids): ...


class LoadStoreSpec23(ABC):
    @staticmethod
    @abstractmethod
    def medium(): ...


class Spec23(ABC):
    """The spec of 0.23: of blocks of 16 tokens, and chunks of as many as the extra configuration says."""

    def __init__(self, vllm_config, kv_cache_config):
        self.vllm_config, self.kv_cache_config = vllm_config, kv_cache_config
        self.extra_config = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.gpu_block_size = (16,)
        self.block_size_factor = self.extra_config["block_size"] // 16

    @abstractmethod
    def get_manager(self): ...
    @abstractmethod
    def get_handlers(self, kv_caches): ...


def plugin_23(monkeypatch):
    """The plugin for vLLM 0.23 over stand-ins of its classes, or over the real ones where that version is there."""
    found = real("vllm")
    if found is None or not hasattr(found, "GPULoadStoreSpec") or hasattr(found, "LookupResult"):
        modules = {
            "base": {
                "LoadStoreSpec": LoadStoreSpec23, "OffloadingManager": OffloadingManager, "OffloadingSpec": Spec23,
                "PrepareStoreOutput": PrepareStoreOutput, "RequestOffloadingContext": RequestOffloadingContext,
                "GPULoadStoreSpec": type("GPULoadStoreSpec", (), {}),
            },
            "worker.worker": {"OffloadingHandler": OffloadingHandler, "TransferResult": TransferResult},
        }  # fmt: skip
        for name, held in modules.items():
            module = types.ModuleType(name)
            vars(module).update(held)
            monkeypatch.setitem(sys.modules, f"vllm.v1.kv_offload.{name}", module)
        for name in ("vllm", "vllm.v1", "vllm.v1.kv_offload", "vllm.v1.kv_offload.worker"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name in ("vllm_0_23", "vllm_manager"):
        monkeypatch.delitem(sys.modules, f"aatc_cli.serve.{name}", raising=False)
    return importlib.import_module("aatc_cli.serve.vllm_0_23")


@pytest.mark.parametrize(("together", "layout"), [(False, "NHD"), (True, "NHD"), (False, "HND"), (True, "HND")])
def test_the_tier_of_vllm_0_23_finds_positions_from_the_index_of_a_job_s_first_block(monkeypatch, together, layout):
    """Keys before RoPE: a wrong position would turn them wrongly, so what comes back tells that it was right."""
    module, space = plugin_23(monkeypatch), types.SimpleNamespace
    monkeypatch.setattr(module, "require_version", lambda *args: "")
    codec = replace(codec_of(), rotation=turning())
    monkeypatch.setattr(module, "codec_of", lambda settings, tokens: codec)
    config = space(set_current_vllm_config=lambda config: nullcontext())
    monkeypatch.setitem(sys.modules, "vllm.config", config)
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.utils", space(get_kv_cache_layout=lambda: layout))
    extra = {"block_size": 64, "cpu_bytes_to_use": 3 * codec.nbytes(0) + 5, "aatc": {"plan": "p", "model": "m"}}
    vllm_config = space(
        kv_transfer_config=space(kv_connector_extra_config=extra), model_config=space(dtype=torch.float16),
        parallel_config=space(world_size=1),
    )  # fmt: skip
    groups = space(kv_cache_groups=[space(layer_names=["l.0.a", "l.1.a"])])
    spec = object.__new__(module.AatcOffloadingSpec)
    monkeypatch.setattr(module.AatcOffloadingSpec.__mro__[1], "__init__", Spec23.__init__)
    spec.__init__(vllm_config, groups)
    assert spec.slots == 3
    # blocks of both layers lie in one tensor, or each layer has its own
    whole = torch.randn(40, 2, 2 * 16 * 32).half()
    tensors = [whole.flatten(1)] if together else [whole[:, 0].clone(), whole[:, 1].clone()]
    caches = space(
        tensors=[space(tensor=each.view(torch.int8)) for each in tensors],
        group_data_refs=[[space(tensor_idx=i, page_size_bytes=2048 * (1 + together)) for i in range(2 - together)]],
    )
    # keys of one size and values of another, which a view of another order would mix
    wanted = {"k": 100 * torch.randn(2, 640, 2, 16).half(), "v": torch.randn(2, 640, 2, 16).half()}
    logical = torch.stack([wanted[side].view(2, 40, 16, 2, 16) for side in SIDES], 2)  # layers, blocks, sides
    order = {"NHD": (0, 1, 2, 3, 4, 5), "HND": (0, 1, 2, 4, 3, 5)}[layout]
    if together:
        order = {"NHD": (1, 0, 2, 3, 4, 5), "HND": (1, 4, 0, 2, 3, 5)}[layout]
    physical = logical.permute(order).contiguous()
    for index, each in enumerate(tensors):
        each.copy_((physical if together else physical[index]).reshape(40, -1))
    [(source, target, handler), (again, blocks_type, same)] = spec.get_handlers(caches)
    assert (source, target, handler) == (blocks_type, again, same)
    manager, request = spec.get_manager(), None
    blocks = lambda ids, index: space(block_ids=ids, block_indices=[index])  # noqa: E731

    def store(job, keys, ids, index):
        out = manager.prepare_store(keys, request)
        handler.transfer_async(job, (blocks(ids, index), out.store_spec))
        handler.wait({job})
        assert [(r.job_id, r.success) for r in handler.get_finished()] == [(job, True)]
        manager.complete_store(out.keys_to_store, request)
        return out.keys_to_store

    # a chunk in the middle first; then its neighbours, which are no neighbours of one another
    assert store(1, [b"b"], list(range(4, 8)), 4) == [b"b"]
    assert manager.lookup(b"b", request) is True
    assert manager.lookup(b"a", request) is False
    assert store(2, [b"a", b"b", b"c"], [*range(4), *range(8, 12)], 0) == [b"a", b"c"]
    before = [each.clone() for each in tensors]
    for each in tensors:
        each.zero_()
    held = manager.prepare_load([b"a", b"b", b"c"], request)
    handler.transfer_async(3, (held, blocks(list(range(20, 30)), 2)))
    handler.wait({3})
    assert [r.success for r in handler.get_finished()] == [True]
    assert spec.transfers.moved == {"stored": 3, "loaded": 3}
    for each, old in zip(tensors, before, strict=True):
        assert close(each[20:30], old[2:12])
        assert not bool(each[:20].any())
    values = torch.stack([layer[20:30, 1].flatten(0, 1) for layer in spec.transfers.views])
    assert close(values, wanted["v"][:, 32:192])
    # a key before its position: refused, and the engine stops
    handler.transfer_async(4, (manager.prepare_load([b"c"], request), blocks([1, 2, 3, 4], 0)))
    handler.wait({4})
    with pytest.raises(AatcError, match="another position"):
        handler.get_finished()
    # what cannot be coded is kept as it is
    for each in tensors:
        each[4:8] = torch.inf
    manager.reset_cache()
    assert store(5, [b"i"], [4, 5, 6, 7], 0) == [b"i"]
    handler.transfer_async(6, (manager.prepare_load([b"i"], request), blocks([1, 2, 3, 4], 0)))
    handler.wait({6})
    assert all(r.success for r in handler.get_finished())
    assert all(bool(torch.isinf(each[1:5]).all()) for each in tensors)
    handler.shutdown()


@pytest.mark.parametrize(
    ("order", "together"),
    [
        *[(order, False) for order in ("KNHD", "KHND", "HNKD", "NHKD")],
        *[(order, True) for order in ("LKNHD", "HLKND", "LHNKD", "LNHKD", "HLNKD")],
    ],
)
def test_blocks_are_read_as_they_lie(order, together):
    """The layouts of 0.23 (K before tokens) and of 0.33 (keys beside values): every number at its place."""
    from aatc_cli.serve.vllm_transfers import ChunkTransfers

    logical = torch.arange(2 * 40 * 2 * 16 * 2 * 16).view(2, 40, 2, 16, 2, 16).half()  # L, blocks, K, N, H, D
    axes = {"L": 0, "K": 2, "N": 3, "H": 4, "D": 5}
    if together:
        whole = logical.permute(1, *(axes[axis] for axis in order)).reshape(40, -1).contiguous()
        tensors = [whole]
    else:
        tensors = [one.permute(0, *(axes[a] - 1 for a in order)).reshape(40, -1).contiguous() for one in logical]
    space = types.SimpleNamespace
    caches = space(
        tensors=[space(tensor=each.view(torch.int8)) for each in tensors],
        group_data_refs=[[space(tensor_idx=i, page_size_bytes=2048 * (1 + together)) for i in range(2 - together)]],
    )
    orders = ("", order) if together else (order, "")
    transfers = ChunkTransfers(codec_of(), caches, 16, "float16", orders)
    for view, one in zip(transfers.views, logical, strict=True):
        assert torch.equal(view, one)
    transfers.shutdown()
    with pytest.raises(AatcError, match="layers with pages"):
        ChunkTransfers(codec_of(), caches, 16, "float16", orders[::-1])


def turning():
    def tables(positions):
        angles = positions[:, None].float() * torch.tensor([10000.0 ** (-i / 8) for i in range(8)]).repeat(2)
        return angles.cos(), angles.sin()

    return Rotation(tables, "half")


def test_a_store_of_an_engine_stays_within_its_limit_and_never_lies(tmp_path):
    from aatc_cli.artifacts.store_keeping import kept
    from aatc_cli.runtime.stored.pages import Pages

    codec = codec_of()
    size = codec.nbytes()
    chunks = EngineChunks.of(codec, settings(tmp_path, limit=str(5 * size)), "e")
    pages = Pages(*torch.randn(2, 2, 64, 2, 16).half())
    for index in range(12):
        assert chunks.put(f"k{index}", pages, 64)
        assert kept(chunks.store).bytes <= 5 * size
    assert chunks.get("k11", 64, torch.float16) is not None
    assert chunks.get("k0", 64, torch.float16) is None
    other = EngineChunks(replace(codec, plan=b"q" * 32), chunks.store, None, "e")
    assert other.get("k11", 64, torch.float16) is None
    # the file of one chunk under the name of another
    path = Store(chunks.store.folder).chunk_path(codec.digest, chunks.name("k99").hex())
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(chunks.store.chunk_path(codec.digest, chunks.name("k11").hex()).read_bytes())
    assert chunks.get("k99", 64, torch.float16) is None
    assert not chunks.put("k1", Pages(pages.keys[:, :32], pages.values[:, :32]), 64)


def test_settings_and_versions_are_checked():
    with pytest.raises(UsageError, match='has no "aatc"'):
        opening.settings_of({})
    with pytest.raises(UsageError, match="plann"):
        opening.settings_of({"aatc": {"plann": "p", "model": "m"}})
    with pytest.raises(AatcError, match="not installed"):
        opening.require_version("no-such-engine", ("1.",))
    with pytest.raises(AatcError, match="not among the versions"):
        opening.require_version("torch", ("0.",))
    assert opening.require_version("torch", (torch.__version__[:2],))
