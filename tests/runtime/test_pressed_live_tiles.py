"""Tiles behind a press under the model, against the one-pass evaluator (tests/evals/test_pressed_tiles.py)."""

from __future__ import annotations

import pytest
import torch

from aatc_cli.core.layout import packed_tokens
from aatc_cli.core.press.priced import Levels
from aatc_cli.core.press.state import Pressed
from aatc_cli.errors import AatcError
from aatc_cli.evals.forced.passes import forced_logits
from aatc_cli.evals.forced.teacher_forced import Method
from aatc_cli.methods.registry import press_of
from aatc_cli.models.adapter import attention_layers, attention_sites
from aatc_cli.models.loading import find_model, load_model
from aatc_cli.runtime.prefill import shared_prefill
from aatc_cli.runtime.pressed.form import pressed_spec
from aatc_cli.runtime.second_pass import Reader
from aatc_cli.runtime.session import Session
from aatc_cli.runtime.tiles.form import tiles_spec
from tests.evals.test_pressed_tiles import PROMPT, SHARE, WINDOW, codecs_of
from tests.runtime.test_pressed import close, decoded, encode, tokens_of

pytestmark = pytest.mark.usefixtures("float64")
# 64 tokens are packed behind the prompt, and two tiles more before the end
LENGTH = 125
NAMES = ["snapkv", "critical-kv", "kvzip", "priced", "priced-own"]


@pytest.fixture(scope="module")
def model(tiny_llama):
    return load_model(find_model(str(tiny_llama))).double()


def pressed_by(name: str) -> Pressed:
    rule = press_of(name)
    if not rule.says_classes:
        return Pressed(rule, SHARE)
    # four layers of two heads: what a class of 1, 3 and 6 bits takes and loses, and what eviction loses
    levels = Levels(
        torch.tensor([4.0, 12.0, 24.0]).expand(4, 2, 3), torch.tensor([0.4, 0.05, 0.001, 1.0]).expand(4, 2, 4), 40.0
    )
    return Pressed(rule, SHARE, (), levels)


def session_of(model, name: str, bits=(1, 3, 6)) -> Session:
    layers = attention_layers(model)
    spec = tiles_spec(model, layers, codecs_of(bits), WINDOW, None, "simulated")
    return Session.of(name, model, layers, pressed_spec(model, layers, spec, pressed_by(name), "simulated"))


@pytest.mark.parametrize(("prompt", "bits"), [(PROMPT, (1, 3, 6)), (PROMPT, (0, 2, 5)), (20, (1, 3, 6))])
@pytest.mark.parametrize("name", NAMES)
def test_token_by_token_is_the_one_pass_evaluator(model, name, prompt, bits):
    """Two sequences; classes of no bits; a prompt that is shorter than the window, behind which nothing is pressed."""
    tokens, places = tokens_of(2, LENGTH), torch.arange(prompt - 1, LENGTH)
    method = Method(name, codecs_of(bits), WINDOW, "pre-rope", pressed_by(name), Reader(encode))
    expected = forced_logits(model, attention_sites(model), method, tokens, places, prompt)
    assert close(decoded(session_of(model, name, bits), tokens, prompt), expected)
    whole = Method("whole", codecs_of(bits), WINDOW, "pre-rope")
    plain = forced_logits(model, attention_sites(model), whole, tokens, places, prompt)
    assert close(plain, expected) is (prompt != PROMPT)
    assert packed_tokens(PROMPT, WINDOW) < packed_tokens(LENGTH, WINDOW) - 16


@pytest.mark.parametrize("name", ["snapkv", "priced"])
def test_ragged_batches_are_rows_alone(model, name):
    """Left-padded prompts of two lengths: each row as if it were by itself."""
    prompts = [tokens_of(1, 90, seed=3)[0], tokens_of(1, 71, seed=4)[0]]
    ids, mask = torch.zeros(2, 90, dtype=torch.long), torch.zeros(2, 90, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, 90 - len(prompt) :], mask[row, 90 - len(prompt) :] = prompt, 1
    session = session_of(model, name)

    def run(ids, mask, steps: int = 20):
        [(logits, cache)] = shared_prefill([session], ids, mask, (mask.cumsum(1) - 1).clamp_min(0), encode)
        rows = [logits]
        with session.attached(), torch.no_grad():
            for _ in range(steps):
                mask = torch.cat((mask, mask.new_ones(len(mask), 1)), 1)
                given = {"attention_mask": mask, "position_ids": mask.sum(1, keepdim=True) - 1, "use_cache": True}
                step = session.model(rows[-1].argmax(-1)[:, None], **given, **{session.keyword: cache})
                rows.append(step.logits[:, -1])
        return torch.stack(rows, 1)

    together = run(ids, mask)
    for row, prompt in enumerate(prompts):
        assert close(together[row], run(prompt[None], torch.ones(1, len(prompt), dtype=torch.long))[0])


def test_steps_are_taken_back(model):
    """Prompt lookup drafts tokens and takes them back; greedy answers are those without it."""
    session, ids = session_of(model, "snapkv"), tokens_of(1, 90)
    ids[:, 45:] = ids[:, :45]
    given = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    with session.attached():
        plain = session.model.generate(ids, **given, **{session.keyword: session.new_cache()})
        drafted = session.model.generate(
            ids, **given, prompt_lookup_num_tokens=3, **{session.keyword: session.new_cache()}
        )
    assert torch.equal(plain, drafted)


def test_what_is_refused(model):
    layers = attention_layers(model)
    spec = tiles_spec(model, layers, codecs_of((1, 3, 6)), WINDOW, None, "simulated")
    with pytest.raises(AatcError, match="which the packed cache does not hold"):
        pressed_spec(model, layers, spec, pressed_by("snapkv"), "packed")
    session = session_of(model, "priced")
    with session.attached(), torch.no_grad(), pytest.raises(AatcError, match="reads a prompt a second time"):
        model(tokens_of(2, LENGTH), use_cache=True, **{session.keyword: session.new_cache()})
