from __future__ import annotations

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from aatc_cli.artifacts.artifact import open_artifact
from aatc_cli.artifacts.manifest import MANIFEST, TENSORS
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import CollectSettings, Stats
from aatc_cli.core.stats import LayerStats
from aatc_cli.errors import AatcError, ArtifactError, SettingsMismatchError, UsageError
from aatc_cli.models.loading import ModelSource, find_model, load_model, load_tokenizer
from aatc_cli.profiles import ModelProfile, TextMixture, load_model_profile
from aatc_cli.stages import collect as module
from aatc_cli.stages.collect import CollectOptions, collect
from aatc_cli.stages.collecting import opening, passes, portions
from aatc_cli.text.windows import draw_windows

SAMPLES, LENGTH, SKIP, ROWS = 6, 48, 4, 60
TOKENS = SAMPLES * (LENGTH - SKIP)
FAMILIES = ["tiny_llama", "tiny_qwen2", "tiny_qwen3", "grouped", "multi_query"]


def source_of(folder: Path) -> ModelSource:
    return find_model(str(folder))


@pytest.fixture(scope="module")
def run_collect(corpus: Path) -> Callable[..., Path]:
    """Collect into a run; keyword arguments are settings, or options where they are called so."""

    def run_(run: Run, folder: Path, name: str = "stats", profile: ModelProfile | None = None, **changes: Any) -> Path:
        how = {key: changes.pop(key) for key in CollectOptions.model_fields if key in changes}
        text = changes.pop("text", str(corpus))
        settings = CollectSettings(
            **({"samples": SAMPLES, "length": LENGTH, "skip_first": SKIP, "rows": ROWS} | changes)
        )
        mixture = TextMixture(sources=[text], samples=settings.samples, length=settings.length)
        collect(run, name, source_of(folder), mixture, settings, CollectOptions(**how), profile)
        return run.stats(name)

    return run_


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return dict(open_artifact(path, "stats").tensors())


def same(a: Path, b: Path) -> bool:
    left, right = tensors(a), tensors(b)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def windows_of(folder: Path, corpus: Path) -> torch.Tensor:
    tokenizer = load_tokenizer(source_of(folder))
    return draw_windows(
        [str(corpus)], tokenizer.encode, samples=SAMPLES, length=LENGTH, seed=0, bos=tokenizer.bos
    ).tokens


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative error of ``a`` against ``b`` in the Frobenius norm; absolute where ``b`` is zero."""
    return float((a.detach().double() - b.double()).norm() / (b.double().norm() or 1.0))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight.double()


@pytest.fixture(scope="module")
def grouped(new_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four query heads to each of two kv heads, and a head dim that is not the hidden size over the heads."""
    return new_model(tmp_path_factory.mktemp("models") / "grouped", num_attention_heads=8)


