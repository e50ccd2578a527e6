"""The life of one packed cache on a language model: chat turns, shared prefixes, chunks, steps back, disk."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import GenerationConfig

from aatc_cli.config import Window
from aatc_cli.errors import AatcError, ArtifactError
from aatc_cli.runtime.attach import attach_codecs, prepare_codecs
from aatc_cli.runtime.cache_file import load_cache, save_cache

pytestmark = pytest.mark.real

WINDOW = Window(sinks=4, recent=8, flush=4)
END = 2


def generate(real, session, cache, ids, count, **options):
    """New tokens [count] after ids [T], greedy, and the logits [count, V] they were taken from."""
    done = real.model.generate(
        ids[None],
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        pad_token_id=END,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
        **{session.keyword: cache},
    )
    return done.sequences[0, len(ids) :], torch.cat(done.logits)


def same(one, other):
    left, right = one.state.tensors(), other.state.tensors()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def tokens(real, text):
    return real.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"][0]


def test_turns_of_a_chat_on_one_cache(real, chunked_logits, assert_rounded):
    """Every turn feeds only what is new, the template's own tokens included; at 16 bits it says what the model says."""
    for codecs in (real.low, real.sixteen):
        messages, chunks, turns = [], [], []
        said, ids = "", torch.empty(0, dtype=torch.long)
        with attach_codecs(real.model, codecs, WINDOW) as session:
            cache = session.new_cache()
            for question in ("Name three colours.", "And a fourth one?"):
                messages.append({"role": "user", "content": question})
                text = real.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
                assert text.startswith(said)
                # the answer stays as it was generated: only what the template puts behind it is made into tokens
                ids = torch.cat((ids, tokens(real, text[len(said) :])))
                chunks += [len(ids) - cache.get_seq_length(), 1, 1, 1]
                new, logits = generate(real, session, cache, ids, 4)
                turns.append((len(ids) - 1, logits))
                ids = torch.cat((ids, new))
                messages.append({"role": "assistant", "content": real.tokenizer.decode(new)})
                said = text + messages[-1]["content"]
            assert cache.get_seq_length() == len(ids) - 1
        expected = chunked_logits(real.model, codecs, WINDOW, [ids[:-1]], [chunks])[0]
        for first, logits in turns:
            assert_rounded(logits, expected[first : first + 4])
        plain = real.model(ids[None, :-1], use_cache=False).logits[0].detach()
        near = (plain - expected).abs().max() < 1e-3 * plain.abs().max()
        assert near == (codecs is real.sixteen)
        assert not near or torch.equal(plain[-4:].argmax(-1), ids[-4:])


def test_a_prefix_is_shared_by_two_continuations(real, chunked_logits, assert_rounded):
    prefix, endings = real.text[0, :30], [real.text[0, 100:105], real.text[0, 200:212]]
    with attach_codecs(real.model, real.low, WINDOW) as session, torch.no_grad():
        shared = session.new_cache()
        real.model(prefix[None], **{session.keyword: shared})
        before = copy.deepcopy(shared)
        results = [generate(real, session, copy.deepcopy(shared), torch.cat((prefix, ending)), 3) for ending in endings]
        # the shared one took nothing from either, and shares no memory with its copy
        assert same(shared, before)
        spaces = [{t.untyped_storage().data_ptr() for t in c.state.tensors().values()} for c in (shared, before)]
        assert not spaces[0] & spaces[1]
    sequences = [torch.cat((prefix, e, new[:-1])) for e, (new, _) in zip(endings, results, strict=True)]
    chunks = [[30, len(ending), 1, 1] for ending in endings]
    expected = chunked_logits(real.model, real.low, WINDOW, sequences, chunks)
    for row, ending, (_, logits) in zip(expected, endings, results, strict=True):
        first = 30 + len(ending) - 1
        assert_rounded(logits, row[first : first + 3])


def test_a_long_prompt_in_chunks(real, chunked_logits, assert_rounded):
    """Later chunks read earlier ones decoded: equal to what that means, close to a prompt in one piece, same bytes."""
    ids, found = real.text[0, :66], []
    for codecs in (real.low, real.sixteen):
        with attach_codecs(real.model, codecs, WINDOW) as session:
            cache = session.new_cache()
            found.append(generate(real, session, cache, ids, 2, prefill_chunk_size=25))
            assert cache.state.bytes_live() == cache.state.bytes_predicted()
            assert cache.state.groups[0].stores[0].packed == 56
    (new, low), (same_new, sixteen) = found
    assert torch.equal(new, same_new)
    fed = torch.cat((ids, new[:-1]))
    pieces, whole = chunked_logits(real.model, real.low, WINDOW, [fed, fed], [[25, 25, 16, 1], [66, 1]])[:, -2:]
    assert_rounded(low, pieces)
    assert 1e-3 < (pieces - whole).abs().max() < 0.3 * whole.abs().max()
    plain = real.model(fed[None], use_cache=False).logits[0, -2:].detach()
    assert 0 < (sixteen - plain).abs().max() < 1e-3 * plain.abs().max()


