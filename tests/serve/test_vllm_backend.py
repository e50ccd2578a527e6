"""The backend's classes over stand-ins of vLLM's, with the names and parameters of the real ones, and its refusals.

Where vLLM can be imported the stand-ins are compared with it.
"""

# methods of a stand-in that are not abstract do nothing
# ruff: noqa: B027

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
import types
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from enum import Enum
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch

from aatc_cli.artifacts.plan import Plan
from aatc_cli.errors import AatcError, UsageError
from aatc_cli.serve.vllm_backend import command, lost, served, start

BASE = "vllm.v1.attention.backend"
REGISTRY = "vllm.v1.attention.backends.registry"
SPECS = "vllm.v1.kv_cache_interface"
LAYER = "vllm.model_executor.layers.attention.attention"
RUNNER = "vllm.v1.worker.gpu_model_runner"
CORE = "vllm.v1.engine.core"
MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"
KINDS = "vllm.v1.kv_cache_spec_registry"


class AttentionCGSupport(Enum):
    UNIFORM_SINGLE_TOKEN_DECODE = 1


class AttentionBackend(ABC):
    @staticmethod
    def get_supported_kernel_block_sizes(): ...
    @staticmethod
    @abstractmethod
    def get_name(): ...
    @staticmethod
    @abstractmethod
    def get_impl_cls(): ...
    @staticmethod
    @abstractmethod
    def get_builder_cls(): ...
    @staticmethod
    @abstractmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"): ...


class AttentionMetadataBuilder(ABC):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.vllm_config = vllm_config

    def _init_reorder_batch_threshold(self, reorder_batch_threshold=1, **rest):
        self.reorder_batch_threshold = reorder_batch_threshold

    @abstractmethod
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...
    def build_for_cudagraph_capture(self, common_attn_metadata): ...


class AttentionImpl(ABC):
    def process_weights_after_loading(self, act_dtype): ...
    @abstractmethod
    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ): ...


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec:
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype

    @property
    def real_page_size_bytes(self):
        return 2 * self.block_size * self.num_kv_heads * self.head_size * 2

    @classmethod
    def merge(cls, specs):
        first = specs[0]
        return cls(
            block_size=first.block_size, num_kv_heads=first.num_kv_heads, head_size=first.head_size, dtype=first.dtype
        )


class FullAttentionManager:
    @classmethod
    def find_longest_cache_hit(
        cls, block_hashes, max_length, kv_cache_group_ids, block_pool, kv_cache_spec, drop_eagle_block, alignment_tokens
    ):
        count = max_length // kv_cache_spec.block_size
        return tuple(block_hashes[:count] for _ in kv_cache_group_ids)


class KVCacheSpecRegistry:
    found: ClassVar[dict] = {}

    @classmethod
    def get_manager_class(cls, kvcache_spec):
        return cls.found.get(type(kvcache_spec), FullAttentionManager)

    @classmethod
    def register(cls, kvcache_spec_cls, manager_class=None, uniform_type_base_spec=None):
        assert issubclass(kvcache_spec_cls, uniform_type_base_spec)
        cls.found[kvcache_spec_cls] = manager_class


class Attention:
    def get_kv_cache_spec(self, vllm_config):
        return "their own"


class GPUModelRunner:
    def _update_states(self, scheduler_output):
        return "their states"


def get_kv_cache_configs(vllm_config, kv_cache_specs, available_memory):
    if available_memory[0] < 1:
        raise ValueError("to serve one request 1 GiB is needed")
    return kv_cache_specs


class AttentionBackendEnum(Enum):
    CUSTOM = "custom"


REGISTERED = {}


def register_backend(backend, class_path=None):
    REGISTERED[backend] = class_path


STAND_INS = {
    BASE: [AttentionCGSupport, AttentionBackend, AttentionMetadataBuilder, AttentionImpl],
    SPECS: [FullAttentionSpec],
    LAYER: [Attention],
    RUNNER: [GPUModelRunner],
    CORE: [get_kv_cache_configs],
    REGISTRY: [AttentionBackendEnum, register_backend],
    MANAGERS: [FullAttentionManager],
    KINDS: [KVCacheSpecRegistry],
}
CONFIG = SimpleNamespace(
    compilation_config=SimpleNamespace(static_forward_context={}),
    device_config=SimpleNamespace(device="cpu"),
    cache_config=SimpleNamespace(block_size=64, num_gpu_blocks=9),
    model_config=SimpleNamespace(max_model_len=512),
)


