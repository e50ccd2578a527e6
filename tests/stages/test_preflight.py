"""The preflight: verdict and exit code, what collect costs against torch's own count, and the command that follows."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from aatc_cli.core.stats import LayerStats
from aatc_cli.errors import AatcError
from aatc_cli.models.adapter import attention_sites, geometry_of
from aatc_cli.models.loading import empty_model, find_model, load_config, load_model
from aatc_cli.profiles import load_model_profile
from aatc_cli.stages.inspecting.model import inspect_model
from aatc_cli.stages.inspecting.preflight import Machine, Work, collect_work, measure_machine, next_command, seconds

MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 24, "num_key_value_heads": 1}
# one expert of four per token; all four of them in one tensor
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("qwen2", {}),
        ("phi3", {"pad_token_id": 0}),
        ("gemma3_text", MIXED),
        ("gpt_neox", {"num_key_value_heads": 4}),
        ("qwen3_moe", EXPERTS),
        ("llama", {"tie_word_embeddings": True}),
    ],
)
def test_operations_are_those_that_torch_counts(family: str, changes: dict[str, Any], new_model, tmp_path) -> None:
    source = find_model(str(new_model(tmp_path / "m", family=family, **changes)))
    config = load_config(source)
    empty = empty_model(source, config)
    work = collect_work(empty, geometry_of(config), samples=1, length=128)
    model = load_model(source)
    # the products of fused attention on a CPU are not counted
    model.set_attn_implementation("eager")
    if family == "qwen3_moe":
        model.set_experts_implementation("eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.get_decoder()(input_ids=torch.arange(128)[None], use_cache=False)
    # torch counts the frequencies of the rotary embedding too, and none of a routed token twice
    assert work.forward == pytest.approx(counter.get_total_flops(), rel=0.02)
    assert work.model_bytes == sum(p.numel() * 4 for p in model.parameters())


def test_memory_of_the_statistics_is_that_of_their_tensors(tiny_qwen2: Path) -> None:
    source = find_model(str(tiny_qwen2))
    model = load_model(source)
    geometry = geometry_of(model.config)
    work = collect_work(model, geometry, samples=4, length=100, rows=256)
    gram = torch.zeros(geometry.kv_heads, geometry.head_dim, geometry.head_dim)
    layers = [LayerStats.empty(geometry, 256, gram) for _ in attention_sites(model)]
    held = sum(getattr(layer, name).nbytes for layer in layers for name in LayerStats.TENSORS)
    assert work.stats_bytes == held
    assert work.memory == work.model_bytes + work.activation_bytes + work.stats_bytes


def test_time_is_counted_at_the_measured_speeds() -> None:
    machine = measure_machine("cpu")
    assert machine.forward > 1e8
    assert machine.float64 > 1e8
    assert machine.free > 1e8
    work = Work(tokens=1, forward=6e9, statistics=2e9, model_bytes=0, activation_bytes=0, stats_bytes=0)
    assert seconds(work, Machine("cpu", forward=3e9, float64=1e9, free=0)) == 2 * 2 + 2


def test_a_supported_model_is_0_and_a_refused_one_1(aatc, refuses, new_model, tiny_llama: Path, tmp_path: Path) -> None:
    good = aatc("inspect", "--model", tiny_llama, "--json")
    assert (good.code, good.json["verdict"]) == (0, "supported")
    assert good.json["next"] == f"aatc collect --model {tiny_llama}"
    mixed = aatc("inspect", "--model", new_model(tmp_path / "mixed", family="gemma3_text", **MIXED), "--json")
    assert (mixed.code, mixed.json["verdict"]) == (0, "partly")
    assert [layer["kept"] for layer in mixed.json["layers"]] == ["exact", "compressed"] * 2
    assert [layer["layer"] for layer in mixed.json["layers"]] == [None, 0, None, 1]
    assert mixed.json["sites_compressed"] == 4
    # 2 layers, K and V, 16 channels, 2 bytes; the other two hold at most 24 such tokens
    assert mixed.json["fp16_bytes_per_token"] == 2 * 2 * 16 * 2
    assert mixed.json["fp16_bytes_sliding"] == 24 * 2 * 2 * 16 * 2
    sizes = mixed.json["at_context"]
    assert sizes["context"] == 512
    assert sizes["ratio_full_layers"] > sizes["ratio"] > 1
    from transformers import AutoConfig

    (tmp_path / "other").mkdir()
    AutoConfig.for_model("falcon", num_hidden_layers=2).save_pretrained(tmp_path / "other")
    refuses("inspect", "--model", tmp_path / "other", says=("falcon is not supported",), folder=tmp_path / "other")


def test_people_read_one_screen(aatc, new_model, tmp_path: Path) -> None:
    outcome = aatc("inspect", "--model", new_model(tmp_path / "mixed", family="gemma3_text", **MIXED))
    for part in ("partly", "kept exact: sliding window of 24", "bytes per token", "of the full layers alone", "next"):
        assert part in outcome.out
    assert len(outcome.out.splitlines()) < 40


def test_the_profile_of_the_model_is_found_and_held_to_its_geometry(tiny_llama: Path, tmp_path: Path) -> None:
    profile = load_model_profile("smollm2-135m-instruct")
    with pytest.raises(AatcError, match="expects layers = 30, but the model has 4"):
        inspect_model(find_model(str(tiny_llama)), profile)
    # the name alone is not enough
    shutil.copytree(tiny_llama, tmp_path / "SmolLM2-135M-Instruct")
    data = inspect_model(find_model(str(tmp_path / "SmolLM2-135M-Instruct"))).data
    assert "--profile" not in data["next"]
    assert next_command("owner/m", profile, "cuda") == (
        "aatc collect --profile smollm2-135m-instruct --model owner/m --device cuda"
    )


@pytest.mark.real
def test_the_real_model_has_its_profile(real_model_path: Path) -> None:
    data = inspect_model(find_model(str(real_model_path))).data
    assert data["next"] == f"aatc collect --profile smollm2-135m-instruct --model {real_model_path}"
    assert data["collect"]["tokens"] == 32 * 1024
