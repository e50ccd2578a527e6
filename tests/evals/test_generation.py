"""Batched greedy generation with shared prompts, against each prompt on its own under transformers' generate."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from aatc_cli.config import Window
from aatc_cli.evals.answers.generation import Batch, generate
from aatc_cli.models.compressed import cache_keyword
from aatc_cli.models.loading import find_model, load_model
from aatc_cli.runtime.attach import attach_codecs, plain, prepare_codecs
from aatc_cli.runtime.prefill import shared_prefill

WINDOW = Window(sinks=2, recent=8, flush=4)
LENGTHS = (30, 22, 30, 9)


@pytest.fixture
def model(tiny_llama):
    # float64: in float32 a code on a rounding tie may fall either way, which is a step and not rounding
    return load_model(find_model(str(tiny_llama))).double()


@pytest.fixture
def prompts():
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.fixture
def contenders(model, codecs):
    coarse, fine = ([*codecs(4, 32, 2, bits)] for bits in (1, 4))
    sessions = [
        plain(model),
        replace(prepare_codecs(model, coarse, WINDOW), name="coarse"),
        replace(prepare_codecs(model, fine, WINDOW), name="fine"),
        replace(prepare_codecs(model, coarse, WINDOW, "simulated"), name="simulated"),
    ]
    return sessions, {"coarse": coarse, "fine": fine, "simulated": coarse}


def alone(model, codecs, prompt, count):
    """What generate gives for one prompt with no padding."""
    ids = torch.tensor([prompt])
    # with the mask given: generate takes a token that equals the padding token for padding otherwise
    options = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": count,
        "min_new_tokens": count,
        "do_sample": False,
        "pad_token_id": 0,
    }
    if codecs is None:
        return model.generate(ids, **options)[0, len(prompt) :].tolist()
    with attach_codecs(model, codecs, WINDOW) as session:
        done = model.generate(ids, **options, **{session.keyword: session.new_cache()})
    return done[0, len(prompt) :].tolist()


def run(model, contenders, prompts, count, ends=frozenset(), finished=lambda row, tokens: False):
    batch = Batch.of(prompts, torch.device("cpu"))
    return generate(
        model,
        cache_keyword(model),
        batch,
        contenders,
        lambda b: shared_prefill(contenders, b.ids, b.mask, b.positions),
        count,
        ends,
        finished,
    )


def test_every_prompt_goes_on_as_it_would_alone(model, contenders, prompts):
    methods, codecs = contenders
    found = run(model, methods, prompts, 16)
    for method, texts in zip(methods, found, strict=True):
        assert texts == [alone(model, codecs.get(method.name), prompt, 16) for prompt in prompts], method.name
    # the three caches differ, so that one cannot stand in for another
    assert len({str(texts) for texts in found[:3]}) == 3
    assert found[1] == found[3]


@torch.no_grad()
def test_one_pass_fills_every_cache_as_its_own_would(model, contenders, prompts):
    methods, codecs = contenders
    batch = Batch.of(prompts, torch.device("cpu"))
    filled = shared_prefill(methods[:3], batch.ids, batch.mask, batch.positions)
    keyword = cache_keyword(model)
    for method, (logits, cache) in zip(methods[1:3], filled[1:], strict=True):
        with attach_codecs(model, codecs[method.name], WINDOW) as session:
            own = session.new_cache()
            out = model(batch.ids, attention_mask=batch.mask, position_ids=batch.positions, **{keyword: own})
        assert torch.equal(logits, out.logits[:, -1])
        left, right = cache.state.tensors(), own.state.tensors()
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)
        assert cache.state.bytes_live() == cache.state.bytes_predicted()
    own_cache = shared_prefill(methods[:1], batch.ids, batch.mask, batch.positions)[0]
    torch.testing.assert_close(filled[0][0], own_cache[0], rtol=1e-9, atol=1e-9)
    for shared, own in zip(filled[0][1].layers, own_cache[1].layers, strict=True):
        real = batch.mask.bool()
        for name in ("keys", "values"):
            torch.testing.assert_close(
                getattr(shared, name).transpose(1, 2)[real],
                getattr(own, name).transpose(1, 2)[real],
                rtol=1e-9,
                atol=1e-9,
            )


def test_texts_end_apart_and_leave_the_others_alone(model, contenders, prompts):
    methods, _ = contenders
    whole = run(model, methods, prompts, 16)
    # row 0 ends before its sixth token, row 2 says itself that it has enough; the end token may end others earlier
    end = whole[0][0][5]
    short = run(model, methods, prompts, 16, frozenset([end]), lambda row, tokens: row == 2 and len(tokens) == 3)
    for texts, parts in zip(whole, short, strict=True):
        for row, (text, part) in enumerate(zip(texts, parts, strict=True)):
            expected = text[: text.index(end)] if end in text else text
            assert part == (expected[:3] if row == 2 else expected)
