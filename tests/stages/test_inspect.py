from __future__ import annotations

import json
import shutil
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from aatc_cli.artifacts.evaluation import Evaluation, write_evaluation
from aatc_cli.artifacts.manifest import digest_of
from aatc_cli.artifacts.plan import Plan
from aatc_cli.artifacts.run import Run
from aatc_cli.config import make_budget
from aatc_cli.core import SIDES
from aatc_cli.core.stats import LayerStats
from aatc_cli.errors import AatcError, ArtifactError, UnsupportedModelError
from aatc_cli.models.loading import find_model
from aatc_cli.profiles import load_model_profile, load_recipe
from aatc_cli.stages.inspect import inspect_path
from aatc_cli.stages.inspecting.facts import Inspection
from aatc_cli.stages.inspecting.model import inspect_model
from aatc_cli.stages.inspecting.plan import inspect_plan
from aatc_cli.stages.inspecting.profile import inspect_profile
from aatc_cli.stages.inspecting.run import inspect_run

LLAMA = load_model_profile("llama-3.1-8b-instruct")
EVALUATION = Evaluation(
    task="kl",
    recipe="paper",
    budget="3",
    model="m",
    bits=3.0,
    bits_at_context=3.8,
    ratio=4.2,
    context=64,
    text="t",
    text_sha256="s",
    windows=1,
    length=64,
    stride=64,
    first_position=0,
    tokens_scored=63,
    sinks=4,
    recent=8,
    flush=4,
    kl_mean=0.125,
    seconds=1.5,
    device="cpu",
    dtype="float32",
    versions={},
)


def shown(inspection: Inspection) -> list[list[str]]:
    """Every row of every table; each as wide as its header, and the whole as JSON data beside it."""
    assert json.loads(json.dumps(inspection.data, allow_nan=False)) is not None
    for table in inspection.tables:
        assert all(len(row) == len(table.columns) and all(isinstance(cell, str) for cell in row) for row in table.rows)
    return [row for table in inspection.tables for row in table.rows]


def test_a_run(run_folder: Path) -> None:
    shutil.copytree(run_folder / "stats", run_folder / "other-stats")
    write_evaluation(run_folder / "evals", EVALUATION)
    # what a writer at work, or a killed one, has lying there
    shutil.copytree(run_folder / "transforms" / "whiten", run_folder / "transforms" / ".whiten.tmp-1")
    shutil.copytree(run_folder / "stats", run_folder / ".stats.partial")
    inspection = inspect_run(Run(run_folder))
    paths = ["other-stats", "stats", "transforms/identity", "transforms/whiten", "plans/paper-3"]
    assert [entry["path"] for entry in inspection.data["artifacts"]] == paths
    [evaluation] = inspection.data["evaluations"]
    assert (evaluation["path"], evaluation["plan"]) == (f"evals/{EVALUATION.file_name}", None)
    assert [row[0] for row in shown(inspection)] == [*paths[:-1], "paper-3", "kl", ".stats.partial"]
    assert inspect_path(run_folder, 8192).data == inspection.data


def test_plans_of_a_run_with_what_was_measured(run_folder: Path, evaluated: Any) -> None:
    evaluated(run_folder, "paper-3", one=0.02, two=0.01)
    evaluated(run_folder, "paper-3", plan="0" * 64, three=0.5)
    plan = Plan.open(run_folder / "plans" / "paper-3")
    inspection = inspect_run(Run(run_folder), 1024)
    [found] = inspection.data["plans"]
    assert (found["plan"], found["path"]) == (plan.digest, str(plan.path))
    assert (found["bits_packed"], found["bytes_total"]) == (plan.layout.bits_packed, plan.layout.bytes(1024))
    assert found["kl"] == {"one": {"mean": 0.02, "stderr": 0.001}, "two": {"mean": 0.01, "stderr": 0.001}}
    assert (found["kl_worst"], found["stale"]) == (0.02, None)
    assert datetime.fromisoformat(found["made"]) <= datetime.now(UTC)
    # what was measured joins by digest; of a plan that is no longer here it says so
    gone = {each["text"]: (each["plan"] == plan.digest, each["stale"]) for each in inspection.data["evaluations"]}
    assert gone == {"one": (True, None), "two": (True, None), "three": (False, "plan changed")}
    [row] = [row for row in shown(inspection) if row[0] == "paper-3"]
    assert row[1] == f"{found['bits_packed']:.3f}"
    assert row[3:5] == [f"{found['ratio']:.2f}", "0.02"]


