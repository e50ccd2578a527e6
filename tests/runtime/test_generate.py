"""The compressed cache under ``generate`` and ``forward``, against literal oracles and the model's own cache."""

from __future__ import annotations

import copy
from collections import defaultdict

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

from aatc_cli.config import Window
from aatc_cli.core.codec import CastCodec
from aatc_cli.core.rope import apply_rope
from aatc_cli.errors import AatcError
from aatc_cli.evals.forced.teacher_forced import Method, method_logits
from aatc_cli.models.adapter import attention_sites, rebias
from aatc_cli.models.attention import attention_override
from aatc_cli.models.loading import find_model, load_model
from aatc_cli.runtime.attach import attach_codecs

WINDOW = Window(sinks=2, recent=8, flush=4)


@pytest.fixture(params=["tiny_llama", "tiny_qwen2", "tiny_qwen3"])
def model(request):
    # float64: in float32 a code on a rounding tie may fall either way, which is a step and not rounding
    return load_model(find_model(str(request.getfixturevalue(request.param)))).double()


@pytest.fixture
def llama(tiny_llama):
    return load_model(find_model(str(tiny_llama))).double()


def tokens_of(length, seed=1, batch=1):
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(seed))


def assert_rounded(got, expected):
    """Equal up to the float32 that generate hands logits out in: at most one of its units where a tie falls apart."""
    torch.testing.assert_close(got, expected.float(), rtol=1.3e-7, atol=1e-9)


def greedy(model, session, ids, count, cache=None, **options):
    """Generated tokens and the logits they were taken from."""
    cache = session.new_cache() if cache is None else cache
    done = model.generate(
        ids,
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        pad_token_id=0,
        **{session.keyword: cache},
        **options,
    )
    return done.sequences[:, ids.shape[1] :], torch.stack(done.logits, 1)


@torch.no_grad()
def oracle_logits(model, codecs, window, prompt, steps):
    """Logits after an exact prompt [1, P] and after each of ``steps`` [1, S], with literal lists for a cache."""
    kept = defaultdict(lambda: {"keys": [], "values": [], "raw": [], "packed": 0})

    def pack(layer, site, heads, dim):
        while len(layer["keys"]) - window.sinks - layer["packed"] > window.recent:
            for index in range(window.sinks + layer["packed"], window.sinks + layer["packed"] + window.flush):
                k_raw, v_raw, cos, sin = layer["raw"][index]
                k_hat = rebias(codecs[site.layer]["k"].reconstruct(k_raw), site.k_bias)
                v_hat = rebias(codecs[site.layer]["v"].reconstruct(v_raw), site.v_bias)
                layer["keys"][index] = apply_rope(k_hat.view(1, 1, heads, dim).transpose(1, 2), cos, sin)
                layer["values"][index] = v_hat.view(1, 1, heads, dim).transpose(1, 2)
            layer["packed"] += window.flush

    def attend(inputs):
        layer, width = kept[inputs.site.layer], inputs.key.shape[2]
        heads, dim = inputs.key.shape[1], inputs.key.shape[3]
        for t in range(width):
            one = slice(t, t + 1)
            layer["keys"].append(inputs.key[:, :, one])
            layer["values"].append(inputs.value[:, :, one])
            layer["raw"].append((inputs.k_raw[:, one], inputs.v_raw[:, one], inputs.cos[:, one], inputs.sin[:, one]))
        if width == 1:
            pack(layer, inputs.site, heads, dim)
        share = inputs.query.shape[1] // heads
        keys = torch.cat(layer["keys"], 2).repeat_interleave(share, 1)
        values = torch.cat(layer["values"], 2).repeat_interleave(share, 1)
        hidden = torch.ones(width, keys.shape[2]).triu(keys.shape[2] - width + 1).bool()
        scores = (inputs.query @ keys.transpose(2, 3) * inputs.scaling).masked_fill(hidden, -torch.inf)
        pack(layer, inputs.site, heads, dim)
        return scores.softmax(-1) @ values

    rows = []
    with attention_override(model, attention_sites(model), attend):
        rows.append(model(input_ids=prompt, use_cache=False).logits[0, -1])
        for s in range(steps.shape[1]):
            position = torch.tensor([[prompt.shape[1] + s]])
            rows.append(model(input_ids=steps[:, s : s + 1], position_ids=position, use_cache=False).logits[0, -1])
    return torch.stack(rows)