def real(name: str):
    try:
        return importlib.import_module(name)
    except Exception:
        return None


@pytest.mark.parametrize("name", [BASE, SPECS, LAYER, RUNNER, CORE, MANAGERS, KINDS])
def test_stand_ins_are_those_of_vllm(name):
    """Methods of a stand-in are those of the real class, with the same parameters; all abstract ones are there."""
    module = real(name)
    if module is None:
        pytest.skip(f"{name} cannot be imported here")
    if not importlib.import_module("vllm").__version__.startswith(start.VERSIONS):
        pytest.skip("this vLLM is refused by its version")
    for mine in STAND_INS[name]:
        theirs = getattr(module, mine.__name__)
        if inspect.isfunction(mine):
            assert [*inspect.signature(theirs).parameters] == [*inspect.signature(mine).parameters]
            continue
        for method, function in vars(mine).items():
            wanted = function.__func__ if isinstance(function, (staticmethod, classmethod)) else function
            if (method.startswith("_") and method != "_update_states") or not inspect.isfunction(wanted):
                continue
            names = [p for p in inspect.signature(wanted).parameters if p != "rest"]
            found = getattr(theirs, method)
            found = getattr(found, "__func__", found)
            assert list(inspect.signature(found).parameters)[: len(names)] == names, method
        assert getattr(theirs, "__abstractmethods__", frozenset()) <= set(dir(mine))


def test_classes_are_whole_over_any_vllm_that_is_there(monkeypatch):
    """Also over a version that is refused: nothing abstract of it is missing."""
    if real(BASE) is None:
        pytest.skip(f"{BASE} cannot be imported here")
    plain = types.ModuleType("aatc_cli.serve.vllm_backend.version_0_23")
    plain.install = lambda backend: None
    monkeypatch.setitem(sys.modules, plain.__name__, plain)
    monkeypatch.setattr("aatc_cli.serve.vllm_backend.version_0_23", plain, raising=False)
    monkeypatch.delitem(sys.modules, "aatc_cli.serve.vllm_backend.backend", raising=False)
    found = importlib.import_module("aatc_cli.serve.vllm_backend.backend")
    sys.modules.pop("aatc_cli.serve.vllm_backend.backend")
    for made in (found.TileBackend, found.TileImpl, found.TileBuilder):
        assert made.__abstractmethods__ == frozenset()


@pytest.fixture
def backend(monkeypatch):
    """The backend's module over the stand-ins, with nothing served."""
    for name, parts in STAND_INS.items():
        module = types.ModuleType(name)
        for one in parts:
            setattr(module, one.__name__, one)
        pieces = name.split(".")
        for count in range(1, len(pieces)):
            path = ".".join(pieces[:count])
            monkeypatch.setitem(sys.modules, path, types.ModuleType(path))
        monkeypatch.setitem(sys.modules, name, module)
    config = types.ModuleType("vllm.config")
    config.get_current_vllm_config = lambda: CONFIG
    monkeypatch.setitem(sys.modules, "vllm.config", config)
    monkeypatch.setattr(Attention, "get_kv_cache_spec", Attention.get_kv_cache_spec)
    monkeypatch.setattr(GPUModelRunner, "_update_states", GPUModelRunner._update_states)
    monkeypatch.setattr(served, "_SERVED", {})
    monkeypatch.setattr(KVCacheSpecRegistry, "found", {})
    for name in ("backend", "version_0_23"):
        monkeypatch.delitem(sys.modules, f"aatc_cli.serve.vllm_backend.{name}", raising=False)
    found = importlib.import_module("aatc_cli.serve.vllm_backend.backend")
    yield found
    for name in ("backend", "version_0_23"):
        sys.modules.pop(f"aatc_cli.serve.vllm_backend.{name}", None)


