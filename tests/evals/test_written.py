"""Tokens that several caches write together in place are those that each writes one by one, and so are the logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import CollectSettings
from aatc_cli.config import make_budget
from aatc_cli.errors import AatcError
from aatc_cli.evals.accumulate import writing
from aatc_cli.evals.accumulate.decoding import Draw, Stretch, decoded
from aatc_cli.evals.accumulate.writing import written
from aatc_cli.models.loading import find_model, load_model, load_tokenizer
from aatc_cli.profiles import TextMixture, load_recipe
from aatc_cli.runtime.attach import plain, prepare
from aatc_cli.runtime.in_place import InPlaceSteps
from aatc_cli.runtime.session import Session
from aatc_cli.stages.allocate import allocate
from aatc_cli.stages.collect import CollectOptions, collect
from aatc_cli.stages.whiten import Wanted, whiten

PROMPT, STEPS = 210, 90
MIXED = {
    "num_hidden_layers": 6,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "query_pre_attn_scalar": 16,
}
METHODS = (("loss-aware-tiles", 1.5), ("paper", 3), ("kvtc", 2), ("kivi", 2))


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def sessions_on(request: Any, new_model: Any, corpus: Path, tmp_path_factory: Any) -> Callable[[str], list[Session]]:
    """On a device, in float64: the model's own cache and simulated ones; of a model with sliding layers as well."""
    family = str(request.param)
    folder = tmp_path_factory.mktemp("ahead")
    model = new_model(folder / "tiny", family=family, **(MIXED if family != "llama" else {}))
    run, source = Run(folder / "run"), find_model(str(model))
    settings = CollectSettings(samples=4, length=260, rows=64, fisher=4)
    collect(run, "stats", source, TextMixture(sources=[str(corpus)], samples=4, length=260), settings, CollectOptions())
    plans = []
    for name, bits in METHODS:
        recipe = load_recipe(name)
        whiten(run, transform_stats=run.stats(), rate_stats=run.stats(), wanted=Wanted.by(recipe))
        plans.append(allocate(run, recipe, [make_budget(bits=bits)])[0])

    def on(device: str) -> list[Session]:
        loaded = load_model(source, device=device, dtype="float32").double()
        return [plain(loaded), *(prepare(loaded, plan, "simulated") for plan in plans)]

    return on


def prompts_of(model: Any, corpus: Path) -> tuple[torch.Tensor, Any]:
    encode = load_tokenizer(find_model(str(model.config._name_or_path))).encode
    device = next(model.parameters()).device
    return torch.tensor(encode(corpus.read_text())[: 2 * PROMPT]).view(2, PROMPT).to(device), encode


def check_together(sessions: list[Session], corpus: Path) -> None:
    """All at once, in stretches, against each by itself token by token."""
    prompts, encode = prompts_of(sessions[0].model, corpus)
    draw = Draw.of(0, range(2), STEPS + 1, 1.0)
    found: dict[int, list[Stretch]] = {place: [] for place in range(len(sessions))}
    for made in written(sessions, prompts, STEPS, draw, encode, 50):
        assert [place for place, _ in made] == list(range(len(sessions)))
        for place, stretch in made:
            found[place].append(replace(stretch, logits=stretch.logits.clone()))
    for place, session in enumerate(sessions):
        alone = list(decoded(session, prompts, STEPS, draw, encode, 50))
        for mine, one in zip(found[place], alone, strict=True):
            assert torch.equal(mine.tokens, one.tokens)
            torch.testing.assert_close(mine.logits, one.logits, rtol=1e-6, atol=1e-7)


def test_what_caches_write_together_is_what_each_writes_alone(
    sessions_on: Callable[[str], list[Session]], corpus: Path
) -> None:
    check_together(sessions_on("cpu"), corpus)


@pytest.mark.gpu
def test_written_by_a_graph(sessions_on: Callable[[str], list[Session]], corpus: Path) -> None:
    """The same, of steps that are captured once and replayed."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    check_together(sessions_on("cuda"), corpus)


def test_a_cache_that_cannot_be_stepped_in_place_writes_by_itself(
    sessions_on: Callable[[str], list[Session]], corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "can_step", lambda session, cache: session.spec is None)
    sessions = sessions_on("cpu")[:2]
    prompts, encode = prompts_of(sessions[0].model, corpus)
    made = list(written(sessions, prompts, 8, Draw.of(0, range(2), 9, 1.0), encode, 8))
    assert [[place for place, _ in one] for one in made] == [[0], [1]]


def test_other_tokens_than_the_cache_writes_are_refused(
    sessions_on: Callable[[str], list[Session]], corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache of tiles whose packed tokens are never taken over would write something else."""
    monkeypatch.setattr(InPlaceSteps, "refresh", lambda steps, lane: None)
    monkeypatch.setattr(writing, "_TIES", 0)
    tiles = sessions_on("cpu")[1]
    prompts, encode = prompts_of(tiles.model, corpus)
    with pytest.raises(AatcError, match="are not those that"):
        list(written([tiles], prompts, STEPS, Draw.of(0, range(2), STEPS + 1, 1.0), encode, 50))