@torch.no_grad()
@pytest.mark.parametrize("quantizer", ["uniform-token-max", "lloyd"])
@pytest.mark.parametrize(
    ("window", "length"),
    [
        pytest.param(WINDOW, 60, id="s2-w8-f4-T60"),
        pytest.param(Window(sinks=0, recent=1, flush=1), 24, id="s0-w1-f1-T24"),
        pytest.param(Window(), 180, id="paper-window-T180"),
        pytest.param(Window(sinks=40, recent=8, flush=8), 30, id="shorter-than-sinks"),
    ],
)
def test_token_by_token_equals_the_one_pass_evaluator(model, codecs, window, length, quantizer):
    sites = codecs(4, 32, 2, "mixed", quantizer=quantizer)
    ids = tokens_of(length)
    expected = method_logits(model, attention_sites(model), Method("test", sites, window, "pre-rope"), ids, 0)
    with attach_codecs(model, sites, window) as session:
        cache, rows = session.new_cache(), []
        for t in range(length):
            rows.append(model(ids[:, t : t + 1], **{session.keyword: cache}).logits[0, -1])
            assert cache.get_seq_length() == t + 1
    scale = expected.abs().max()
    assert (torch.stack(rows)[:-1] - expected).abs().max() < 1e-9 * scale
    exact = method_logits(
        model, attention_sites(model), Method("exact", sites, Window(sinks=length), "pre-rope"), ids, 0
    )
    changed = (exact - expected).abs().max() > 1e-2 * scale
    assert changed == (length > window.sinks + window.recent)


@pytest.mark.parametrize("length", [1, 2, 3, 9, 10, 11, 13, 14, 15, 18, 47])
def test_generate_equals_the_oracle_around_every_boundary(model, codecs, length):
    sites = codecs(4, 32, 2, 3)
    prompt = tokens_of(length)
    with attach_codecs(model, sites, WINDOW) as session:
        new, logits = greedy(model, session, prompt, 9)
    expected = oracle_logits(model, sites, WINDOW, prompt, new[:, :-1])
    assert_rounded(logits[0], expected)
    assert torch.equal(new[0], expected.argmax(-1))


@torch.no_grad()
def test_bytes_are_the_law_while_generating(tiny_qwen2, codecs):
    """Two-byte numbers, a batch, every length: the storages of the live cache are the law's bytes and nothing else."""
    model = load_model(find_model(str(tiny_qwen2)), dtype="bfloat16")
    with attach_codecs(model, codecs(4, 32, 2, "mixed"), WINDOW) as session:
        cache = session.new_cache()
        ids = tokens_of(70, batch=3)
        for start, stop in [
            (0, 5),
            *((t, t + 1) for t in range(5, 40)),
            (40, 61),
            *((t, t + 1) for t in range(61, 70)),
        ]:
            model(ids[:, start:stop], **{session.keyword: cache})
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in cache.state.tensors().values()}
            expected = session.spec.layout.bytes(stop, 3)
            assert sum(s.nbytes() for s in storages.values()) == expected
            assert cache.state.bytes_live() == cache.state.bytes_predicted() == expected
            # nothing else that grows hangs on the state once a step is over
            assert cache.state._step is None
            assert not cache.state._tables


@pytest.mark.parametrize("bits", [16, 3])
def test_left_padded_batch_equals_one_by_one(model, codecs, bits):
    sites = codecs(4, 32, 2, bits)
    lengths = [23, 9, 1, 23]
    prompts = [tokens_of(length, seed=length + i) for i, length in enumerate(lengths)]
    width = max(lengths)
    ids, mask = torch.full((4, width), 7), torch.zeros(4, width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - prompt.shape[1] :], mask[row, width - prompt.shape[1] :] = prompt[0], 1
    with attach_codecs(model, sites, WINDOW) as session:
        cache = session.new_cache()
        new, logits = greedy(model, session, ids, 14, cache, attention_mask=mask)
        single = [session.new_cache() for _ in prompts]
        for row, prompt in enumerate(prompts):
            alone, alone_logits = greedy(model, session, prompt, 14, single[row])
            assert torch.equal(new[row], alone[0])
            assert_rounded(logits[row], alone_logits[0])
        # padding takes no bytes: the batch is as large as its sequences
        assert cache.state.bytes_live() == sum(one.state.bytes_live() for one in single)
        # prefill in chunks, one of which is nothing but padding for the shortest
        chunked, _ = greedy(model, session, ids[1:3], 3, attention_mask=mask[1:3], prefill_chunk_size=5)
        assert chunked.shape == (2, 3)
        assert torch.equal(chunked[1], new[2, :3])