class Engine:
    """What the classes ask of a `TileEngine`."""

    name, page_bytes, recent = "paper-2", (6400, 12800), 128

    def __init__(self):
        self.log, self.caches = [], []

    def warm_up(self):
        self.log.append(("warm up", [cache.numel() for cache in self.caches]))

    def idle(self, batch, blocks):
        self.log.append(("idle", batch))
        return "idle"

    def begin(self, requests, blocks, host):
        self.log.append(("begin", requests))
        return "step"

    def attend(self, layer, rows, cache, step, out):
        self.log.append(("attend", layer, step))
        out.fill_(7.0)

    def forget(self, finished, preempted, order):
        self.log.append(("forget", finished, preempted, order))


@pytest.fixture
def serving(backend, monkeypatch):
    """(module, engine, config) of a model of two layers whose plan is open."""
    layers = {f"model.layers.{n}.self_attn.attn": SimpleNamespace(kv_cache=torch.zeros(n + 1)) for n in (1, 0)}
    monkeypatch.setattr(CONFIG.compilation_config, "static_forward_context", layers)
    engine = Engine()
    monkeypatch.setattr(served, "open_engine", lambda config, device: engine)
    return backend, engine, CONFIG


def test_the_entry_point_names_a_class_that_is_there(backend):
    from aatc_cli.serve.vllm_backend.plugin import BACKEND, register

    register()
    assert REGISTERED == {AttentionBackendEnum.CUSTOM: BACKEND}
    assert f"{backend.TileBackend.__module__}.{backend.TileBackend.__name__}" == BACKEND
    assert (backend.TileBackend.get_name(), backend.TileBackend.get_supported_kernel_block_sizes()) == ("CUSTOM", [64])
    assert backend.TileBackend.get_kv_cache_shape(10, 64, 1, 100) == (10, 6400)


def test_blocks_have_the_bytes_of_the_layer_and_others_are_left_alone(serving):
    backend, _, config = serving
    mine, other = Attention(), Attention()
    mine.attn_backend, mine.layer_name = backend.TileBackend, "model.layers.1.self_attn.attn"
    other.attn_backend = AttentionBackend
    spec = mine.get_kv_cache_spec(config)
    assert (spec.real_page_size_bytes, spec.dtype, spec.num_kv_heads * spec.head_size) == (12800, torch.uint8, 200)
    assert type(spec).merge([spec, spec]) == spec
    assert other.get_kv_cache_spec(config) == "their own"


def test_a_shared_prefix_ends_before_the_window(serving):
    """A manager of vLLM's registry finds it: the latest 128 tokens of a request are read anew."""
    backend, _, config = serving
    layer = Attention()
    layer.attn_backend, layer.layer_name = backend.TileBackend, "model.layers.1.self_attn.attn"
    spec = layer.get_kv_cache_spec(config)
    manager = KVCacheSpecRegistry.get_manager_class(spec)
    assert issubclass(manager, FullAttentionManager)

    def found(tokens: int) -> int:
        rest = {"block_pool": None, "drop_eagle_block": False, "alignment_tokens": 64}
        # vLLM asks for all tokens but the latest one
        [blocks] = manager.find_longest_cache_hit(
            block_hashes=[*range(10)], max_length=tokens - 1, kv_cache_group_ids=[0], kv_cache_spec=spec, **rest
        )
        return 64 * len(blocks)

    assert [found(tokens) for tokens in (1, 191, 192, 320, 383, 384, 2000)] == [0, 0, 64, 192, 192, 256, 640]


def test_steps_begin_once_for_all_layers(serving):
    backend, engine, config = serving
    served.served_of(config).runner = SimpleNamespace(
        input_batch=SimpleNamespace(
            num_reqs=2,
            req_ids=["a", "b"],
            num_computed_tokens_cpu=np.array([70, 0, 9]),
            block_table=[SimpleNamespace(block_table=SimpleNamespace(np=np.zeros((3, 8), dtype=np.int32)))],
        )
    )
    builders = [backend.TileBuilder(None, [name], config, torch.device("cpu")) for name in "xy"]
    given = SimpleNamespace(
        query_start_loc_cpu=torch.tensor([0, 1, 31, 31]),
        block_table_tensor=torch.zeros(3, 8),
        num_reqs=3,
        max_query_len=30,
    )
    assert [builder.build(0, given) for builder in builders] == ["step", "step"]
    assert engine.log == [("begin", [("a", 70, 1), ("b", 0, 30)])]
    # in the order of the model
    assert [cache.numel() for cache in engine.caches] == [1, 2]
    assert builders[0].build_for_cudagraph_capture(given) == "idle"
    assert engine.log[-2:] == [("warm up", [1, 2]), ("idle", 3)]