@pytest.fixture(scope="module")
def multi_query(new_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One kv head for all queries."""
    return new_model(tmp_path_factory.mktemp("models") / "multi-query", num_key_value_heads=1)


@torch.no_grad()
def explicit(folder: Path, corpus: Path, layer: int) -> dict[str, torch.Tensor]:
    """What the statistics of a layer are by definition: its input X, then XW by hand, in float64. No hooks of ours."""
    model = load_model(source_of(folder))
    module_ = model.model.layers[layer].self_attn
    inputs: list[torch.Tensor] = []
    handle = module_.register_forward_pre_hook(
        lambda m, args, kwargs: inputs.append(kwargs["hidden_states"].double()), with_kwargs=True
    )
    model(input_ids=windows_of(folder, corpus), use_cache=False)
    handle.remove()
    x = inputs[0][:, SKIP:].reshape(-1, 64)
    k, v = x @ module_.k_proj.weight.double().T, x @ module_.v_proj.weight.double().T
    q = x @ module_.q_proj.weight.double().T
    if module_.q_proj.bias is not None:
        q = q + module_.q_proj.bias.double()
    q = q.reshape(q.shape[0], -1, 16)
    if hasattr(module_, "k_norm"):
        epsilon = module_.k_norm.variance_epsilon
        k = rms_norm(k.reshape(-1, 2, 16), module_.k_norm.weight, epsilon).reshape(-1, 32)
        q = rms_norm(q, module_.q_norm.weight, epsilon)
    o = module_.o_proj.weight.double().T.reshape(-1, 16, 64)
    # query head h reads kv head h // G
    groups = [
        [h for h in range(q.shape[1]) if h * k.shape[1] // 16 // q.shape[1] == kv] for kv in range(k.shape[1] // 16)
    ]
    return {
        "k_outer": k.T @ k,
        "v_outer": v.T @ v,
        "k_sum": k.sum(0),
        "v_sum": v.sum(0),
        "q_outer": torch.stack([sum(q[:, h].T @ q[:, h] for h in group) for group in groups]),
        "o_gram": torch.stack([sum(o[h] @ o[h].T for h in group) for group in groups]),
        "k": k,
        "v": v,
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_stats_are_the_moments_of_xw(
    family: str, request: pytest.FixtureRequest, tmp_path: Path, run_collect: Any, corpus: Path
) -> None:
    folder = request.getfixturevalue(family)
    stats = Stats.open(run_collect(Run(tmp_path), folder))
    for layer in (0, 3):
        expected, found = explicit(folder, corpus, layer), stats.layer(layer)
        assert found.count == TOKENS == expected["k"].shape[0]
        for name in ("k_outer", "v_outer", "k_sum", "v_sum", "q_outer", "o_gram"):
            assert error(getattr(found, name), expected[name]) < 1e-5, (layer, name)


def test_biases_would_show(tiny_qwen2: Path, tmp_path: Path, corpus: Path) -> None:
    """The oracle above tells latents with their bias from latents without it."""
    model = load_model(source_of(tiny_qwen2))
    expected = explicit(tiny_qwen2, corpus, 0)
    for side in ("k", "v"):
        bias = getattr(model.model.layers[0].self_attn, f"{side}_proj").bias.double()
        biased = expected[side] + bias
        assert error(biased.T @ biased, expected[f"{side}_outer"]) > 0.05


def test_keys_of_qwen3_are_the_normed_ones(tiny_qwen3: Path, tmp_path: Path, run_collect: Any) -> None:
    found = Stats.open(run_collect(Run(tmp_path), tiny_qwen3)).layer(1)
    # a root mean square of one per head and token, for weights of one: 2 heads of 16
    assert float(found.k_outer.trace()) / TOKENS == pytest.approx(32, rel=1e-3)
    assert abs(float(found.v_outer.trace()) / TOKENS - 32) > 1


def test_rows_are_rows_of_the_keys_and_values(tiny_llama: Path, tmp_path: Path, run_collect: Any, corpus: Path) -> None:
    found, expected = (Stats.open(run_collect(Run(tmp_path), tiny_llama)).layer(2), explicit(tiny_llama, corpus, 2))
    for side in ("k", "v"):
        rows = getattr(found, f"{side}_rows").double()
        assert rows.shape == (ROWS, 32)
        distances = torch.cdist(rows, expected[side])
        assert float(distances.min(1).values.max()) < 1e-4
        nearest = distances.argmin(1)
        assert nearest.unique().numel() == ROWS
        # spread evenly over the windows, none of which is left out
        assert torch.bincount(nearest // (LENGTH - SKIP)).tolist() == [ROWS // SAMPLES] * SAMPLES
    assert torch.equal(distances.argmin(1), torch.cdist(found.k_rows.double(), expected["k"]).argmin(1))


@pytest.mark.parametrize(("rows", "kept"), [(1, 1), (5, 5), (TOKENS, TOKENS), (10**12, TOKENS)])
def test_as_many_rows_as_there_are(tiny_llama: Path, tmp_path: Path, rows: int, kept: int, run_collect: Any) -> None:
    assert tensors(run_collect(Run(tmp_path), tiny_llama, rows=rows))["layers.0.k_rows"].shape == (kept, 32)


def poisoned(monkeypatch: pytest.MonkeyPatch, position: int, value: float) -> None:
    """Make every query, key and value at one position of every window what a sink may be, before it is counted."""
    genuine = passes.capture

    @contextmanager
    def capture(sites: Any, on_layer: Any) -> Any:
        def poison(layer: int, *parts: torch.Tensor) -> None:
            changed = [part.clone() for part in parts]
            for part in changed:
                part[:, position] = value
            on_layer(layer, *changed)

        with genuine(sites, poison):
            yield

    monkeypatch.setattr(passes, "capture", capture)


def test_sinks_enter_no_statistic(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_collect: Any
) -> None:
    clean = run_collect(Run(tmp_path / "clean"), tiny_llama)
    for position in (0, SKIP - 1, SKIP):
        with monkeypatch.context() as patch:
            poisoned(patch, position, 1e18)
            found = run_collect(Run(tmp_path / str(position)), tiny_llama)
        assert same(clean, found) == (position < SKIP)


def test_the_model_sees_the_drawn_windows_and_no_padding(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_collect: Any, corpus: Path
) -> None:
    seen: list[torch.Tensor] = []
    genuine = module.load_model

    def spy(*args: Any, **kwargs: Any) -> Any:
        model = genuine(*args, **kwargs)

        def before(_: Any, positional: Any, named: dict[str, Any]) -> None:
            assert set(named) == {"input_ids", "use_cache"}
            assert positional == ()
            seen.append(named["input_ids"])

        model.model.register_forward_pre_hook(before, with_kwargs=True)
        return model

    monkeypatch.setattr(module, "load_model", spy)
    run_collect(Run(tmp_path), tiny_llama, batch=4)
    assert [tuple(batch.shape) for batch in seen] == [(4, LENGTH), (2, LENGTH)]
    assert torch.equal(torch.cat(seen), windows_of(tiny_llama, corpus))


def test_the_batch_size_changes_rounding_alone(tiny_llama: Path, tmp_path: Path, run_collect: Any) -> None:
    one = tensors(run_collect(Run(tmp_path / "1"), tiny_llama))
    for batch in (4, 100):
        many = tensors(run_collect(Run(tmp_path / str(batch)), tiny_llama, batch=batch))
        assert many.keys() == one.keys()
        assert max(error(many[name], one[name]) for name in one) < 1e-5


def test_another_seed_is_another_calibration(tiny_llama: Path, tmp_path: Path, run_collect: Any) -> None:
    assert same(run_collect(Run(tmp_path / "a"), tiny_llama), run_collect(Run(tmp_path / "b"), tiny_llama))
    assert not same(Run(tmp_path / "a").stats(), run_collect(Run(tmp_path / "c"), tiny_llama, seed=1))


@pytest.fixture
def poison(new_model: Any, tmp_path: Path) -> Any:
    """A maker of tiny models with one changed weight."""
    from safetensors.torch import load_file, save_file

    def make(change: Any) -> Path:
        folder = new_model(tmp_path / "poisoned")
        parts = load_file(folder / "model.safetensors")
        change(parts)
        save_file(parts, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


def first_place(windows: torch.Tensor, token: int) -> tuple[int, int]:
    window, position = (windows == token).nonzero()[0].tolist()
    return window, position


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_activations_that_are_not_finite_name_layer_window_and_token(
    poison: Any, tmp_path: Path, value: float, run_collect: Any, corpus: Path
) -> None:
    # "(" as a token of the byte vocabulary: it occurs, but not at once
    token = load_tokenizer(source_of(poison(lambda parts: None))).encode("(")[0]
    folder = poison(lambda parts: parts["model.embed_tokens.weight"].__setitem__((token, 0), value))
    window, position = first_place(windows_of(folder, corpus), token)
    assert position > 0
    with pytest.raises(AatcError) as caught:
        run_collect(Run(tmp_path / "run"), folder)
    assert f"the queries of layer 0 are not finite at token {position} of window {window}" in caught.value.message
    assert "--dtype" in str(caught.value.hint)
    assert not (tmp_path / "run" / "stats").exists()


@pytest.mark.parametrize(
    ("weight", "says"),
    [
        ("model.layers.2.self_attn.k_proj.weight", "the keys of layer 2 are not finite at token 0 of window 0"),
        ("model.layers.1.self_attn.v_proj.weight", "the values of layer 1 are not finite at token 0 of window 0"),
        ("model.layers.3.self_attn.q_proj.weight", "the queries of layer 3 are not finite at token 0 of window 0"),
        ("model.layers.3.self_attn.o_proj.weight", "the output projection of layer 3 is not finite"),
        ("model.layers.1.mlp.down_proj.weight", "the queries of layer 2 are not finite at token 0 of window 0"),
    ],
)
def test_weights_that_are_not_finite_name_the_layer(
    poison: Any, tmp_path: Path, weight: str, says: str, run_collect: Any
) -> None:
    folder = poison(lambda parts: parts[weight].__setitem__((5, 5), float("nan")))
    with pytest.raises(AatcError) as caught:
        run_collect(Run(tmp_path / "run"), folder)
    assert says in caught.value.message


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"length": 513}, ("513 tokens", "context of 512")),
        ({"length": 4}, ("windows of 4 tokens", "first 4")),
        ({"length": 8, "skip_first": 9}, ("windows of 8 tokens", "first 9")),
        ({"samples": 1, "length": 35}, ("31 calibration tokens", "32 channels", "rank-deficient")),
        ({"samples": 31, "length": 5}, ("31 calibration tokens", "32 channels")),
    ],
)
def test_too_long_and_too_few(
    tiny_llama: Path, tmp_path: Path, changes: dict[str, int], says: tuple[str, ...], run_collect: Any
) -> None:
    with pytest.raises(AatcError) as caught:
        run_collect(Run(tmp_path / "run"), tiny_llama, **changes)
    for part in says:
        assert part in caught.value.message
    assert "--length" in str(caught.value.hint)
    assert not (tmp_path / "run").exists()


def test_just_enough(tiny_llama: Path, tmp_path: Path, run_collect: Any) -> None:
    run_collect(Run(tmp_path), tiny_llama, "a", samples=1, length=36)
    run_collect(Run(tmp_path), tiny_llama, "b", samples=1, length=512)
    results = Stats.open(tmp_path / "b").manifest.results
    assert {name: results[name] for name in ("windows", "tokens", "fisher_windows")} == {
        "windows": 1,
        "tokens": 508,
        "fisher_windows": 0,
    }


@pytest.mark.parametrize(("text", "distinct"), [("a" * 9000, 1), ("ab" * 4500, 2)])
def test_text_that_hardly_varies_is_told(
    tiny_llama: Path, tmp_path: Path, run_collect: Any, capsys: pytest.CaptureFixture[str], text: str, distinct: int
) -> None:
    (tmp_path / "text.txt").write_text(text)
    # with sinks out of the way: the first tokens of a window are unlike the rest, whatever the text
    path = run_collect(Run(tmp_path / "run"), tiny_llama, text=str(tmp_path / "text.txt"), length=256, skip_first=8)
    results = Stats.open(path).manifest.results
    assert results["distinct_tokens"] == distinct
    assert 1 <= results["value_rank"] < 2.1
    warned = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(warned) == (1 if results["value_rank"] < 32 / 24 else 0)
    if distinct == 1:
        assert f"effective rank {results['value_rank']:.1f} of 32 channels" in warned[0]


def test_the_rank_of_the_values_is_that_of_their_moment(tiny_llama: Path, base: Path) -> None:
    stats = tensors(base / "stats")
    ranks = []
    for layer in range(4):
        spectrum = torch.linalg.eigvalsh(stats[f"layers.{layer}.v_outer"])
        ranks.append(float(spectrum.sum() ** 2 / spectrum.square().sum()))
    assert Stats.open(base / "stats").manifest.results["value_rank"] == round(statistics.median(ranks), 1)


@pytest.mark.real
def test_english_is_not_told_to_hardly_vary(
    real_model_path: Path, tmp_path: Path, run_collect: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = {}
    for name in ("varied", "sentence"):
        text = "builtin:python-docs"
        if name == "sentence":
            text = str(tmp_path / "sentence.txt")
            Path(text).write_text("The cache holds keys and values of every token that the model has seen. " * 200)
        path = run_collect(Run(tmp_path / name), real_model_path, text=text, samples=2, length=256)
        ranks[name] = Stats.open(path).manifest.results["value_rank"]
        assert ("warning: the calibration text hardly varies" in capsys.readouterr().err) == (name == "sentence")
    assert ranks["varied"] > 3 * ranks["sentence"]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] data. DefaultCPUAllocator: can't allocate memory"),
        OSError(12, "Cannot allocate memory"),
    ],
    ids=["python", "cuda", "cpu", "mapping"],
)
@pytest.mark.parametrize("where", ["load_model", "run_forward", "draw_windows"])
def test_little_memory_is_one_error(
    tiny_llama: Path, tmp_path: Path, run_collect: Any, monkeypatch: pytest.MonkeyPatch, error: Exception, where: str
) -> None:
    def fail(*args: Any, **keywords: Any) -> None:
        raise error

    monkeypatch.setattr({"draw_windows": opening, "run_forward": portions}.get(where, module), where, fail)
    with pytest.raises(AatcError, match="not enough memory for collecting with tiny-llama") as caught:
        run_collect(Run(tmp_path / "run"), tiny_llama)
    assert caught.value.hint
    monkeypatch.undo()
    run_collect(Run(tmp_path / "run"), tiny_llama)


def test_other_errors_are_not_taken_for_little_memory(
    tiny_llama: Path, tmp_path: Path, run_collect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **keywords: Any) -> None:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(portions, "run_forward", fail)
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        run_collect(Run(tmp_path / "run"), tiny_llama)


def test_one_text_given_twice_is_refused(refuses, tiny_llama, corpus, tmp_path):
    """Its windows could be drawn twice, and the mixture would not be what it says."""
    copy = tmp_path / "copy.txt"
    copy.write_bytes(corpus.read_bytes())
    asked = ("collect", "--run", tmp_path / "run", "--model", tiny_llama, "--samples", 4, "--length", 64, "--text")
    refuses(*asked, corpus, "--text", f"{corpus}@2", says=("given twice: corpus.txt",), folder=tmp_path / "run")
    refuses(*asked, corpus, "--text", copy, says=("corpus.txt and copy.txt",), folder=tmp_path / "run")


def test_text_shorter_than_a_window(tiny_llama: Path, tmp_path: Path, run_collect: Any) -> None:
    (tmp_path / "short.txt").write_text("x" * (LENGTH - 1))
    with pytest.raises(AatcError, match=r"'short.txt' has 0 windows of 48 tokens, but 6 are needed"):
        run_collect(Run(tmp_path / "run"), tiny_llama, text=str(tmp_path / "short.txt"))
    (tmp_path / "short.txt").write_text("x" * LENGTH)
    run_collect(Run(tmp_path / "run"), tiny_llama, text=str(tmp_path / "short.txt"), samples=1)


def test_nothing_to_do_does_not_load_the_model(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: Any, capsys: Any, run_collect: Any
) -> None:
    run = Run(tmp_path)
    run_collect(run, tiny_llama)
    before = snapshot(tmp_path)
    monkeypatch.setattr(module, "load_model", None)
    # how it is run, other than what, is no change
    run_collect(run, tiny_llama, batch=3, dtype="bfloat16", checkpoint_seconds=0.0)
    assert snapshot(tmp_path) == before
    assert "inputs unchanged, nothing to do" in capsys.readouterr().err
    copy = Path(shutil.copytree(tiny_llama, tmp_path.parent / "another-name"))
    run_collect(run, copy)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"samples": 7}, "settings.samples was 6, now 7"),
        ({"length": 49}, "settings.length was 48, now 49"),
        ({"seed": 1}, "settings.seed was 0, now 1"),
        ({"rows": 61}, "settings.rows was 60, now 61"),
        ({"skip_first": 3}, "settings.skip_first was 4, now 3"),
        ({"head_groups": 2}, "settings.head_groups was 1, now 2"),
        ({"text": __file__}, 'texts[0].name was "corpus.txt", now "test_collect.py"'),
    ],
)
def test_another_setting_is_refused_and_forced(
    tiny_llama: Path, base: Path, tmp_path: Path, snapshot: Any, changes: dict[str, Any], says: str, run_collect: Any
) -> None:
    shutil.copytree(base, tmp_path / "run")
    run, before = Run(tmp_path / "run"), snapshot(base)
    with pytest.raises(SettingsMismatchError) as caught:
        run_collect(run, tiny_llama, **changes)
    assert says in caught.value.message
    assert "--force" in str(caught.value.hint)
    assert {name: content for name, (content, _) in snapshot(run.root).items()} == {
        name: content for name, (content, _) in before.items()
    }
    run_collect(run, tiny_llama, **changes, force=True)
    assert Stats.open(run.stats()).manifest.digest != Stats.open(base / "stats").manifest.digest


@pytest.fixture(scope="module")
def base(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory, run_collect: Any) -> Path:
    """An undisturbed run, for comparison only."""
    root = tmp_path_factory.mktemp("collected")
    run_collect(Run(root), tiny_llama)
    return root


def test_a_changed_text_file_under_the_same_name_is_refused(tiny_llama: Path, tmp_path: Path, run_collect: Any) -> None:
    text = tmp_path / "a.txt"
    text.write_text("some words " * 100)
    run_collect(Run(tmp_path / "run"), tiny_llama, text=str(text))
    text.write_text("some wards " * 100)
    with pytest.raises(SettingsMismatchError, match=r"texts\[0\].sha256"):
        run_collect(Run(tmp_path / "run"), tiny_llama, text=str(text))
    assert "/" not in Stats.open(tmp_path / "run" / "stats").manifest.model_dump_json()


@pytest.mark.parametrize(
    ("family", "changes", "field"),
    [
        ("llama", {"seed": 1}, "model.weights_fingerprint"),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}, "model.config_hash"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
            "model.config_hash",
        ),
        ("llama", {"rms_norm_eps": 1e-5}, "model.config_hash"),
        ("qwen2", {}, "model.architecture"),
        ("llama", {"num_hidden_layers": 2}, "model.geometry.layers was 4, now 2"),
    ],
    ids=["weights", "rope-theta", "rope-type", "epsilon", "family", "layers"],
)
def test_another_model_under_the_same_name_is_refused(
    base: Path, new_model: Any, tmp_path: Path, family: str, changes: dict[str, Any], field: str, run_collect: Any
) -> None:
    shutil.copytree(base, tmp_path / "run")
    other = new_model(tmp_path / "tiny-llama", family, **changes)
    with pytest.raises(SettingsMismatchError) as caught:
        run_collect(Run(tmp_path / "run"), other)
    assert field in caught.value.message


def test_a_profile_must_be_of_this_model(tiny_llama: Path, tmp_path: Path, run_collect: Any) -> None:
    with pytest.raises(AatcError, match="expects layers = 30, but the model has 4"):
        run_collect(Run(tmp_path / "run"), tiny_llama, profile=load_model_profile("smollm2-135m-instruct"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "name", ["../up", "/abs", "a/b", "", ".", "..", ".hidden", "plans", "transforms", "evals", "report"]
)
def test_a_name_stays_in_the_run(tiny_llama: Path, tmp_path: Path, name: str, run_collect: Any) -> None:
    with pytest.raises(UsageError, match="cannot be the name"):
        run_collect(Run(tmp_path / "run"), tiny_llama, name)
    assert list(tmp_path.iterdir()) == []


# interruption


class Killed(BaseException):
    """Stands for a signal."""


@pytest.fixture
def interrupted(run_collect: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Collect with a checkpoint after every window, and stop after so many windows."""
    from aatc_cli.console import Ticker

    genuine = Ticker.advance

    def run_(run: Run, folder: Path, after: int, **changes: Any) -> None:
        steps = []

        def advance(self: Ticker, count: int = 1, text: str | None = None) -> None:
            genuine(self, count, text)
            steps.append(count)
            if sum(steps) > after:
                raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(Ticker, "advance", advance)
            with pytest.raises(Killed):
                run_collect(run, folder, checkpoint_seconds=0.0, **changes)

    return run_


@pytest.mark.parametrize("after", [1, 4, 5])
def test_an_interrupted_collect_continues_to_the_same_bits(
    tiny_llama: Path, base: Path, tmp_path: Path, capsys: Any, after: int, run_collect: Any, interrupted: Any
) -> None:
    run = Run(tmp_path)
    interrupted(run, tiny_llama, after)
    partial = tmp_path / ".stats.partial"
    assert open_artifact(partial, "stats").manifest.results["windows"] == after
    assert not (tmp_path / "stats").exists()
    run_collect(run, tiny_llama)
    assert f"continuing from window {after} of {SAMPLES}" in capsys.readouterr().err
    assert same(tmp_path / "stats", base / "stats")
    assert Stats.open(tmp_path / "stats").manifest.digest == Stats.open(base / "stats").manifest.digest
    assert not partial.exists()


def test_interrupted_twice_and_in_other_batches(
    tiny_llama: Path, base: Path, tmp_path: Path, run_collect: Any, interrupted: Any
) -> None:
    run = Run(tmp_path)
    interrupted(run, tiny_llama, 2)
    interrupted(run, tiny_llama, 2)
    assert open_artifact(tmp_path / ".stats.partial", "stats").manifest.results["windows"] == 4
    run_collect(run, tiny_llama, checkpoint_seconds=0.0)
    assert same(tmp_path / "stats", base / "stats")


WITH_GRADIENTS = {"samples": 3, "length": 160, "fisher": 3}


@pytest.mark.parametrize(("after", "done"), [(2, (2, 0)), (4, (3, 1)), (5, (3, 2))])
def test_interrupted_before_or_among_the_gradients(
    tiny_llama: Path, tmp_path: Path, run_collect: Any, interrupted: Any, after: int, done: tuple[int, int]
) -> None:
    interrupted(Run(tmp_path / "a"), tiny_llama, after, **WITH_GRADIENTS)
    partial = tmp_path / "a" / ".stats.partial"
    results = open_artifact(partial, "stats").manifest.results
    assert (results["windows"], results["fisher_windows"]) == done
    with pytest.raises(ArtifactError, match=f"checkpoint of collect after {done[1] or done[0]} of 3"):
        Stats.open(partial)
    for name in "ab":
        run_collect(Run(tmp_path / name), tiny_llama, **WITH_GRADIENTS)
    assert same(tmp_path / "a" / "stats", tmp_path / "b" / "stats")
    found = Stats.open(tmp_path / "a" / "stats")
    for layer in range(4):
        for side in ("k", "v"):
            fisher = found.artifact.tensor(f"layers.{layer}.{side}_fisher")
            assert float(torch.linalg.eigvalsh(fisher)[-1]) > 0


def test_gradients_are_reproducible_and_depend_on_the_seed(tiny_llama: Path, tmp_path: Path, run_collect: Any) -> None:
    first, again = (tensors(run_collect(Run(tmp_path / name), tiny_llama, **WITH_GRADIENTS)) for name in "ab")
    other = tensors(run_collect(Run(tmp_path / "c"), tiny_llama, **WITH_GRADIENTS, seed=1))
    plain = tensors(run_collect(Run(tmp_path / "d"), tiny_llama, **(WITH_GRADIENTS | {"fisher": 0})))
    for name in first:
        assert torch.equal(first[name], again[name])
        if "fisher" in name:
            assert not torch.equal(first[name], other[name])
            assert not plain[name].any()
        elif name.endswith(LayerStats.OPTIONAL):
            assert not torch.equal(first[name], other[name])
            assert name not in plain
        else:
            assert torch.equal(first[name], plain[name])


@pytest.mark.parametrize(
    "changes", [{"fisher_batch": 2}, {"fisher_batch": 8}, {"batch": 3}, {"recompute": True, "fisher_batch": 2}]
)
def test_gradients_in_batches_are_those_one_by_one(
    tiny_llama: Path, tmp_path: Path, run_collect: Any, changes: dict[str, Any], capsys: Any
) -> None:
    alone = tensors(run_collect(Run(tmp_path / "a"), tiny_llama, **WITH_GRADIENTS))
    capsys.readouterr()
    batched = tensors(run_collect(Run(tmp_path / "b"), tiny_llama, **WITH_GRADIENTS, **changes))
    for name, tensor in alone.items():
        # the order of float32 sums
        assert error(batched[name], tensor) < 1e-5, name
    assert re.search(r"collect: gradients [\d.]+ s; Fisher: [\d.]+ forward passes per window", capsys.readouterr().err)


def test_interrupted_among_the_gradients_and_in_another_batch(
    tiny_llama: Path, tmp_path: Path, run_collect: Any, interrupted: Any
) -> None:
    interrupted(Run(tmp_path / "a"), tiny_llama, 4, **WITH_GRADIENTS)
    resumed = tensors(run_collect(Run(tmp_path / "a"), tiny_llama, **WITH_GRADIENTS, fisher_batch=2))
    whole = tensors(run_collect(Run(tmp_path / "b"), tiny_llama, **WITH_GRADIENTS))
    assert max(error(resumed[name], tensor) for name, tensor in whole.items()) < 1e-5


def test_gradients_that_are_not_finite_name_layer_and_window(poison: Any, tmp_path: Path, run_collect: Any) -> None:
    """The statistics never see the output head; the last layer is where its gradients arrive first."""
    folder = poison(lambda parts: parts["lm_head.weight"].__setitem__((5, 5), float("nan")))
    with pytest.raises(AatcError, match=r"the [kv] gradients of layer 3 are not finite in window 0") as caught:
        run_collect(Run(tmp_path / "run"), folder, **WITH_GRADIENTS, fisher_batch=2)
    assert "--dtype" in str(caught.value.hint)


def test_gradients_of_float16_are_refused_before_anything_runs(
    tiny_llama: Path, tmp_path: Path, run_collect: Any
) -> None:
    with pytest.raises(UsageError, match="gradients of a float16 model vanish"):
        run_collect(Run(tmp_path / "run"), tiny_llama, **WITH_GRADIENTS, dtype="float16")
    assert not (tmp_path / "run" / "stats").exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"fisher": 4, "samples": 3, "length": 160}, ("--fisher 4", "the 3 that are drawn")),
        ({"fisher": 1, "samples": 3, "length": 133}, ("windows of 133 tokens", "the 132 that a query reads exactly")),
    ],
)
def test_gradients_that_cannot_be(
    tiny_llama: Path, tmp_path: Path, run_collect: Any, changes: dict[str, int], says: tuple[str, ...]
) -> None:
    with pytest.raises(AatcError) as caught:
        run_collect(Run(tmp_path / "run"), tiny_llama, **changes)
    for part in says:
        assert part in caught.value.message
    assert caught.value.hint
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_is_not_stats(tiny_llama: Path, tmp_path: Path, interrupted: Any) -> None:
    interrupted(Run(tmp_path), tiny_llama, 2)
    with pytest.raises(ArtifactError, match="checkpoint of collect after 2 of 6 windows"):
        Stats.open(tmp_path / ".stats.partial")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seed": 1}, "settings.seed was 0, now 1"),
        ({"text": __file__}, "texts[0].name"),
        ({"dtype": "bfloat16"}, "collected in float32, now the model runs in bfloat16"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused(
    tiny_llama: Path, tmp_path: Path, changes: dict[str, Any], says: str, run_collect: Any, interrupted: Any
) -> None:
    interrupted(Run(tmp_path), tiny_llama, 2)
    with pytest.raises(SettingsMismatchError) as caught:
        run_collect(Run(tmp_path), tiny_llama, **changes)
    assert says in caught.value.message
    assert "--force" in str(caught.value.hint)
    run_collect(Run(tmp_path), tiny_llama, **changes, force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "stats"]


@pytest.mark.parametrize("name", [MANIFEST, TENSORS])
def test_a_damaged_checkpoint_is_refused_and_forced(
    tiny_llama: Path, base: Path, tmp_path: Path, name: str, run_collect: Any, interrupted: Any
) -> None:
    interrupted(Run(tmp_path), tiny_llama, 2)
    file = tmp_path / ".stats.partial" / name
    content = bytearray(file.read_bytes())
    content[-100 if name == TENSORS else content.index(b"seed")] ^= 1
    file.write_bytes(content)
    with pytest.raises(ArtifactError) as caught:
        run_collect(Run(tmp_path), tiny_llama)
    assert "--force" in str(caught.value.hint)
    run_collect(Run(tmp_path), tiny_llama, force=True)
    assert same(tmp_path / "stats", base / "stats")


# stops itself behind its third checkpoint, so that it is met in the middle on any machine
STOPS = """
import os, signal
from aatc_cli.__main__ import main
from aatc_cli.stages.collecting.job import CollectJob
write, written = CollectJob.write, []
def stopping(*arguments):
    done = write(*arguments)
    written.append(done)
    if len(written) == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    return done
CollectJob.write = stopping
main()
"""


def test_sigkill(tiny_llama: Path, tmp_path: Path, run_collect: Any, corpus: Path) -> None:
    """Killed for real in the middle, after it kept a second writer out: what is left is whole and is continued.

    The end is bit for bit that of an undisturbed run.
    """
    samples = 20
    asked = ("--run", tmp_path / "killed", "--model", tiny_llama, "--text", corpus, "--samples", samples)
    more = ("--length", LENGTH, "--rows", ROWS, "--checkpoint-seconds", 0)
    command = [sys.executable, "-c", STOPS, "collect", *map(str, asked + more)]
    process = subprocess.Popen(command, cwd=Path(module.__file__).parents[2], stderr=subprocess.PIPE)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), process.stderr.read() if process.stderr else ""
    assert (tmp_path / "killed" / ".stats.partial" / MANIFEST).exists()
    with pytest.raises(AatcError, match=f"is being written by process {process.pid}$") as caught:
        run_collect(Run(tmp_path / "killed"), tiny_llama, samples=samples)
    assert "another --run" in str(caught.value.hint)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.communicate()
    assert not (tmp_path / "killed" / "stats").exists()
    for name in ("killed", "calm"):
        run_collect(Run(tmp_path / name), tiny_llama, samples=samples)
    assert same(tmp_path / "killed" / "stats", tmp_path / "calm" / "stats")
    assert sorted(path.name for path in (tmp_path / "killed").iterdir()) == [".lock", "stats"]