def test_what_is_stale_and_unfinished(aatc: Any, run_folder: Path) -> None:
    def stale() -> dict[str, str | None]:
        return {each["path"]: each["stale"] for each in inspect_run(Run(run_folder)).data["artifacts"]}

    assert set(stale().values()) == {None}
    assert aatc("whiten", "--run", run_folder, "--percentile", 98, "--force").code == 0
    assert stale() == dict.fromkeys(stale()) | {"plans/paper-3": "transform changed"}
    shutil.move(run_folder / "stats", run_folder / ".stats.partial")
    shutil.copytree(run_folder / ".stats.partial", run_folder / "others")
    assert set(stale().values()) == {None, "transform changed"}
    manifest = run_folder / "others" / "manifest.json"
    data = json.loads(manifest.read_text("utf-8"))
    data["settings"]["seed"] = 1
    data["digest"] = digest_of({key: data[key] for key in data if key not in ("digest", "provenance")})
    manifest.write_text(json.dumps(data), "utf-8")
    assert stale()["transforms/whiten"] == "stats changed"
    [unfinished] = inspect_run(Run(run_folder)).data["unfinished"]
    assert (unfinished["path"], unfinished["windows"], unfinished["of"]) == (".stats.partial", 8, 8)


def test_a_run_with_a_damaged_artifact_is_not_shown_as_whole(run_folder: Path) -> None:
    (run_folder / "stats" / "manifest.json").write_text("{}")
    with pytest.raises(ArtifactError, match="schema version None"):
        inspect_run(Run(run_folder))


@pytest.mark.parametrize("name", ["", "none", "file"])
def test_where_there_is_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArtifactError) as caught:
        inspect_path(tmp_path / name, 8192)
    assert caught.value.hint


def test_stats(base_run: Path) -> None:
    inspection = inspect_path(base_run / "stats", 8192)
    assert inspection.data["kind"] == "stats"
    assert inspection.data["settings"]["samples"] == 8
    results = inspection.data["results"]
    assert (results["windows"], results["tokens"], results["fisher_windows"]) == (8, 480, 0)
    assert f"effective rank of values {results['value_rank']:.1f} of 32" in inspection.tables[0].title
    assert shown(inspection)[0][:3] == ["corpus.txt", "1", "8"]
    assert "480 tokens" in inspection.tables[0].title


def test_transform(base_run: Path) -> None:
    inspection = inspect_path(base_run / "transforms" / "whiten", 8192)
    assert len(shown(inspection)) == len(inspection.data["sites"]) == 8
    for site in inspection.data["sites"]:
        assert 1 < site["effective_rank"] <= 32
        assert site["top_over_median"] > 1
    flat = inspect_path(base_run / "transforms" / "identity", 8192).data["sites"]
    assert flat != inspection.data["sites"]


def test_plan(base_run: Path) -> None:
    plan = Plan.open(base_run / "plans" / "paper-3")
    inspection = inspect_path(base_run / "plans" / "paper-3", 1000)
    assert inspection.data == inspect_plan(plan, 1000).data
    assert inspection.data["layout"] == plan.layout.summary(1000)
    assert inspection.data["bits_mean"] == plan.mean_bits
    for site in inspection.data["sites"]:
        assert site["histogram"] == Counter(plan.bits[site["layer"]][site["side"]])
        assert sum(site["histogram"].values()) == 32
    rows = shown(inspection)
    assert [row[0] for row in rows[:8]] == [f"{layer} {side}" for layer in range(4) for side in SIDES]
    assert all(len(row[4]) == 17 for row in rows[:8])
    # every width that occurs shows, and no other
    for row, site in zip(rows, inspection.data["sites"], strict=False):
        assert [bits for bits, bar in enumerate(row[4]) if bar != "·"] == sorted(site["histogram"])
    total = next(row for row in rows if row[0] == "total")
    causes = rows[8 : rows.index(total)]
    assert (
        sum(int(row[1].replace(",", "")) for row in causes) == int(total[1].replace(",", "")) == plan.layout.bytes(1000)
    )


def test_evaluation(run_folder: Path) -> None:
    path = write_evaluation(run_folder / "evals", EVALUATION)
    inspection = inspect_path(path, 8192)
    assert inspection.data == EVALUATION.model_dump(mode="json")
    assert ["kl_mean", "0.125"] in shown(inspection)
    assert not any(row[0] == "perplexity" for row in shown(inspection))


@pytest.mark.parametrize(("bits", "ratio"), [(4.0, 3.8), (3.0, 4.9), (2.5, 5.82), (2.0, 7.0), (1.5, 9.1), (1.0, 12.4)])
def test_a_profile_gives_the_paper_s_compression(bits: float, ratio: float) -> None:
    data = inspect_profile(LLAMA, load_recipe("paper"), make_budget(bits=bits), 8192).data
    assert data["ratio"] == pytest.approx(ratio, rel=0.03)
    assert data["bits"] == bits
    assert data["bytes_fp16"] == 8192 * 32 * 8 * 128 * 2 * 2