def test_a_warm_up_is_a_step_of_nobody(serving):
    backend, engine, config = serving
    builder = backend.TileBuilder(None, [], config, torch.device("cpu"))
    for longest, rows in ((1, 4), (512, 0)):
        builder.build(0, SimpleNamespace(block_table_tensor=None, num_reqs=4, max_query_len=longest))
        assert engine.log[-1] == ("idle", rows)


def test_a_layer_writes_its_output_and_knows_its_place(serving):
    backend, engine, _ = serving
    impl = backend.TileImpl(4, 8, 0.3, 2, None, None, "auto", None, "decoder", None)
    layer = SimpleNamespace(layer_name="model.layers.1.self_attn.attn")
    output, query, rows = torch.zeros(5, 32), torch.zeros(5, 4, 8), torch.zeros(5, 2, 8)
    impl.process_weights_after_loading(torch.float32)
    impl.forward(layer, query, rows, rows, torch.zeros(1), "step", output=output)
    assert engine.log == [("attend", 1, "step")]
    assert bool((output == 7).all())
    impl.forward(layer, query, rows, rows, torch.zeros(1), None, output=output)
    assert not output.any()


def test_too_little_memory_is_told_with_the_plan_s_name(serving, monkeypatch):
    module, _, config = serving
    core = sys.modules[CORE]
    served.served_of(config)
    assert core.get_kv_cache_configs(config, ["specs"], [1]) == ["specs"]
    with pytest.raises(AatcError, match=r"^paper-2: to serve one request"):
        core.get_kv_cache_configs(config, ["specs"], [0])
    other = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={}))
    with pytest.raises(ValueError, match=r"^to serve one request"):
        core.get_kv_cache_configs(other, ["specs"], [0])
    # one block is the engine's own: a text that needs it would give up its blocks to itself for ever
    monkeypatch.setattr(config.model_config, "max_model_len", 513)
    with pytest.raises(AatcError, match="paper-2: 9 blocks hold 512 tokens, and one text may have 513"):
        module.TileBuilder(None, [], config, torch.device("cpu"))


@pytest.mark.parametrize("extra", [{"sinks": 1}, {"sliding_window": 128}, {"kv_cache_dtype": "fp8"}])
def test_layers_that_are_more_than_full_attention_are_refused(serving, extra):
    backend, _, _ = serving
    with pytest.raises(AatcError, match=next(iter(extra))):
        backend.TileImpl(4, 8, 0.3, 2, **extra)


def test_a_worker_tells_which_requests_are_gone(serving):
    _, engine, config = serving
    runner = GPUModelRunner()
    runner.vllm_config = config
    output = SimpleNamespace(finished_req_ids={"a"}, preempted_req_ids=None, num_scheduled_tokens={"c": 1})
    assert runner._update_states(output) == "their states"
    assert engine.log == []
    served.served_of(config)
    output.preempted_req_ids = {"b"}
    assert runner._update_states(output) == "their states"
    assert engine.log == [("forget", ["a"], ["b"], ["c"])]
    assert served.served_of(config).runner is runner


GOOD = {
    "cache_config": SimpleNamespace(block_size=64, enable_prefix_caching=False, cache_dtype="auto"),
    "parallel_config": SimpleNamespace(world_size=1),
    "speculative_config": None,
    "kv_transfer_config": None,
    "use_v2_model_runner": False,
    "additional_config": {},
}
BAD = {
    "--block-size 64": {"cache_config": SimpleNamespace(**vars(GOOD["cache_config"]) | {"block_size": 16})},
    "--no-enable-prefix-caching": {
        "cache_config": SimpleNamespace(**vars(GOOD["cache_config"]) | {"enable_prefix_caching": True})
    },
    "one worker": {"parallel_config": SimpleNamespace(world_size=2)},
    "no --speculative-config": {"speculative_config": 1},
    "no --kv-transfer-config": {"kv_transfer_config": 1},
    "VLLM_USE_V2_MODEL_RUNNER=0": {"use_v2_model_runner": True},
}