# the run directory


def test_leftovers_of_a_killed_writer_are_swept(
    tiny_llama: Path, base: Path, tmp_path: Path, snapshot: Any, run_collect: Any
) -> None:
    shutil.copytree(base, tmp_path / "run")
    root = tmp_path / "run"
    (root / ".stats.tmp-aatc-00000000000f423f").mkdir()
    (root / ".stats.tmp-aatc-00000000000f423f" / TENSORS).write_bytes(b"half")
    shutil.copytree(root / "stats", root / ".stats.old-aatc-00000000000f423f")
    (root / "plans").mkdir()
    shutil.copytree(root / "stats", root / "plans" / ".paper-2.5.old-aatc-0000000000000007")
    (root / "plans" / ".x.tmp-aatc-0000000000000008").write_text("half")
    before = snapshot(root / "stats")
    with Run(root).lock():
        pass
    assert sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.name not in (MANIFEST, TENSORS)) == [
        ".lock",
        "plans",
        "plans/paper-2.5",
        "stats",
    ]
    assert snapshot(root / "stats") == before
    # killed between the two renames: only the one that was moved aside is left
    (root / "stats").rename(root / ".stats.old-aatc-00000000000f423f")
    run_collect(Run(root), tiny_llama)
    assert {name: content for name, (content, _) in snapshot(root / "stats").items()} == {
        name: content for name, (content, _) in before.items()
    }


