"""Models that accelerate places: on one device by a map, and with layers that stay on disk between their passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aatc_cli.artifacts.artifact import open_artifact
from aatc_cli.artifacts.plan import Plan
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import CollectSettings
from aatc_cli.config import Window, make_budget
from aatc_cli.errors import AatcError
from aatc_cli.evals import opened as opened_subjects
from aatc_cli.evals.subjects import EvalOptions, Subject
from aatc_cli.models import loading
from aatc_cli.models.adapter import attention_sites
from aatc_cli.models.loading import find_model
from aatc_cli.models.placement import device_of, input_device
from aatc_cli.profiles import TextMixture
from aatc_cli.runtime.attach import attach_codecs
from aatc_cli.stages import collect as collect_stage
from aatc_cli.stages.collect import CollectOptions, collect

ONE = {"": "cpu"}
ON_DISK = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.layers.2": "disk",
    "model.layers.3": "cpu",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "cpu",
}
MAPS = pytest.mark.parametrize("placed", [ONE, ON_DISK], ids=["one device", "on disk"])


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], list[Any]]:
    """Make the stages place models by a given map where they ask for "auto"; the models they loaded are in the list."""

    def use(placed: dict[str, str]) -> list[Any]:
        loaded: list[Any] = []

        def load(*args: Any, device_map: Any = None, **keywords: Any) -> Any:
            assert device_map == "auto"
            loaded.append(loading.load_model(*args, device_map=placed, **keywords))
            return loaded[-1]

        monkeypatch.setattr(collect_stage, "load_model", load)
        monkeypatch.setattr(opened_subjects, "load_model", load)
        return loaded

    return use


def on_meta(model: Any) -> int:
    return sum(parameter.device.type == "meta" for parameter in model.parameters())


@MAPS
@pytest.mark.parametrize("family", ["tiny_llama", "tiny_qwen2"])
def test_statistics_and_gradients_are_those_of_a_plain_model(
    request: pytest.FixtureRequest, corpus: Path, tmp_path: Path, mapped: Any, placed: dict[str, str], family: str
) -> None:
    source = find_model(str(request.getfixturevalue(family)))
    window = Window(sinks=4, recent=16, flush=4)
    settings = CollectSettings(samples=3, length=64, rows=64, fisher=2, window=window)
    mixture = TextMixture(sources=[str(corpus)], samples=3, length=64)
    options = CollectOptions()
    collect(Run(tmp_path / "plain"), "stats", source, mixture, settings, options)
    loaded = mapped(placed)
    collect(Run(tmp_path / "placed"), "stats", source, mixture, settings, options.model_copy(update={"spread": True}))
    assert (on_meta(loaded[0]) > 0) == (placed is ON_DISK)
    plain, other = (open_artifact(tmp_path / name / "stats", "stats") for name in ("plain", "placed"))
    assert other.manifest.provenance["device_map"] == "auto"
    for name, tensor in plain.tensors():
        torch.testing.assert_close(other.tensor(name), tensor, rtol=1e-6, atol=1e-6 * float(tensor.abs().max()))


@MAPS
def test_evaluations_are_those_of_a_plain_model(
    measured: Any, tiny_llama: Path, run_folder: Path, corpus: Path, mapped: Any, placed: dict[str, str]
) -> None:
    run = Run(run_folder)
    plan = Plan.open(run.plan("paper", make_budget(bits=3.0)))
    subjects = [Subject(plan.recipe, plan)]
    asked = {"text": [corpus], "length": 256, "limit": 1, "first": 160}
    [plain] = measured("kl", run, tiny_llama, subjects, **asked)
    loaded = mapped(placed)
    [other] = measured("kl", run, tiny_llama, subjects, EvalOptions(force=True, spread=True), **asked)
    assert (on_meta(loaded[0]) > 0) == (placed is ON_DISK)
    assert plain.kl_mean is not None
    assert plain.kl_mean > 0
    assert other.kl_mean == pytest.approx(plain.kl_mean, rel=1e-5)
    assert other.nll == pytest.approx(plain.nll, rel=1e-6)


def test_where_an_offloaded_model_computes(tiny_qwen2: Path) -> None:
    model = loading.load_model(find_model(str(tiny_qwen2)), device_map=ON_DISK)
    assert input_device(model) == torch.device("cpu")
    plain = attention_sites(loading.load_model(find_model(str(tiny_qwen2))))
    for site, other in zip(attention_sites(model), plain, strict=True):
        assert device_of(site.o) == torch.device("cpu")
        assert site.k_bias is not None
        assert other.k_bias is not None
        assert torch.equal(site.k_bias, other.k_bias)
    assert on_meta(model) > 0


def test_the_packed_cache_refuses_a_spread_model(tiny_llama: Path) -> None:
    model = loading.load_model(find_model(str(tiny_llama)), device_map=ON_DISK)
    with pytest.raises(AatcError, match="spread over cpu, meta"), attach_codecs(model, [], Window()):
        pass


@pytest.mark.parametrize("task", ["memory", "speed", "ruler", "distortion"])
def test_tasks_that_need_one_device(refuses: Any, tiny_llama: Path, tmp_path: Path, task: str) -> None:
    command = ("eval", task, "--model", tiny_llama, "--recipe", "fp16", "--device-map", "auto")
    refuses(*command, says=("--device-map",), folder=tmp_path, code=2)


def test_a_device_beside_a_map(refuses: Any, tiny_llama: Path, corpus: Path, tmp_path: Path) -> None:
    command = ("collect", "--run", tmp_path / "run", "--model", tiny_llama, "--text", corpus, "--device", "cuda:1")
    refuses(*command, "--device-map", "auto", says=("places the model itself",), folder=tmp_path, code=2)