def test_requests_that_lost_their_blocks_are_counted_not_kept_for_ever(capsys):
    found = lost.Lost("paper-2")
    for number in range(2 * lost.KEPT):
        found.add([(f"r{number}", number)])
    assert found.count == 2 * lost.KEPT
    assert len(found.latest) == lost.KEPT
    said = capsys.readouterr().err.splitlines()
    assert len([line for line in said if "paper-2" in line]) == found.count.bit_length()


def test_settings_that_cannot_be_served_are_named_with_what_to_change():
    start.check_engine(SimpleNamespace(**GOOD))
    for wrong in ({"unchecked": True}, {"plan": "here", "dtype": "float16"}):
        with pytest.raises(UsageError, match="has no"):
            start.check_engine(SimpleNamespace(**GOOD | {"additional_config": {"aatc": wrong}}))
    for remedy, change in BAD.items():
        with pytest.raises(AatcError) as refused:
            start.check_engine(SimpleNamespace(**GOOD | change))
        assert remedy in refused.value.hint


def test_a_plan_is_named_by_configuration_or_environment(monkeypatch):
    monkeypatch.delenv("AATC_PLAN", raising=False)
    with pytest.raises(UsageError, match="none was named"):
        start.plan_path({})
    monkeypatch.setenv("AATC_PLAN", "there")
    assert start.plan_path({}) == "there"
    assert start.plan_path({"aatc": {"plan": "here"}}) == "here"


@pytest.fixture(scope="module")
def tile_plan(tmp_path_factory, new_model, corpus):
    """(model folder, plan) of a tiny Llama with heads of 64 and a plan of tiles."""
    from aatc_cli.artifacts.run import Run
    from aatc_cli.artifacts.stats import CollectSettings
    from aatc_cli.config import make_budget
    from aatc_cli.models.loading import find_model
    from aatc_cli.profiles import TextMixture, load_recipe
    from aatc_cli.stages.allocate import allocate
    from aatc_cli.stages.collect import CollectOptions, collect
    from aatc_cli.stages.whiten import Wanted, whiten

    folder = new_model(tmp_path_factory.mktemp("models") / "wide", head_dim=64, num_hidden_layers=2)
    run = Run(tmp_path_factory.mktemp("tiles") / "run")
    mixture = TextMixture(sources=[str(corpus)], samples=4, length=260)
    settings = CollectSettings(samples=4, length=260, rows=64, fisher=4)
    collect(run, "stats", find_model(str(folder)), mixture, settings, CollectOptions())
    whiten(run, transform_stats=run.stats(), rate_stats=run.stats(), wanted=Wanted.by(load_recipe("loss-aware-tiles")))
    for name in ("loss-aware-tiles", "loss-aware-tiles-even"):
        [plan] = allocate(run, load_recipe(name), [make_budget(bits=2.0)])
    return folder, plan