def test_a_second_writer_is_refused_by_the_pid_of_the_first(tmp_path: Path) -> None:
    with Run(tmp_path).lock():
        with pytest.raises(AatcError, match=rf"written by process {os.getpid()}$"), Run(tmp_path).lock():
            pass
        assert (tmp_path / ".lock").read_text() == str(os.getpid())
    with Run(tmp_path).lock():
        pass


def test_a_lock_without_a_name(tmp_path: Path) -> None:
    with Run(tmp_path).lock():
        (tmp_path / ".lock").write_text("")
        with pytest.raises(AatcError, match=r"is being written by another process$"), Run(tmp_path).lock():
            pass


def test_what_is_recorded(tiny_llama: Path, base: Path) -> None:
    raw = json.loads((base / "stats" / MANIFEST).read_text(encoding="utf-8"))
    told = {name: raw["results"].pop(name) for name in ("distinct_tokens", "value_rank")}
    assert raw["results"] == {"windows": SAMPLES, "tokens": TOKENS, "fisher_windows": 0}
    assert told["distinct_tokens"] > 20
    assert 1 < told["value_rank"] < 32
    assert raw["provenance"]["dtype"] == "float32"
    assert raw["model"]["name"] == tiny_llama.name
    assert raw["texts"][0]["windows"] == SAMPLES
    assert str(tiny_llama.parent) not in json.dumps(raw)
