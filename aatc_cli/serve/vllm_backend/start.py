"""From an engine's configuration to a plan's caches: what is asked for, what is refused by name, and what is made."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from aatc_cli.artifacts.plan import Plan
from aatc_cli.artifacts.shipped import find_plan
from aatc_cli.console import say
from aatc_cli.core.tiles import TILE
from aatc_cli.errors import AatcError, UsageError
from aatc_cli.models.adapter import attention_sites
from aatc_cli.models.loading import find_model
from aatc_cli.runtime.stored.opening import rotation_of
from aatc_cli.serve.opening import require_version
from aatc_cli.serve.vllm_backend.engine import TileEngine
from aatc_cli.serve.vllm_backend.plans import Prepared, prepare_plan, static_of
from aatc_cli.serve.vllm_backend.turning import Turning
from aatc_cli.serve.vllm_backend.warm import warm_up

VERSIONS = ("0.23.",)
PLAN = "AATC_PLAN"


def settings_of(additional: Any) -> Mapping[str, Any]:
    """The part of vLLM's additional configuration that is of this package; raises `UsageError` for an unknown name."""
    found = additional.get("aatc", {}) if isinstance(additional, Mapping) else {}
    unknown = set(found) - {"plan", "prefixes"}
    if unknown:
        raise UsageError(f"the additional configuration has no {sorted(unknown)[0]} for aatc", "give plan, prefixes")
    return found


def plan_path(additional: Any) -> str:
    """The plan that ``additional`` configuration or the environment names; raises `UsageError` where none does."""
    found = settings_of(additional).get("plan") or os.environ.get(PLAN)
    if not found:
        raise UsageError(
            "the backend CUSTOM serves a plan, and none was named",
            f"""set {PLAN}, or --additional-config '{{"aatc": {{"plan": ...}}}}'""",
        )
    return str(found)


def check_engine(config: Any) -> None:
    """Raise `AatcError` naming the first setting of an engine's configuration that the backend cannot serve with."""
    cache, parallel = config.cache_config, config.parallel_config
    shared = settings_of(config.additional_config).get("prefixes", False)
    wrong = {
        f"blocks of {cache.block_size} tokens": (cache.block_size != TILE, f"--block-size {TILE}"),
        "prefix caching": (cache.enable_prefix_caching and not shared, "--no-enable-prefix-caching"),
        f"a cache of {cache.cache_dtype}": (cache.cache_dtype != "auto", "--kv-cache-dtype auto"),
        f"{parallel.world_size} workers": (parallel.world_size != 1, "one worker: --tensor-parallel-size 1"),
        "speculative decoding": (config.speculative_config is not None, "no --speculative-config"),
        "a KV connector": (config.kv_transfer_config is not None, "no --kv-transfer-config"),
        "model runner V2": (config.use_v2_model_runner, "VLLM_USE_V2_MODEL_RUNNER=0"),
    }
    for what, (found, remedy) in wrong.items():
        if found:
            raise AatcError(f"plans of tiles are not served with {what}", f"start the engine with {remedy}")


def check_blocks(name: str, config: Any) -> None:
    """Raise `AatcError` where the blocks of a configuration are too few for its longest text with plan ``name``.

    One block is the engine's own. A request that needs it would give up its blocks to itself and begin again for ever.
    """
    blocks, longest = config.cache_config.num_gpu_blocks, config.model_config.max_model_len
    if blocks is not None and (blocks - 1) * TILE < longest:
        raise AatcError(
            f"{name}: {blocks} blocks hold {max(blocks - 1, 0) * TILE:,} tokens, and one text may have {longest:,}",
            "give a smaller --max-model-len, or more memory",
        )


def engine_for(prepared: Prepared, config: Any, device: torch.device) -> TileEngine:
    """The caches of a plan for an engine of this configuration.

    Where requests share prefixes the window has a whole block of sinks, whatever the plan has.
    """
    shared = config.cache_config.enable_prefix_caching
    if shared:
        prepared = replace(prepared, window=prepared.window.model_copy(update={"sinks": TILE}))
    model, slots = config.model_config, config.scheduler_config.max_num_seqs
    form = static_of(prepared, model.dtype, device)
    module: Any = attention_sites(prepared.model)[0].module
    warm_up(form)
    turning = Turning(rotation_of(prepared.model), model.max_model_len, model.dtype, device)
    return TileEngine(prepared.name, form, turning, float(module.scaling), slots, bool(shared))


def open_engine(config: Any, device: torch.device) -> TileEngine:
    """The plan that a vLLM configuration names, checked against version, model and settings, as caches."""
    require_version("vllm", VERSIONS)
    check_engine(config)
    name = plan_path(config.additional_config)
    plan = Plan.open(find_plan(name if name.startswith("hub:") else Path(name)))
    engine = engine_for(prepare_plan(plan, find_model(config.model_config.model)), config, device)
    blocks, exact = sum(engine.page_bytes), engine.exact
    say(
        f"aatc: {plan.name}: {blocks:,} bytes for {TILE} tokens; exact rows of {exact.slots} requests: {exact.nbytes:,}"
    )
    return engine
