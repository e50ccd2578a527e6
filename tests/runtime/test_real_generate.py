"""``generate`` on a language model through its packed cache: every way of choosing tokens, every length, batches."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from aatc_cli.config import Window
from aatc_cli.runtime.attach import attach_codecs

pytestmark = pytest.mark.real

WINDOW = Window(sinks=2, recent=4, flush=2)
END = 2
COUNT = 4
OPTIONS = {
    "max_new_tokens": COUNT,
    "min_new_tokens": COUNT,
    "pad_token_id": END,
    "return_dict_in_generate": True,
    "output_logits": True,
}


def prompts_of(real, lengths):
    """Pieces of the text, each from another place."""
    return [real.text[0, 40 * i : 40 * i + length] for i, length in enumerate(lengths)]


def after(prompts, new):
    """Whole sequences without the last token, which no logits were asked for, and the chunks they were fed in."""
    sequences = [torch.cat((prompt, tokens[:-1])) for prompt, tokens in zip(prompts, new, strict=True)]
    return sequences, [[len(prompt), *[1] * (new.shape[1] - 1)] for prompt in prompts]


def last(logits, prompts, count):
    """Of every row the logits [B, count, V] that its new tokens were chosen from."""
    return torch.stack([row[len(p) - 1 : len(p) - 1 + count] for row, p in zip(logits, prompts, strict=True)])


def without_end(logits):
    return logits.index_fill(-1, torch.tensor([END]), -torch.inf)


@pytest.fixture(scope="module")
def batch(real, padded):
    """Three prompts of different lengths, as a left-padded batch."""
    return padded(prompts_of(real, [19, 12, 7]))


@pytest.mark.parametrize(
    "options",
    [{"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_k": 20}, {"do_sample": False, "num_beams": 2}],
    ids=["greedy", "sampling", "beams"],
)
def test_at_sixteen_bits_the_model_chooses_what_it_chooses_with_its_own_cache(real, batch, options):
    """The quantizer's last bit moves logits, and no choice."""
    with attach_codecs(real.model, real.sixteen, WINDOW) as session:
        torch.manual_seed(5)
        ours = real.model.generate(**batch, **OPTIONS, **options, **{session.keyword: session.new_cache()})
    torch.manual_seed(5)
    own = real.model.generate(**batch, **OPTIONS, **options)
    assert torch.equal(ours.sequences, own.sequences)
    logits, expected = torch.stack(ours.logits, 1), torch.stack(own.logits, 1)
    assert 0 < (logits - expected).abs().max() < 1e-3 * expected.abs().max()


def test_prompts_of_every_length_around_every_boundary(real, padded, chunked_logits, assert_rounded):
    """Shorter than the sinks, than the window, at a flush boundary, one over it: each row of one batch as if alone."""
    prompts = prompts_of(real, [1, 2, 3, 5, 6, 7, 8, 9, 25])
    with attach_codecs(real.model, real.low, WINDOW) as session:
        cache = session.new_cache()
        done = real.model.generate(**padded(prompts), **OPTIONS, do_sample=False, **{session.keyword: cache})
        alone = session.new_cache()
        one = real.model.generate(prompts[5][None], **OPTIONS, do_sample=False, **{session.keyword: alone})
        law = session.spec.layout
        lengths = [len(prompt) + COUNT - 1 for prompt in prompts]
        exact = {c: 3 * sum(law.breakdown(n)[c] for n in lengths) for c in ("sinks", "window")}
        # float64 takes four times the bytes of the two that the law counts for what is exact; padding takes none
        assert cache.state.bytes_live() == sum(law.bytes(n) for n in lengths) + sum(exact.values())
    new, logits = done.sequences[:, -COUNT:], torch.stack(done.logits, 1)
    expected = last(chunked_logits(real.model, real.low, WINDOW, *after(prompts, new)), prompts, COUNT)
    assert_rounded(logits, expected)
    assert torch.equal(new, without_end(expected).argmax(-1))
    assert torch.equal(one.sequences[0, -COUNT:], new[5])
    assert_rounded(torch.stack(one.logits, 1)[0], logits[5].double())
    # without compression it would be something else, from the first packed token on and not before
    pair = [prompts[2], prompts[4]]
    exact = chunked_logits(real.model, real.low, Window(sinks=99), *after(pair, new[[2, 4]]))
    moved = (expected[[2, 4]] - last(exact, pair, COUNT)).abs().amax(-1) > 1e-3
    assert moved.tolist() == [[n + t > WINDOW.sinks + WINDOW.recent and t > 0 for t in range(COUNT)] for n in (3, 6)]