def test_sixteen_bits_equal_the_model_s_own_cache(model, codecs):
    """Greedy, sampling and beams choose the same tokens; logits differ by the quantizer's last bit, not by nothing."""
    ids = tokens_of(30, batch=2)
    with attach_codecs(model, codecs(4, 32, 2, 16), WINDOW) as session:
        new, logits = greedy(model, session, ids, 12)
        picked = {}
        for name, options in {"sample": {"do_sample": True}, "beam": {"num_beams": 3, "do_sample": False}}.items():
            torch.manual_seed(3)
            picked[name] = model.generate(
                ids, max_new_tokens=12, pad_token_id=0, **options, **{session.keyword: session.new_cache()}
            )
    own = model.generate(
        ids,
        max_new_tokens=12,
        min_new_tokens=12,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    assert torch.equal(new, own.sequences[:, 30:])
    difference = (logits - torch.stack(own.logits, 1)).abs().max()
    assert 0 < difference < 5e-3 * logits.abs().max()
    torch.manual_seed(3)
    assert torch.equal(picked["sample"], model.generate(ids, max_new_tokens=12, do_sample=True, pad_token_id=0))
    beams = model.generate(ids, max_new_tokens=12, num_beams=3, do_sample=False, pad_token_id=0)
    assert torch.equal(picked["beam"], beams)


def test_beams_score_what_the_oracle_scores(llama, codecs):
    sites = codecs(4, 32, 2, 2)
    prompt = tokens_of(21)
    with attach_codecs(llama, sites, WINDOW) as session:
        done = llama.generate(
            prompt,
            max_new_tokens=15,
            min_new_tokens=15,
            num_beams=4,
            num_return_sequences=4,
            do_sample=False,
            length_penalty=0.0,
            return_dict_in_generate=True,
            output_scores=True,
            pad_token_id=0,
            **{session.keyword: session.new_cache()},
        )
    for sequence, score in zip(done.sequences, done.sequences_scores, strict=True):
        steps = sequence[None, 21:]
        logits = oracle_logits(llama, sites, WINDOW, prompt, steps[:, :-1])
        # the processor of min_new_tokens takes the end token out after the softmax
        total = logits.log_softmax(-1).gather(1, steps[0, :, None]).sum()
        assert abs(total - score) < 1e-4
    # beams crossed: the best one does not descend from the greedy path alone
    assert len({tuple(s.tolist()) for s in done.sequences}) == 4


def test_assisted_decoding_equals_greedy(llama, codecs):
    sites = codecs(4, 32, 2, 3)
    # a repetitive prompt, so that the look-up proposes candidates and some are accepted
    prompt = tokens_of(7).repeat(1, 5)
    with attach_codecs(llama, sites, WINDOW) as session:
        plain, _ = greedy(llama, session, prompt, 30)
        prompt = torch.cat((prompt, plain[:, :20]), 1)
        plain, _ = greedy(llama, session, prompt, 30)
        cache = session.new_cache()
        assisted = llama.generate(
            prompt,
            max_new_tokens=30,
            min_new_tokens=30,
            do_sample=False,
            prompt_lookup_num_tokens=6,
            pad_token_id=0,
            **{session.keyword: cache},
        )
    assert torch.equal(assisted[:, prompt.shape[1] :], plain)
    assert cache.state.bytes_live() == cache.state.bytes_predicted()


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 3, 6])
def test_a_recorded_step_is_undone_exactly(llama, codecs, count):
    ids = tokens_of(40)
    with attach_codecs(llama, codecs(4, 32, 2, 3), WINDOW) as session:
        once, twice = session.new_cache(), session.new_cache()
        for cache in (once, twice):
            cache.activate_past_recording()
            llama(ids[:, :29], **{session.keyword: cache})
            cache.crop(0)
        llama(ids[:, 29:35], logits_to_keep=6, **{session.keyword: twice})
        twice.crop(-count)
        for t in range(29, 35 - count):
            llama(ids[:, t : t + 1], **{session.keyword: once})
            once.crop(0)
        left, right = once.state.tensors(), twice.state.tensors()
        assert once.get_seq_length() == twice.get_seq_length() == 35 - count
        for name in left:
            torch.testing.assert_close(left[name], right[name], rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_crop_takes_back_exact_tokens_and_refuses_packed_ones(llama, codecs):
    ids = tokens_of(40)
    with attach_codecs(llama, codecs(4, 32, 2, 3), WINDOW) as session:
        cache, reference = session.new_cache(), session.new_cache()
        for each in (cache, reference):
            llama(ids[:, :32], **{session.keyword: each})
        with pytest.raises(AatcError, match="cannot take back 7 tokens: only the latest 6 are still exact"):
            cache.crop(-7)
        assert cache.get_seq_length() == 32
        cache.crop(-6)
        assert cache.get_seq_length() == 26
        for t in range(26, 40):
            llama(ids[:, t : t + 1], **{session.keyword: cache})
        for t in range(32, 40):
            llama(ids[:, t : t + 1], **{session.keyword: reference})
        # the first layer's rows depend on no attention: its store is again what it would have been
        left, right = (each.state.groups[0].stores[0].tensors() for each in (cache, reference))
        for name in left:
            torch.testing.assert_close(left[name], right[name], rtol=1e-12, atol=1e-12)
        assert cache.state.bytes_live() == session.spec.layout.bytes(40) + sum(
            3 * reference.state.spec.layout.breakdown(40)[cause] for cause in ("sinks", "window")
        )
        with pytest.raises(AatcError, match=r"crop\(3\)"):
            cache.crop(3)
        fresh = session.new_cache()
        llama(ids[:, :9], **{session.keyword: fresh})
        fresh.crop(-9)
        assert fresh.get_seq_length() == 0


@torch.no_grad()
def test_one_prefix_two_continuations(model, codecs):
    prefix, endings = tokens_of(25), [tokens_of(9, seed=5), tokens_of(4, seed=6)]
    with attach_codecs(model, codecs(4, 32, 2, 3), WINDOW) as session:
        shared = session.new_cache()
        model(prefix, **{session.keyword: shared})
        before = {name: tensor.clone() for name, tensor in shared.state.tensors().items()}
        for ending in endings:
            warm, cold = copy.deepcopy(shared), session.new_cache()
            model(prefix, **{session.keyword: cold})
            ids = torch.cat((prefix, ending), 1)
            a, a_logits = greedy(model, session, ids, 8, warm)
            b, b_logits = greedy(model, session, ids, 8, cold)
            assert torch.equal(a, b)
            assert torch.equal(a_logits, b_logits)
        for name, tensor in shared.state.tensors().items():
            assert torch.equal(tensor, before[name])
        assert copy.deepcopy(shared).state.spec is shared.state.spec


@torch.no_grad()
def test_turns_of_a_chat_on_one_cache(llama, codecs):
    """generate feeds only what is new; the state is the one of the same chunks fed by hand."""
    with attach_codecs(llama, codecs(4, 32, 2, 3), WINDOW) as session:
        cache, by_hand = session.new_cache(), session.new_cache()
        ids = tokens_of(12)
        for turn in range(3):
            known = by_hand.get_seq_length()
            new, logits = greedy(llama, session, ids, 5, cache)
            rows = [llama(ids[:, known:], **{session.keyword: by_hand}).logits[:, -1]]
            for t in range(4):
                rows.append(llama(new[:, t : t + 1], **{session.keyword: by_hand}).logits[:, -1])
            assert_rounded(logits, torch.stack(rows, 1))
            ids = torch.cat((ids, new, tokens_of(6, seed=20 + turn)), 1)
        for name, tensor in by_hand.state.tensors().items():
            torch.testing.assert_close(cache.state.tensors()[name], tensor, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_chunked_prefill_is_close_and_of_the_same_size(llama, codecs):
    ids = tokens_of(50)
    with attach_codecs(llama, codecs(4, 32, 2, 16), WINDOW) as session:
        whole, parts = session.new_cache(), session.new_cache()
        a, a_logits = greedy(llama, session, ids, 6, whole)
        b, b_logits = greedy(llama, session, ids, 6, parts, prefill_chunk_size=7)
    assert torch.equal(a, b)
    assert 0 < (a_logits - b_logits).abs().max() < 5e-3 * a_logits.abs().max()
    assert whole.state.bytes_live() == parts.state.bytes_live()


@torch.no_grad()
def test_select_repeat_and_reorder_follow_the_sequences(llama, codecs):
    lengths, width = [20, 13, 20], 20
    ids = tokens_of(width, batch=3)
    mask = torch.tensor([[0] * (width - n) + [1] * n for n in lengths])
    step = tokens_of(1, seed=9)
    with attach_codecs(llama, codecs(4, 32, 2, 3), WINDOW) as session:
        cache = session.new_cache()
        llama(ids, attention_mask=mask, **{session.keyword: cache})
        one = torch.ones(1, 1, dtype=torch.long)

        def follow(cache, rows):
            grown = torch.cat((mask[rows], one.expand(len(rows), 1)), 1)
            return llama(step.expand(len(rows), 1), attention_mask=grown, **{session.keyword: cache}).logits[:, -1]

        expected = follow(copy.deepcopy(cache), [0, 1, 2])
        for rows, change in {
            (2, 1, 0): lambda c: c.reorder_cache(torch.tensor([2, 1, 0])),
            (1, 1, 0): lambda c: c.reorder_cache(torch.tensor([1, 1, 0])),
            (1,): lambda c: c.batch_select_indices(torch.tensor([1])),
            (0, 0, 1, 1, 2, 2): lambda c: c.batch_repeat_interleave(2),
        }.items():
            changed = copy.deepcopy(cache)
            change(changed)
            assert changed.batch_size == len(rows)
            got = follow(changed, list(rows))
            torch.testing.assert_close(got, expected[list(rows)], rtol=1e-10, atol=1e-10)
        assert (expected[0] - expected[2]).abs().max() > 1e-3
        cache.reset()
        assert cache.get_seq_length() == 0
        llama(ids[:2], **{session.keyword: cache})
        assert cache.batch_size == 2


def test_sliding_window_layers(tmp_path, new_model, codecs):
    model = load_model(find_model(str(new_model(tmp_path / "m", family="mistral", sliding_window=12)))).double()
    sites = codecs(4, 32, 2, 3)
    ids = tokens_of(40)
    expected = method_logits(model, attention_sites(model), Method("t", sites, WINDOW, "pre-rope"), ids, 0)
    with attach_codecs(model, sites, WINDOW) as session, torch.no_grad():
        cache = session.new_cache()
        rows = [model(ids[:, t : t + 1], **{session.keyword: cache}).logits[0, -1] for t in range(40)]
        prompt = session.new_cache()
        exact = model(ids, **{session.keyword: prompt}).logits
    assert (torch.stack(rows)[:-1] - expected).abs().max() < 1e-9 * expected.abs().max()
    assert (exact - model(ids, use_cache=False).logits).abs().max() < 1e-9 * expected.abs().max()


def test_nothing_is_left_behind(model, codecs):
    names = [set(each()._global_mapping) for each in (AttentionInterface, AttentionMaskInterface)]
    before, settings = model.config._attn_implementation, model.generation_config.to_dict()
    ids = tokens_of(12)
    expected = model(ids).logits
    with pytest.raises(AatcError, match="needs a compressed cache"), attach_codecs(model, codecs(4, 32, 2, 2), WINDOW):
        model(ids, use_cache=False)
    with attach_codecs(model, codecs(4, 32, 2, 2), WINDOW) as session:
        greedy(model, session, ids, 3)
    assert [set(each()._global_mapping) for each in (AttentionInterface, AttentionMaskInterface)] == names
    assert model.config._attn_implementation == before
    assert model.generation_config.to_dict() == settings
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.equal(model(ids).logits, expected)
    assert torch.equal(ids, tokens_of(12))


@torch.no_grad()
def test_refusals_name_what_is_wrong(llama, codecs):
    sites, ids = codecs(4, 32, 2, 3), tokens_of(16)
    with attach_codecs(llama, sites, WINDOW) as session:
        with pytest.raises(AatcError, match="needs a compressed cache, got none"):
            llama(ids, use_cache=False)
        with pytest.raises(AatcError, match="got a DynamicCache"):
            llama(ids, **{session.keyword: DynamicCache()})
        cache = session.new_cache()
        llama(ids, **{session.keyword: cache})
        with pytest.raises(AatcError, match="batch of 2 does not fit a cache of 1"):
            llama(ids[:, :1].expand(2, 1), **{session.keyword: cache})
        with pytest.raises(AatcError, match=r"shape \[1, 3\], the cache and the new tokens of \[1, 17\]"):
            llama(ids[:, :1], attention_mask=torch.ones(1, 3), **{session.keyword: cache})
        gap = torch.ones(1, 17)
        gap[0, 5] = 0
        with pytest.raises(AatcError, match="gaps"):
            llama(ids[:, :1], attention_mask=gap, **{session.keyword: cache})
        with pytest.raises(AatcError, match="goes on at position 40, its cache ends at 15"):
            llama(ids[:, :1], position_ids=torch.tensor([[40]]), **{session.keyword: cache})
        with pytest.raises(AatcError, match="do not follow one another"):
            llama(ids[:, :2], position_ids=torch.tensor([[16, 18]]), **{session.keyword: cache})
        with pytest.raises(AatcError, match="mask of 4 dimensions"):
            llama(ids[:, :1], attention_mask=torch.ones(1, 1, 1, 17), **{session.keyword: cache})
        with pytest.raises(AatcError, match="513 tokens are more than the model's context of 512"):
            llama(tokens_of(497), **{session.keyword: cache})
        # none of it touched the cache
        assert cache.get_seq_length() == 16
        llama(ids[:, :1], **{session.keyword: cache})
        padded = session.new_cache()
        mask = torch.ones(2, 16)
        mask[0, :4] = 0
        llama(ids.expand(2, 16), attention_mask=mask, **{session.keyword: padded})
        with pytest.raises(AatcError, match="left-padded batch"):
            llama(ids[:, :1].expand(2, 1), **{session.keyword: padded})
    with pytest.raises(AatcError, match="outside its block"):
        llama(ids[:, :1], **{session.keyword: cache})
    with (
        pytest.raises(AatcError, match="CastCodec has no codes"),
        attach_codecs(llama, [{"k": CastCodec(), "v": CastCodec()}] * 4, WINDOW),
    ):
        pass
    with pytest.raises(AatcError, match="3 layers of codecs for a model of 4"), attach_codecs(llama, sites[:3], WINDOW):
        pass
    with (
        pytest.raises(AatcError, match="has 32 channels, its codec 16"),
        attach_codecs(llama, codecs(4, 16, 2, 3), WINDOW),
    ):
        pass


def test_an_interrupted_pass_is_noticed(llama, codecs):
    with attach_codecs(llama, codecs(4, 32, 2, 3), WINDOW) as session, torch.no_grad():
        cache = session.new_cache()
        hook = llama.model.layers[2].register_forward_pre_hook(lambda *a: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llama(tokens_of(8), **{session.keyword: cache})
        hook.remove()
        with pytest.raises(AatcError, match="interrupted"):
            llama(tokens_of(1), **{session.keyword: cache})


def test_scaled_rotations(tmp_path, new_model, codecs):
    sites = codecs(4, 32, 2, 3)
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    # its frequencies move beyond the context of 512 only, where the cache refuses to go
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "rope_theta": 1e4,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    for name, rope in {"linear": linear, "dynamic": dynamic, "llama3": llama3, "yarn": yarn}.items():
        model = load_model(find_model(str(new_model(tmp_path / name, rope_parameters=rope)))).double()
        prompt = tokens_of(30)
        with attach_codecs(model, sites, WINDOW) as session:
            new, logits = greedy(model, session, prompt, 6)
        expected = oracle_logits(model, sites, WINDOW, prompt, new[:, :-1])
        assert_rounded(logits[0], expected)