@torch.no_grad()
def test_crop_goes_back_to_where_it_was(real):
    ids = real.text[:, :40]
    with attach_codecs(real.model, real.low, WINDOW) as session:
        cache = session.new_cache()
        real.model(ids[:, :28], **{session.keyword: cache})
        straight = copy.deepcopy(cache)
        # 4 sinks, 20 packed and 7 recent tokens
        real.model(ids[:, 28:31], **{session.keyword: cache})
        assert cache.state.groups[0].stores[0].packed == 20
        with pytest.raises(AatcError, match="cannot take back 8 tokens: only the latest 7 are still exact"):
            cache.crop(-8)
        cache.crop(-3)
        assert cache.get_seq_length() == 28
        for each in (straight, cache):
            real.model(ids[:, 35:36], **{session.keyword: each})
        # what was packed meanwhile stays packed: the rows of the first layer are the same, and none is coded twice
        left, right = (each.state.groups[0].stores[0] for each in (straight, cache))
        assert torch.equal(left.streams[0].keys, right.streams[0].keys)
        assert torch.equal(left.recent()[0], right.recent()[0])


@torch.no_grad()
def test_saved_and_loaded_it_goes_on_exactly(real, padded, tmp_path):
    """Logits and tokens of the loaded cache are bit for bit those of the one that was never saved."""
    batch = padded([real.text[0, :33], real.text[0, 50:61]])
    with attach_codecs(real.model, real.low, WINDOW) as session:
        cache = session.new_cache()
        options = {"min_new_tokens": 3, "do_sample": False, "pad_token_id": END}
        ids = real.model.generate(**batch, max_new_tokens=3, **options, **{session.keyword: cache})
        save_cache(cache, session, tmp_path / "cache")
    size = sum(file.stat().st_size for file in (tmp_path / "cache").iterdir())
    assert cache.state.bytes_live() < size < 3 * cache.state.bytes_live()
    mask = torch.cat((batch["attention_mask"], torch.ones(2, 3, dtype=torch.long)), 1)
    with attach_codecs(real.model, real.low, WINDOW) as session:
        loaded = load_cache(session, tmp_path / "cache")
        assert same(loaded, cache)
        got, expected = (
            real.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=4,
                **options,
                output_logits=True,
                return_dict_in_generate=True,
                **{session.keyword: each},
            )
            for each in (loaded, cache)
        )
        assert torch.equal(got.sequences, expected.sequences)
        assert all(torch.equal(a, b) for a, b in zip(got.logits, expected.logits, strict=True))
        assert same(loaded, cache)
    with attach_codecs(real.model, real.sixteen, WINDOW) as session, pytest.raises(ArtifactError, match="another plan"):
        load_cache(session, tmp_path / "cache")
    weight = real.model.model.layers[7].mlp.down_proj.weight
    kept = weight[0, 0].clone()
    try:
        # one of the numbers that the digest of the model looks at
        weight[0, 0] += 1e-3
        session = prepare_codecs(real.model, real.low, WINDOW)
        with pytest.raises(ArtifactError, match="another model"):
            load_cache(session, tmp_path / "cache")
    finally:
        weight[0, 0] = kept


def test_generate_leaves_the_caller_s_objects_as_they_were(real, padded):
    batch = padded([real.text[0, :20], real.text[0, 30:41]])
    before = {name: tensor.clone() for name, tensor in batch.items()}
    config = GenerationConfig(max_new_tokens=2, do_sample=False, num_beams=2, pad_token_id=END)
    settings, own = config.to_dict(), real.model.generation_config.to_dict()
    model = copy.deepcopy(real.model.config.to_dict())
    with attach_codecs(real.model, real.low, WINDOW) as session:
        arguments = {**batch, "generation_config": config, session.keyword: session.new_cache()}
        passed = dict(arguments)
        real.model.generate(**arguments)
        assert arguments.keys() == passed.keys()
        assert all(arguments[name] is passed[name] for name in passed)
    assert all(torch.equal(batch[name], before[name]) for name in before)
    assert config.to_dict() == settings
    assert real.model.generation_config.to_dict() == own
    assert real.model.config.to_dict() == model
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in real.model.modules())