def test_the_command_serves_what_was_checked(aatc, tile_plan):
    folder, plan = tile_plan
    found = aatc("serve", "--plan", plan.path, "--model", folder, "--max-model-len", 256, "--json")
    assert found.code == 0, found.err
    parts = found.json["arguments"]
    assert parts[:3] == ["vllm", "serve", str(folder)]
    assert json.loads(parts[parts.index("--additional-config") + 1]) == {"aatc": {"plan": str(plan.path)}}
    assert parts[parts.index("--block-size") + 1] == "64"
    # the server says which plan it serves with, under whatever other names, and reads prompts whole unless it is told
    name, opened = parts.index("--served-model-name"), Plan.open(plan.path)
    assert parts[name + 1 : name + 3] == [str(folder), opened.served_as]
    assert opened.served_as.startswith("loss-aware-tiles-even-2@")
    assert "--no-enable-chunked-prefill" in parts
    long = aatc("serve", "--plan", plan.path, "--model", folder, "--max-num-seqs", 2000, "--json").json["arguments"]
    assert long[long.index("--max-num-batched-tokens") + 1] == "2512"
    graphs = json.loads(parts[parts.index("--compilation-config") + 1])
    assert graphs["cudagraph_capture_sizes"] == [1, 2, 4, 8, 16, 32, 64]
    assert command.graphs(24)["cudagraph_capture_sizes"] == [1, 2, 4, 8, 16, 24]
    more = ("--vllm=--served-model-name=it", "--vllm=--enable-chunked-prefill", "--max-num-seqs", 1)
    parts = aatc("serve", "--plan", plan.path, "--model", folder, *more, "--json").json["arguments"]
    assert parts[3:6] == ["--served-model-name", "it", opened.served_as]
    assert parts[-1] == "--enable-chunked-prefill"
    assert "--no-enable-chunked-prefill" not in parts
    assert found.json["command"].startswith("VLLM_USE_V2_MODEL_RUNNER=0 vllm serve ")
    shared = aatc("serve", "--plan", plan.path, "--model", folder, "--prefixes", "--json").json
    assert {"--enable-prefix-caching", "--max-model-len"} < set(shared["arguments"])
    assert shared["exact_bytes"] - found.json["exact_bytes"] == 60 * 2 * 2 * 128 * 2
    wide = aatc("serve", "--plan", plan.path, "--model", folder, "--vllm=--dtype=float32", "--json").json
    assert wide["exact_bytes"] == 2 * found.json["exact_bytes"]
    assert wide["arguments"][-1] == "--dtype=float32"
    assert not any("dtype" in part for part in found.json["arguments"])
    assert 3 < found.json["uncompressed"] / found.json["block_bytes"] < 8


def test_what_will_not_work_is_refused_by_name(refuses, tile_plan, tiny_llama, base_run, monkeypatch):
    folder, plan = tile_plan
    told = {"folder": plan.path}
    ours = ("serve", "--plan", plan.path, "--model", folder)
    refuses("serve", "--plan", plan.path, "--model", tiny_llama, says=("not the one",), **told)
    uneven = plan.path.parent / "loss-aware-tiles-2"
    refuses("serve", "--plan", uneven, "--model", folder, says=("evenly spaced",), **told)
    refuses(*ours, "--max-model-len", 4096, says=("512", "4096"), **told)
    for decided in ("--block-size=16", "--max_model_len=16", "--compilation-config.mode=3", "-O3", "-cc.mode=3"):
        refuses(*ours, f"--vllm={decided}", says=("what the plan decides",), code=2, **told)
    for alone in ("--tensor-parallel-size=2", "-tp", "--speculative_config={}"):
        refuses(*ours, f"--vllm={alone}", says=("one worker",), code=2, **told)
    refuses(*ours, "--vllm=", says=("is empty",), code=2, **told)
    refuses(*ours, "--start", "--json", says=("--json",), code=2, **told)
    refuses(*ours, "--vllm=--served-model-name", says=("has no name",), code=2, **told)
    other = next((base_run / "plans").iterdir())
    refuses("serve", "--plan", other, "--model", tiny_llama, says=("no plan of tiles",), **told)
    monkeypatch.setattr(command, "version", lambda name: "0.9.1")
    monkeypatch.setattr("aatc_cli.serve.opening.version", lambda name: "0.9.1")
    refuses(*ours, says=("0.9.1", "0.23."), **told)


def test_a_server_that_ends_badly_is_told_with_the_plan_s_name(monkeypatch):
    def served_by(*arguments):
        return command.ServeCommand("paper-2", arguments, 1, 1, 1, "0.23.0")

    # as it does when its engine was killed
    with pytest.raises(AatcError, match="the server of paper-2 ended with status 0, unasked"):
        served_by("true").start()
    with pytest.raises(AatcError, match="the server of paper-2 ended with status 3"):
        served_by("sh", "-c", "exit 3").start()
    with pytest.raises(AatcError, match="paper-2 ended by SIGKILL"):
        served_by("sh", "-c", "kill -KILL $$").start()
    # told to end, it passes that on and is content
    served_by("sh", "-c", f"kill -TERM {os.getpid()}; sleep 20").start()
    with pytest.raises(AatcError, match="not installed"):
        replace(served_by("true"), version=None).start()