@pytest.mark.parametrize("budget", [make_budget(ratio=5.82, context=8192), make_budget(size="184MB", context=8192)])
def test_a_profile_at_a_ratio_or_size_meets_it(budget: Any) -> None:
    inspection = inspect_profile(LLAMA, load_recipe("paper"), budget, 8192)
    met = inspection.data["ratio"] if budget.unit == "ratio" else inspection.data["bytes_total"]
    assert met == pytest.approx(budget.value, rel=1e-4)
    assert 2.4 < inspection.data["bits"] < 2.6
    assert any("head groups" in row[0] and row[1].startswith("2 (") for row in shown(inspection))


def test_a_profile_tells_the_memory_of_its_statistics() -> None:
    """Of 80 layers under 6 GB: what the tensors that collect sums into take, counted where they need none."""
    profile = load_model_profile("llama-3.1-70b-instruct")
    inspection = inspect_profile(profile, load_recipe("paper"), make_budget(bits=2.0), 8192)
    geometry, collect = profile.geometry, inspection.data["collect"]
    gram = torch.empty(geometry.kv_heads, geometry.head_dim, geometry.head_dim, device="meta")
    layer = LayerStats.empty(geometry, collect["rows"], gram)
    assert collect["bytes_stats_layer"] == sum(getattr(layer, name).nbytes for name in LayerStats.TENSORS)
    assert collect["bytes_stats"] == 80 * collect["bytes_stats_layer"] < 7.5e9
    facts = dict(row for row in shown(inspection) if len(row) == 2)
    assert facts["collect: statistics in memory"].startswith(f"{collect['bytes_stats'] / 1e9:.2f} GB")
    assert facts["whiten: statistics in memory"].startswith(f"{collect['bytes_stats_layer'] / 1e6:.1f} MB")


def test_a_profile_at_a_size_below_the_window() -> None:
    with pytest.raises(AatcError, match="are not more than the"):
        inspect_profile(LLAMA, load_recipe("paper"), make_budget(size="1MB", context=8192), 8192)


@pytest.mark.parametrize(
    ("family", "keys", "biases"),
    [("tiny_llama", "k_proj", []), ("tiny_qwen2", "k_proj", ["q", "k", "v"]), ("tiny_qwen3", "k_norm", [])],
)
def test_a_model(family: str, keys: str, biases: list[str], request: pytest.FixtureRequest) -> None:
    inspection = inspect_model(find_model(str(request.getfixturevalue(family))))
    data = inspection.data
    assert data["geometry"] == {"layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 16, "hidden_size": 64}
    assert (data["channels_per_site"], data["sites_compressed"], data["context"]) == (32, 8, 512)
    assert data["fp16_bytes_per_token"] == 4 * 2 * 32 * 2
    assert [(layer["layer"], layer["keys_from"], layer["biases"]) for layer in data["layers"]] == [
        (index, keys, biases) for index in range(4)
    ]
    kind = next(value for fact, value in shown(inspection) if fact == "4 layers")
    assert kind == f"compressed: keys from {keys}; biases on {', '.join(biases) or 'none'}"
    assert shown(inspection)[-1] == ["next", data["next"]]


def test_a_model_is_looked_at_without_its_weights(tiny_llama: Path, tmp_path: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        shutil.copy(tiny_llama / name, tmp_path)
    before = torch.get_default_device()
    assert inspect_model(find_model(str(tmp_path))).data["supported"]
    assert torch.get_default_device() == before


SMALL = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
UNSUPPORTED = {
    "gpt2": ({"n_layer": 2, "n_head": 2, "n_embd": 16}, "gpt2 is not supported: it is not among the architectures"),
    "falcon": (SMALL, "falcon is not supported: it is not among the architectures"),
    "t5": ({"num_layers": 2, "d_model": 16, "num_heads": 2}, "t5 is not supported: it is an encoder-decoder model"),
    "deepseek_v3": ({"num_hidden_layers": 2}, "deepseek_v3 is not supported: multi-head latent attention (MLA)"),
    "mamba": ({"num_hidden_layers": 2, "hidden_size": 16}, "mamba is not supported: it has linear-attention layers"),
    "qwen3_next": (SMALL, "qwen3_next is not supported: it has linear-attention layers"),
    "llama4_text": (SMALL, "llama4_text is not supported: it has layers whose attention is cut into chunks"),
    "gemma3n_text": ({"num_hidden_layers": 20}, "gemma3n_text is not supported: some of its layers share the cache"),
    "gemma3_text": (SMALL | {"use_bidirectional_attention": True}, "its tokens attend to later ones"),
}


@pytest.mark.parametrize("family", UNSUPPORTED)
def test_models_that_cannot_be_compressed_are_refused_by_name(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    settings, says = UNSUPPORTED[family]
    AutoConfig.for_model(family, **settings).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError) as caught:
        inspect_model(find_model(str(tmp_path)))
    assert says in caught.value.message
    assert "llama" in str(caught.value.hint)
