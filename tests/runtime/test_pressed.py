"""The pressed cache under the model against the one-pass evaluator, and the evaluator against masks by hand."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from aatc_cli.config import Window
from aatc_cli.core import SIDES
from aatc_cli.core.attend import attention_weights, weighted_values
from aatc_cli.core.codec import CastCodec
from aatc_cli.core.grouped import GroupedMinMax
from aatc_cli.core.layout import packed_tokens
from aatc_cli.core.press.choice import kept_count
from aatc_cli.core.press.state import Pressed
from aatc_cli.errors import AatcError
from aatc_cli.evals.forced.passes import forced_logits
from aatc_cli.evals.forced.teacher_forced import Method
from aatc_cli.methods.registry import PRESSES, press_of
from aatc_cli.models.adapter import attention_layers, attention_sites, geometry_of
from aatc_cli.models.attention import attention_override, scored_logits
from aatc_cli.models.loading import find_model, load_model
from aatc_cli.runtime.forms import codecs_spec
from aatc_cli.runtime.prefill import shared_prefill
from aatc_cli.runtime.pressed.form import pressed_spec
from aatc_cli.runtime.second_pass import Reader
from aatc_cli.runtime.session import Session

pytestmark = pytest.mark.usefixtures("float64")
WINDOW = Window(sinks=3, recent=16, flush=8)
LENGTH, PROMPT, SHARE = 90, 61, 0.3
NAMES = [press.name for press in PRESSES if not press.nothing and not press.says_classes]
FLUSHED = [name for name in NAMES if press_of(name).acts == "flush"]


@pytest.fixture(scope="module")
def tiny_gemma(new_model, tmp_path_factory):
    """Sliding layers beside full ones, key norms, one kv head."""
    layers = ["sliding_attention", "full_attention"] * 2
    more = {"num_key_value_heads": 1, "layer_types": layers, "sliding_window": 24}
    return new_model(tmp_path_factory.mktemp("gemma") / "tiny", family="gemma3_text", **more)


@pytest.fixture(scope="module", params=["tiny_llama", "tiny_qwen2", "tiny_gemma"])
def model(request):
    return load_model(find_model(str(request.getfixturevalue(request.param)))).double()


def tokens_of(batch: int = 1, length: int = LENGTH, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(seed))


def encode(text: str) -> list[int]:
    return list(text.encode())


def coded(model, bits: int = 4):
    geometry = geometry_of(model.config)
    pair = dict.fromkeys(SIDES, GroupedMinMax(torch.full((geometry.channels,), bits), 8))
    return [pair] * geometry.layers


def exact(model):
    return [dict.fromkeys(SIDES, CastCodec(torch.float64))] * len(attention_sites(model))


def session_of(model, codecs, name: str, share: float = SHARE, coordinates="pre-rope") -> Session:
    layers = attention_layers(model)
    spec = codecs_spec(model, layers, codecs, WINDOW, "simulated", coordinates)
    spec = pressed_spec(model, layers, spec, Pressed(press_of(name), share), "simulated")
    return Session.of(name, model, layers, spec)


def method_of(codecs, name: str, share: float = SHARE, coordinates="pre-rope") -> Method:
    return Method(name, codecs, WINDOW, coordinates, Pressed(press_of(name), share), Reader(encode))


@torch.no_grad()
def decoded(session, tokens, prompt: int) -> torch.Tensor:
    """Logits of the last prompt token and of every one behind it, each fed by itself."""
    ids, mask = tokens[:, :prompt], torch.ones(tokens.shape[0], prompt, dtype=torch.long)
    [(first, cache)] = shared_prefill([session], ids, mask, mask.cumsum(1) - 1, encode)
    rows = [first]
    with session.attached():
        for place in range(prompt, tokens.shape[1]):
            step = session.model(tokens[:, place : place + 1], use_cache=True, **{session.keyword: cache})
            rows.append(step.logits[:, -1])
    return torch.stack(rows, 1)


def close(got, expected) -> bool:
    return float((got - expected).abs().max() / expected.abs().max()) < 1e-9


@pytest.mark.parametrize("prompt", [1, PROMPT])
@pytest.mark.parametrize("name", NAMES)
def test_token_by_token_is_the_one_pass_evaluator(model, name, prompt):
    """Two sequences; behind a prompt, and for presses that act at every flush from the first token on."""
    codecs, tokens = coded(model), tokens_of(2)
    places = torch.arange(prompt - 1, LENGTH)
    expected = forced_logits(model, attention_sites(model), method_of(codecs, name), tokens, places, prompt)
    assert close(decoded(session_of(model, codecs, name), tokens, prompt), expected)
    whole = Method("t", codecs, WINDOW, "pre-rope")
    plain = forced_logits(model, attention_sites(model), whole, tokens, places, prompt)
    # the press must be seen, but where none acts
    acts = prompt == PROMPT or name in FLUSHED
    assert close(plain, expected) is not acts


@pytest.mark.parametrize("name", NAMES)
def test_a_share_of_one_is_no_press(model, name):
    tokens, places = tokens_of(), torch.arange(PROMPT, LENGTH)
    method, plain = method_of(coded(model), name, 1.0), Method("t", coded(model), WINDOW, "pre-rope")
    found, expected = (forced_logits(model, attention_sites(model), m, tokens, places, PROMPT) for m in (method, plain))
    assert close(found, expected)


@pytest.mark.parametrize("name", ["streaming-llm", "snapkv", "kvzip"])
def test_eviction_alone_keeps_vectors_as_the_model_has_them(model, name):
    """Keys after rotation, without a code: what is left is exact, and all that is evicted is masked."""
    tokens, places, left = tokens_of(), torch.arange(PROMPT, LENGTH), {}

    def keep(layer, kept, packed):
        left[layer] = kept

    method = method_of(exact(model), name, coordinates="post-rope")
    found = forced_logits(model, attention_sites(model), method, tokens, places, PROMPT, keep)
    assert close(found, masked(model, tokens, left, latest=name == "streaming-llm")[:, PROMPT:])
    session = session_of(model, exact(model), name, coordinates="post-rope")
    assert close(decoded(session, tokens, PROMPT)[:, 1:], found)
    if name == "streaming-llm":
        packed = packed_tokens(LENGTH, WINDOW)
        span = next(iter(left.values()))[0, 0, 3 : 3 + packed]
        assert span.nonzero().flatten().tolist() == list(range(packed - kept_count(packed, SHARE), packed))


@torch.no_grad()
def masked(model, tokens, left, *, latest: bool) -> torch.Tensor:
    """Logits of the model's own attention over masks by hand, query by query.

    What a press left at the end of a prompt stays so; the latest tokens are others at every flush.
    """

    def attend(inputs):
        kept, length = left[inputs.site.layer], inputs.query.shape[2]
        allowed = torch.ones(1, kept.shape[1], 1, length, length, dtype=torch.bool).tril()
        for query in range(PROMPT, length):
            packed = packed_tokens(query + 1, WINDOW)
            oldest = 3 + packed - kept_count(packed, SHARE)
            for head, token in itertools.product(range(kept.shape[1]), range(3, 3 + packed)):
                allowed[0, head, 0, query, token] = token >= oldest if latest else bool(kept[0, head, token])
        return weighted_values(attention_weights(inputs.query, inputs.key, allowed, inputs.scaling), inputs.value)

    with attention_override(model, attention_sites(model), attend):
        return model(input_ids=tokens, use_cache=False).logits


@pytest.mark.parametrize("name", ["h2o", "snapkv", "critical-kv", "kvzip"])
def test_generate_in_ragged_batches_is_generate_alone(model, name):
    """Left-padded prompts of two lengths: each row as if it were by itself."""
    prompts = [tokens_of(1, 70, seed=3)[0], tokens_of(1, 52, seed=4)[0]]
    ids, mask = torch.zeros(2, 70, dtype=torch.long), torch.zeros(2, 70, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, 70 - len(prompt) :], mask[row, 70 - len(prompt) :] = prompt, 1
    session = session_of(model, coded(model), name)

    def run(ids, mask, steps: int = 12):
        [(logits, cache)] = shared_prefill([session], ids, mask, (mask.cumsum(1) - 1).clamp_min(0), encode)
        rows = [logits]
        with session.attached(), torch.no_grad():
            for _ in range(steps):
                mask = torch.cat((mask, mask.new_ones(len(mask), 1)), 1)
                step = session.model(
                    rows[-1].argmax(-1)[:, None],
                    attention_mask=mask,
                    position_ids=mask.sum(1, keepdim=True) - 1,
                    use_cache=True,
                    **{session.keyword: cache},
                )
                rows.append(step.logits[:, -1])
        return torch.stack(rows, 1)

    together = run(ids, mask)
    for row, prompt in enumerate(prompts):
        alone = run(prompt[None], torch.ones(1, len(prompt), dtype=torch.long))
        assert close(together[row], alone[0])


def test_transformers_own_generate_with_beams(model):
    session = session_of(model, coded(model), "h2o")
    ids = tokens_of(1, 60)
    given = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    with session.attached():
        greedy = model.generate(ids, **given, **{session.keyword: session.new_cache()})
        beams = model.generate(ids, **given, num_beams=3, **{session.keyword: session.new_cache()})
    assert greedy.shape[1] > 60
    assert beams.shape[1] > 60


@pytest.mark.parametrize("name", ["snapkv", "streaming-llm"])
def test_steps_are_taken_back(model, name):
    """Prompt lookup drafts tokens with the prompt itself and takes them back; greedy answers are those without it."""
    session, ids = session_of(model, coded(model), name), tokens_of(1, 60)
    ids[:, 30:] = ids[:, :30]
    given = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    with session.attached():
        plain, drafted = (
            model.generate(ids, **given, **more, **{session.keyword: session.new_cache()})
            for more in ({}, {"prompt_lookup_num_tokens": 3})
        )
    assert torch.equal(plain, drafted)


def test_a_copy_goes_on_by_itself(model):
    session, tokens = session_of(model, coded(model), "caote"), tokens_of(1, 80)
    with session.attached(), torch.no_grad():
        cache = session.new_cache()
        model(tokens[:, :60], use_cache=True, **{session.keyword: cache})
        other = copy.deepcopy(cache)
        for place in range(60, 80):
            first = model(tokens[:, place : place + 1], use_cache=True, **{session.keyword: cache}).logits
        for place in range(60, 80):
            second = model(tokens[:, place : place + 1], use_cache=True, **{session.keyword: other}).logits
    assert torch.equal(first, second)


def test_what_is_refused(model):
    session = session_of(model, coded(model), "kvzip")
    with session.attached(), torch.no_grad(), pytest.raises(AatcError, match="reads a prompt a second time"):
        model(tokens_of(), use_cache=True, **{session.keyword: session.new_cache()})
    layers = attention_layers(model)
    spec = codecs_spec(model, layers, coded(model), WINDOW, "simulated", "pre-rope")
    for kind in ("packed", "fused"):
        with pytest.raises(AatcError, match=f"other tokens in every kv head, which the {kind} cache"):
            pressed_spec(model, layers, spec, Pressed(press_of("h2o"), 0.5), kind)
    bare = Method("t", coded(model), WINDOW, "pre-rope", Pressed(press_of("kvzip"), 0.5))
    with pytest.raises(AatcError, match="needs a tokenizer"):
        forced_logits(model, attention_sites(model), bare, tokens_of(), torch.arange(70, 80), 61)
    session = session_of(model, coded(model), "vatp")
    with session.attached(), torch.no_grad():
        cache = session.new_cache()
        cache.activate_past_recording()
        with pytest.raises(AatcError, match="sums attention"):
            model(tokens_of(), use_cache=True, **{session.keyword: cache})
    assert scored_logits(model, tokens_of(), 80).shape[0] == 9