def test_a_seed_draws_from_what_the_oracle_computes(real, batch, padded, chunked_logits, assert_rounded):
    prompts = prompts_of(real, [19, 12, 7])
    with attach_codecs(real.model, real.low, WINDOW) as session:
        torch.manual_seed(7)
        done = real.model.generate(
            **batch, **OPTIONS, do_sample=True, temperature=1.3, top_k=0, **{session.keyword: session.new_cache()}
        )
    new = done.sequences[:, -COUNT:]
    expected = last(chunked_logits(real.model, real.low, WINDOW, *after(prompts, new)), prompts, COUNT)
    assert_rounded(torch.stack(done.logits, 1), expected)
    torch.manual_seed(7)
    for step in range(COUNT):
        chances = (without_end(expected[:, step]).float() / 1.3).softmax(-1)
        assert torch.equal(torch.multinomial(chances, 1)[:, 0], new[:, step])
    assert not torch.equal(new, without_end(expected).argmax(-1))


def test_beams_score_what_the_oracle_scores(real, chunked_logits):
    prompt = prompts_of(real, [14])[0]
    with attach_codecs(real.model, real.low, WINDOW) as session:
        done = real.model.generate(
            prompt[None],
            **OPTIONS,
            do_sample=False,
            num_beams=3,
            num_return_sequences=3,
            length_penalty=0.0,
            output_scores=True,
            **{session.keyword: session.new_cache()},
        )
    new = done.sequences[:, -COUNT:]
    expected = last(chunked_logits(real.model, real.low, WINDOW, *after([prompt] * 3, new)), [prompt] * 3, COUNT)
    total = expected.log_softmax(-1).gather(2, new[..., None]).sum((1, 2))
    torch.testing.assert_close(done.sequences_scores, total.float(), rtol=1e-5, atol=1e-4)
    # beams crossed: a sequence went on from another one's place
    assert (done.beam_indices[:, 2:COUNT] != done.beam_indices[:, 1 : COUNT - 1]).any()
    assert len({tuple(row.tolist()) for row in new}) == 3


def early_layers(model, count):
    """An assistant: the first layers of the model, with its embeddings and head."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = count
    assistant = AutoModelForCausalLM.from_config(config).to(model.dtype).eval()
    assistant.load_state_dict(model.state_dict(), strict=False)
    return assistant


@pytest.mark.parametrize("kind", ["prompt-lookup", pytest.param("assistant", marks=pytest.mark.slow)])
def test_assisted_decoding_equals_greedy(real, chunked_logits, kind):
    """Candidates that are wrong leave no trace: every token is the oracle's choice, step by step."""
    fed = []
    if kind == "assistant":
        prompt, count = prompts_of(real, [30])[0], 6
        options = {"assistant_model": early_layers(real.model, 6)}
    else:
        # what has been said before is offered as a candidate, right at first and wrong at last
        phrase = real.tokenizer("one two three four, ", add_special_tokens=False, return_tensors="pt")["input_ids"][0]
        prompt, count = phrase.repeat(4), 14
        options = {"prompt_lookup_num_tokens": 4}
    watch = real.model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        with attach_codecs(real.model, real.low, WINDOW) as session:
            cache = session.new_cache()
            done = real.model.generate(
                prompt[None],
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=END,
                **options,
                **{session.keyword: cache},
            )
    finally:
        watch.remove()
    new = done[:, len(prompt) :]
    assert new.shape == (1, count)
    expected = last(chunked_logits(real.model, real.low, WINDOW, *after([prompt], new)), [prompt], count)
    assert torch.equal(new, without_end(expected).argmax(-1))
    assert cache.state.bytes_live() == cache.state.bytes_predicted()
    # one token of every pass is the model's own; candidates were refused, and of the look-up's some were taken
    assert sum(fed) > len(prompt) + count - 1
    assert len(fed) < count or kind == "assistant"
    assert cache.get_seq_length() in (len(prompt) + count - 1, len(prompt) + count)
