"""The simulated cache under the model against the one-pass evaluator, token by token, for every kind of codec."""

from __future__ import annotations

import pytest
import torch

from aatc_cli.config import Window
from aatc_cli.core import SIDES
from aatc_cli.core.block_codec import BlockCodec
from aatc_cli.core.grouped import GroupedMinMax
from aatc_cli.core.joint import JointCodec
from aatc_cli.core.linear import LinearCodec
from aatc_cli.core.precision_blocks import Block
from aatc_cli.core.signposts import SignpostCodec
from aatc_cli.errors import AatcError
from aatc_cli.evals.forced.chunked import chunked_logits
from aatc_cli.evals.forced.passes import forced_logits
from aatc_cli.evals.forced.teacher_forced import Method, method_logits
from aatc_cli.models.adapter import attention_sites
from aatc_cli.models.attention import scored_logits
from aatc_cli.models.loading import find_model, load_model
from aatc_cli.runtime.attach import attach_codecs

WINDOW = Window(sinks=3, recent=16, flush=8)
CHANNELS, LAYERS, LENGTH = 32, 4, 61


@pytest.fixture(scope="module", params=["tiny_llama", "tiny_qwen2"])
def model(request):
    return load_model(find_model(str(request.getfixturevalue(request.param)))).double()


def tokens_of(length: int, batch: int = 1) -> torch.Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(1))


def rotation(size: int, seed: int) -> torch.Tensor:
    noise = torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.linalg.qr(noise)[0]


def along_tokens():
    pair = {
        "k": GroupedMinMax(torch.full((CHANNELS,), 2), 8, "channel"),
        "v": GroupedMinMax(torch.full((CHANNELS,), 2), 8),
    }
    return [pair] * LAYERS


def low_rank():
    found = []
    for layer in range(LAYERS):
        basis = rotation(CHANNELS, layer)[:, :24]
        inner = GroupedMinMax(torch.full((24,), 3), 24)
        codec = LinearCodec(basis[None], basis.T[None].contiguous(), inner, torch.full((CHANNELS,), 0.1))
        found.append(dict.fromkeys(SIDES, codec))
    return found


def with_outliers():
    points = torch.tensor([-0.9, -0.3, 0.2, 0.8], dtype=torch.float64)
    ranges = torch.full((CHANNELS,), -1.5), torch.full((CHANNELS,), 2.0)
    return [{"k": SignpostCodec(points, 0.03, *ranges, block=8), "v": SignpostCodec(points, 0.03)}] * LAYERS


def over_layers():
    basis = rotation(CHANNELS * LAYERS, 5)[:, :80]
    blocks = BlockCodec((Block(0, 16, 4), Block(16, 64, 2)))
    joint = {side: JointCodec(basis, torch.linspace(-1, 1, CHANNELS * LAYERS), blocks) for side in SIDES}
    return [joint] * LAYERS


CASES = [(along_tokens, "post-rope"), (along_tokens, "pre-rope"), (low_rank, "pre-rope"), (with_outliers, "pre-rope")]


@torch.no_grad()
def decoded(model, codecs, coordinates, tokens):
    """Logits of every token fed on its own."""
    rows = []
    with attach_codecs(model, codecs, WINDOW, "simulated", coordinates) as session:
        cache = session.new_cache()
        for place in range(tokens.shape[1]):
            step = model(tokens[:, place : place + 1], use_cache=True, **{session.keyword: cache})
            rows.append(step.logits[:, -1])
    return torch.stack(rows, 1)


def close(got, expected):
    return float((got - expected).abs().max() / expected.abs().max()) < 1e-11


@pytest.mark.parametrize(("make", "coordinates"), CASES, ids=lambda case: getattr(case, "__name__", case))
def test_token_by_token_is_the_one_pass_evaluator(model, make, coordinates):
    codecs, tokens = make(), tokens_of(LENGTH)
    expected = method_logits(model, attention_sites(model), Method("t", codecs, WINDOW, coordinates), tokens, 0)
    assert close(decoded(model, codecs, coordinates, tokens)[0, :-1], expected)
    # two or three bits must be visible, or nothing was replaced
    plain = scored_logits(model, tokens, 0)
    assert (expected - plain).abs().max() > 1e-2 * plain.abs().max()
    assert close(expected[: WINDOW.sinks + WINDOW.recent], plain[: WINDOW.sinks + WINDOW.recent])


@pytest.mark.parametrize("prompt", [1, 20, 41, 60])
@pytest.mark.parametrize(("make", "coordinates"), [*CASES, (over_layers, "pre-rope")])
@torch.no_grad()
def test_behind_a_prompt_it_is_the_evaluator(model, make, coordinates, prompt):
    codecs, tokens = make(), tokens_of(LENGTH)
    places = torch.arange(prompt - 1, LENGTH)
    method = Method("t", codecs, WINDOW, coordinates)
    expected = forced_logits(model, attention_sites(model), method, tokens, places, prompt)
    with attach_codecs(model, codecs, WINDOW, "simulated", coordinates) as session:
        cache = session.new_cache()
        rows = [model(tokens[:, :prompt], use_cache=True, **{session.keyword: cache}).logits[:, -1]]
        for place in range(prompt, LENGTH):
            step = model(tokens[:, place : place + 1], use_cache=True, **{session.keyword: cache})
            rows.append(step.logits[:, -1])
    assert close(torch.stack(rows, 1), expected)


