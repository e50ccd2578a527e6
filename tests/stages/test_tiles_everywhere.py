"""A plan of tiles in every task and under ``generate``, on a model of full layers and one with sliding ones too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aatc_cli.artifacts.plan import Plan
from aatc_cli.artifacts.run import Run
from aatc_cli.config import make_budget
from aatc_cli.models.loading import find_model, load_model
from aatc_cli.runtime.attach import attach

GEMMA = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 24,
    "query_pre_attn_scalar": 16,
    "num_key_value_heads": 1,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    },
}


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def made(
    request: pytest.FixtureRequest, new_model: Any, corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A model with room for prompts in bytes, and a run with its Stats."""
    changes = {} if request.param == "llama" else GEMMA
    folder = tmp_path_factory.mktemp("tiles-everywhere")
    return new_model(folder / "model", family=request.param, max_position_embeddings=1100, **changes), folder / "run"


@pytest.fixture
def tool(made: tuple[Path, Path], corpus: Path, aatc: Any) -> Callable[..., Any]:
    """A command of this model and run, which must succeed; the plan is made first."""
    model, run = made

    def call(*words: object) -> Any:
        found = aatc(*words, "--run", run)
        assert found.code == 0, found.err
        return found

    if not (run / "plans").is_dir():
        sizes = ("--samples", 4, "--length", 520, "--rows", 64, "--fisher", 4)
        call("collect", "--model", model, "--text", corpus, *sizes)
        call("whiten", "--recipe", "loss-aware-tiles")
        call("allocate", "--recipe", "loss-aware-tiles", "--budget", 1.5)
    return call


@pytest.fixture
def asked(made: tuple[Path, Path], tool: Any) -> tuple[object, ...]:
    return ("--model", made[0], "--recipe", "loss-aware-tiles", "--budget", 1.5, "--json")


def test_text_is_scored(tool: Any, asked: tuple[object, ...], corpus: Path, aatc: Any, made: tuple[Path, Path]) -> None:
    """All but distortion, which has no prediction for tokens at several rates and says so."""
    given = ("--text", corpus, "--length", 400, "--limit", 1, "--first", 300)
    for task in ("kl", "perplexity"):
        [found] = tool("eval", task, *asked, *given).json
        assert found["bits_packed"] == pytest.approx(1.5, abs=0.1)
    refused = aatc("eval", "distortion", *asked, *given, "--run", made[1])
    assert refused.code != 0
    assert "is not predicted" in refused.err


def test_questions_are_answered_from_packed_tiles(tool: Any, asked: tuple[object, ...]) -> None:
    [ruler] = tool("eval", "ruler", *asked, "--context", 1024, "--limit", 1, "--subtask", "niah_single_1").json
    assert (ruler["cache"], ruler["rows"][0]["samples"]) == ("packed", 1)
    assert ruler["rows"][0]["calibration_share"] == 0.0
    [needles] = tool("eval", "needles", *asked, "--context", 1024, "--depth", 50, "--limit", 1).json
    assert (needles["cache"], needles["calibration_share"]) == ("packed", 0.0)


def test_live_bytes_are_those_of_the_law(tool: Any, asked: tuple[object, ...]) -> None:
    [memory] = tool("eval", "memory", *asked, "--context", 400, "--batch", 2).json
    [row] = memory["rows"]
    assert row["bytes_live"] == row["bytes_predicted"]
    [speed] = tool("eval", "speed", *asked, "--context", 300, "--repeats", 1).json
    assert speed["rows"]


@torch.no_grad()
def test_generate_is_the_same_alone_and_in_a_padded_batch(made: tuple[Path, Path], tool: Any) -> None:
    """Two prompts of unequal length, one of which is packed while it is answered."""
    model = load_model(find_model(str(made[0]))).double()
    plan = Plan.open(Run(made[1]).plan("loss-aware-tiles", make_budget(bits=1.5)))
    draw = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 250, (length,), generator=draw) for length in (250, 190)]
    wanted = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 256, "eos_token_id": None}
    with attach(model, plan) as session:
        alone = [
            model.generate(prompt[None], **{session.keyword: session.new_cache()}, **wanted)[0, len(prompt) :]
            for prompt in prompts
        ]
        ids, mask = torch.full((2, 250), 256), torch.zeros(2, 250, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, 250 - len(prompt) :], mask[row, 250 - len(prompt) :] = prompt, 1
        both = model.generate(ids, attention_mask=mask, **{session.keyword: session.new_cache()}, **wanted)[:, 250:]
    for row, tokens in enumerate(alone):
        assert both[row].tolist() == tokens.tolist()
    plain = model.generate(prompts[0][None], **wanted)[0, 250:]
    assert plain.tolist() != alone[0].tolist() or plan.layout.bits_packed < 2
