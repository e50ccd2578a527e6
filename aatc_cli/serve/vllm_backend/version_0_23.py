"""What vLLM 0.23 has no way to be told, and three of its functions are therefore wrapped for: this backend alone.

- `Attention.get_kv_cache_spec` decides the bytes of a block by the names of its own formats. For a layer of this
  backend it gives the plan's bytes (later versions ask the backend: `customize_spec`).
- `GPUModelRunner._update_states` is the only place at which a worker hears which requests ended or were preempted, and
  builders of steps are told neither ids nor the runner.
- `get_kv_cache_configs` says that one text does not fit without saying in what: the plan's name is put before it.

Blocks that requests share are found by a manager of this package, which vLLM has a registry for. All of these call the
original for every layer and model of another backend. They are installed when vLLM imports this backend, which it does
when somebody chooses it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Self

import torch

from aatc_cli.errors import AatcError
from aatc_cli.serve.vllm_backend.served import known, served_of

_interface: Any = import_module("vllm.v1.kv_cache_interface")
_managers: Any = import_module("vllm.v1.core.single_type_kv_cache_manager")
_MARK = "aatc_wrapped"


@dataclass(frozen=True, kw_only=True)
class TileSpec(_interface.FullAttentionSpec):  # type: ignore[misc]
    """Blocks of ``bytes_per_token`` for every token of them, keys and values together; recent: tokens of the window."""

    bytes_per_token: int = 0
    recent: int = 0

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of a block."""
        return int(self.block_size) * self.bytes_per_token

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """One spec for layers of equal ones."""
        first = specs[0]
        merged: Self = replace(super().merge(specs), bytes_per_token=first.bytes_per_token, recent=first.recent)
        return merged


class TileManager(_managers.FullAttentionManager):  # type: ignore[misc]
    """Blocks of requests, of which a shared prefix is a part that ends before the window."""

    @classmethod
    def find_longest_cache_hit(cls, block_hashes: Any, max_length: int, *others: Any, **named: Any) -> Any:
        """Blocks of a prefix that are there, of all tokens but the latest: of those that the window will not hold.

        What is in it is read anew, so that an answer begins behind exact tokens, as behind a prompt of its own.
        """
        spec = named["kv_cache_spec"]
        most = max(max_length + 1 - spec.recent, 0)
        return super().find_longest_cache_hit(block_hashes, most, *others, **named)


def install(backend: type) -> None:
    """Wrap them once, for layers whose backend is ``backend``."""
    attention: Any = import_module("vllm.model_executor.layers.attention.attention").Attention
    runner: Any = import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
    if not hasattr(attention.get_kv_cache_spec, _MARK):
        attention.get_kv_cache_spec = _with_spec(attention.get_kv_cache_spec, backend)
    if not hasattr(runner._update_states, _MARK):
        runner._update_states = _with_states(runner._update_states)
    core: Any = import_module("vllm.v1.engine.core")
    if not hasattr(core.get_kv_cache_configs, _MARK):
        core.get_kv_cache_configs = _with_name(core.get_kv_cache_configs)


def _with_spec(original: Any, backend: type) -> Any:
    def get_kv_cache_spec(self: Any, vllm_config: Any) -> Any:
        if not issubclass(self.attn_backend, backend):
            return original(self, vllm_config)
        size = vllm_config.cache_config.block_size
        served = served_of(vllm_config)
        each, recent = served.page_bytes(self.layer_name) // size, served.engine.recent
        named = {"bytes_per_token": each, "recent": recent}
        spec = TileSpec(block_size=size, num_kv_heads=1, head_size=each, dtype=torch.uint8, **named)
        _register(spec)
        return spec

    setattr(get_kv_cache_spec, _MARK, True)
    return get_kv_cache_spec


def _register(spec: TileSpec) -> None:
    """Tell vLLM which manager such blocks have; asked first, it fills its registry with its own."""
    registry: Any = import_module("vllm.v1.kv_cache_spec_registry").KVCacheSpecRegistry
    if registry.get_manager_class(spec) is not TileManager:
        registry.register(TileSpec, TileManager, _interface.FullAttentionSpec)


def _with_states(original: Any) -> Any:
    def _update_states(self: Any, scheduler_output: Any) -> Any:
        served = known(self.vllm_config)
        if served is not None:
            served.runner = self
            finished, preempted = scheduler_output.finished_req_ids, scheduler_output.preempted_req_ids or ()
            served.engine.forget([*finished], [*preempted], [*scheduler_output.num_scheduled_tokens])
        return original(self, scheduler_output)

    setattr(_update_states, _MARK, True)
    return _update_states


def _with_name(original: Any) -> Any:
    def get_kv_cache_configs(vllm_config: Any, *others: Any, **named: Any) -> Any:
        served = known(vllm_config)
        if served is None:
            return original(vllm_config, *others, **named)
        try:
            return original(vllm_config, *others, **named)
        except ValueError as error:
            hint = "give a smaller --max-model-len, or more memory"
            raise AatcError(f"{served.engine.name}: {error}", hint) from error

    setattr(get_kv_cache_configs, _MARK, True)
    return get_kv_cache_configs