def test_layers_together_token_by_token(model):
    codecs, tokens = over_layers(), tokens_of(LENGTH)
    method = Method("t", codecs, WINDOW, "pre-rope")
    expected = chunked_logits(model, attention_sites(model), method, tokens, 0)
    assert close(decoded(model, codecs, "pre-rope", tokens)[0, :-1], expected)
    assert torch.equal(chunked_logits(model, attention_sites(model), method, tokens, 30), expected[30:])
    plain = scored_logits(model, tokens, 0)
    assert (expected - plain).abs().max() > 1e-2 * plain.abs().max()


@pytest.mark.parametrize(("make", "coordinates"), CASES, ids=lambda case: getattr(case, "__name__", case))
def test_chunks_are_one_pass_for_codecs_of_one_layer(model, make, coordinates):
    method = Method("t", make(), WINDOW, coordinates)
    tokens = tokens_of(LENGTH)
    expected = method_logits(model, attention_sites(model), method, tokens, 0)
    assert close(chunked_logits(model, attention_sites(model), method, tokens, 0), expected)


def test_keys_along_channels_are_those_of_the_rotated_cache(model):
    """Every packed key of a post-RoPE cache is a level of its channel's group in the model's own cache."""
    tokens, codecs = tokens_of(LENGTH), along_tokens()
    with attach_codecs(model, codecs, WINDOW, "simulated", "post-rope") as session, torch.no_grad():
        cache = session.new_cache()
        model(tokens, use_cache=True, **{session.keyword: cache})
        model(tokens[:, :1], use_cache=True, **{session.keyword: cache})
        store = cache.state.groups[0].stores[2]
        packed = store.rows([])[0][0, WINDOW.sinks : WINDOW.sinks + store.packed]
        exact = store.keys[0, WINDOW.sinks : WINDOW.sinks + store.packed]
    assert store.packed % 8 == 0
    assert store.packed >= 40
    for channel in range(CHANNELS):
        for start in range(0, store.packed, 8):
            assert len(set(packed[start : start + 8, channel].tolist())) <= 4
            spread = exact[start : start + 8, channel].max() - exact[start : start + 8, channel].min()
            assert (packed - exact)[start : start + 8, channel].abs().max() <= 0.51 * spread / 3


@pytest.mark.parametrize("make", [along_tokens, over_layers])
def test_generation_in_batches_is_that_of_each_prompt(model, make):
    prompts = [tokens_of(40)[0], tokens_of(33)[0]]
    padded = torch.zeros(2, 40, dtype=torch.int64)
    mask = torch.zeros(2, 40, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        padded[row, 40 - len(prompt) :] = prompt
        mask[row, 40 - len(prompt) :] = 1
    with attach_codecs(model, make(), WINDOW, "simulated", "pre-rope") as session:

        def generate(ids, attention):
            return model.generate(
                ids,
                attention_mask=attention,
                max_new_tokens=12,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
                **{session.keyword: session.new_cache()},
            )

        together = generate(padded, mask)[:, 40:]
        for row, prompt in enumerate(prompts):
            alone = generate(prompt[None], torch.ones(1, len(prompt), dtype=torch.int64))[0, len(prompt) :]
            assert together[row].tolist() == alone.tolist()


def test_steps_back_and_beams(model):
    tokens = tokens_of(50)
    with attach_codecs(model, along_tokens(), WINDOW, "simulated", "pre-rope") as session, torch.no_grad():
        keyword = session.keyword
        one, other = session.new_cache(), session.new_cache()
        for cache in (one, other):
            model(tokens[:, :40], use_cache=True, **{keyword: cache})
        model(tokens[:, 40:41], use_cache=True, **{keyword: one})
        one.crop(-1)
        results = [model(tokens[:, 40:41], use_cache=True, **{keyword: cache}).logits for cache in (one, other)]
        assert torch.equal(*results)
        with pytest.raises(AatcError, match="still exact"):
            one.crop(-30)
        one.batch_repeat_interleave(2)
        twice = model(tokens[:, 41:42].expand(2, 1), use_cache=True, **{keyword: one}).logits
        assert torch.allclose(twice[0], twice[1])
        with pytest.raises(AatcError, match="holds full vectors"):
            one.state.bytes_live()


def test_what_it_refuses(model):
    few = along_tokens()[:3]
    with pytest.raises(AatcError, match="3 layers of codecs"), attach_codecs(model, few, WINDOW, "simulated"):
        pass
    with (
        pytest.raises(AatcError, match="GroupedMinMax has no codes to pack"),
        attach_codecs(model, along_tokens(), WINDOW),
    ):
        pass
