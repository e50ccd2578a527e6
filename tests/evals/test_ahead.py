"""Tokens written ahead in place are those that the cache writes one by one, and their logits are the cache's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import CollectSettings
from aatc_cli.config import make_budget
from aatc_cli.errors import AatcError
from aatc_cli.evals.accumulate import decoding
from aatc_cli.evals.accumulate.decoding import Draw, decoded
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


def written(session: Session, corpus: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """What a cache writes behind two prompts of one length, and its logits."""
    encode = load_tokenizer(find_model(str(session.model.config._name_or_path))).encode
    device = next(session.model.parameters()).device
    prompts = torch.tensor(encode(corpus.read_text())[: 2 * PROMPT]).view(2, PROMPT).to(device)
    draw = Draw.of(0, range(2), STEPS + 1, 1.0)
    parts = list(decoded(session, prompts, STEPS, draw, encode, 50))
    return parts[-1].tokens.cpu(), torch.cat([part.logits for part in parts], 1).cpu()


def check_ahead(sessions: list[Session], corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    fed = decoding._fed

    def counted(session: Session, cache: Any, tokens: torch.Tensor, count: int) -> torch.Tensor:
        passes.append(count)
        return fed(session, cache, tokens, count)

    monkeypatch.setattr(decoding, "_fed", counted)
    for session in sessions:
        tokens, logits = written(session, corpus)
        assert sum(passes) == STEPS
        assert len(passes) < STEPS // 5
        with monkeypatch.context() as patch:
            patch.setattr(InPlaceSteps, "of", lambda *given: None)
            alone, each = written(session, corpus)
        passes.clear()
        assert torch.equal(tokens, alone)
        torch.testing.assert_close(logits, each, rtol=1e-6, atol=1e-7)


def test_tokens_written_ahead_are_those_of_single_steps(
    sessions_on: Callable[[str], list[Session]], corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_ahead(sessions_on("cpu"), corpus, monkeypatch)


@pytest.mark.gpu
def test_written_by_a_graph(
    sessions_on: Callable[[str], list[Session]], corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same, of steps that are captured once and replayed."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    check_ahead(sessions_on("cuda"), corpus, monkeypatch)


def test_other_tokens_than_the_cache_writes_are_refused(
    sessions_on: Callable[[str], list[Session]], corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache whose packed tokens are never taken over would write something else."""
    monkeypatch.setattr(InPlaceSteps, "refresh", lambda steps: None)
    monkeypatch.setattr(decoding, "_TIES", 0)
    with pytest.raises(AatcError, match="are not those that the cache writes"):
        written(sessions_on("cpu")[-1], corpus)
