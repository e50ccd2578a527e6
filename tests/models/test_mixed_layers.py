"""Sliding layers beside full ones: kept exact, counted by the byte law, and part of everything a cache can do."""

from __future__ import annotations

import copy

import pytest
import torch

from aatc_cli.artifacts.manifest import digest_of
from aatc_cli.config import Geometry, HeadGroups, Window
from aatc_cli.core.layout import CacheLayout, fp16_bytes
from aatc_cli.errors import AatcError
from aatc_cli.evals.forced.behind import SeenPrompts
from aatc_cli.evals.forced.passes import forced_logits
from aatc_cli.evals.forced.teacher_forced import Method
from aatc_cli.models.adapter import attention_sites, geometry_of
from aatc_cli.models.attention import logits_at
from aatc_cli.runtime.attach import attach_codecs
from aatc_cli.runtime.cache_file import load_cache, save_cache

WINDOW = Window(sinks=2, recent=8, flush=4)


def tokens_of(length, seed=1, batch=1):
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def gemma(family_named):
    return family_named("gemma3")


@pytest.fixture
def gemma_codecs(codecs):
    return lambda bits: codecs(2, 16, 1, bits)


def test_geometry_counts_the_two_kinds_apart(gemma):
    geometry = geometry_of(gemma.config)
    assert (geometry.layers, geometry.sliding_layers, geometry.sliding_window) == (2, 2, 24)
    assert geometry.full_layers == (1, 3)
    assert [geometry.leading(n) for n in range(5)] == [0, 0, 1, 1, 2]
    assert Geometry.model_validate(geometry.model_dump()) == geometry
    plain = Geometry(layers=2, heads=4, kv_heads=1, head_dim=16, hidden_size=64)
    # what was written before there were sliding layers keeps its digest
    assert plain.model_dump() == {"layers": 2, "heads": 4, "kv_heads": 1, "head_dim": 16, "hidden_size": 64}
    assert digest_of(plain.model_dump(mode="json")) != digest_of(geometry.model_dump(mode="json"))
    assert [plain.leading(n) for n in range(4)] == [0, 1, 2, 2]
    mixed = geometry.model_dump()
    assert Geometry.model_validate_json(geometry.model_dump_json()) == geometry
    for change, says in (
        ({"sliding_layers": 0}, "go together"),
        ({"full_layers": (1, 4)}, "in order"),
        ({"full_layers": (3, 1)}, "in order"),
        ({"full_layers": (1,)}, "in order"),
    ):
        with pytest.raises(ValueError, match=says):
            Geometry.model_validate(mixed | change)


def test_the_law_counts_sliding_layers_as_they_are():
    geometry = Geometry(
        layers=3,
        heads=4,
        kv_heads=1,
        head_dim=256,
        hidden_size=640,
        sliding_layers=15,
        sliding_window=512,
        full_layers=(5, 11, 17),
    )
    layout = CacheLayout.nominal(geometry, Window(), HeadGroups(k=1, v=1), 2.0)
    alone = layout.of_full_layers()
    row = 256 * 2
    for tokens in (1, 100, 511, 512, 513, 8192):
        exact = min(tokens, 512) * 15 * 2 * row
        assert layout.breakdown(tokens)["sliding_layers"] == exact
        assert layout.bytes(tokens) == alone.bytes(tokens) + exact
        assert fp16_bytes(geometry, tokens) == tokens * 3 * 2 * row + exact
    assert "sliding_layers" not in alone.breakdown(8192)
    summary = layout.summary(8192)
    assert summary["ratio_full_layers"] == alone.ratio(8192) > 2 * summary["ratio"] > 2
    assert sum(summary["breakdown"].values()) == summary["bytes_total"]


@torch.no_grad()
def test_live_bytes_are_the_law_at_every_length(gemma, gemma_codecs):
    model = gemma.to(torch.bfloat16)
    ids = tokens_of(60, batch=2)
    with attach_codecs(model, gemma_codecs("mixed"), WINDOW) as session:
        cache = session.new_cache()
        for start, stop in [
            (0, 7),
            *((t, t + 1) for t in range(7, 34)),
            (34, 50),
            *((t, t + 1) for t in range(50, 60)),
        ]:
            model(ids[:, start:stop], **{session.keyword: cache})
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in cache.state.tensors().values()}
            expected = session.spec.layout.bytes(stop, 2)
            assert sum(s.nbytes() for s in storages.values()) == cache.state.bytes_predicted() == expected


def test_assisted_decoding_beams_and_chunks(gemma, gemma_codecs):
    prompt = tokens_of(7).repeat(1, 5)
    options = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    with attach_codecs(gemma, gemma_codecs(16), WINDOW) as session:

        def run(**more):
            return gemma.generate(prompt, **options, **more, **{session.keyword: session.new_cache()})

        plain, chunked = run(), run(prefill_chunk_size=6)
        assisted, beams = run(prompt_lookup_num_tokens=5), run(num_beams=3)
    assert torch.equal(plain, gemma.generate(prompt, **options))
    assert torch.equal(plain, chunked)
    assert torch.equal(plain, assisted)
    assert torch.equal(beams, gemma.generate(prompt, num_beams=3, **options))


@torch.no_grad()
def test_crop_reaches_back_as_far_as_the_sliding_window_allows(gemma, gemma_codecs):
    ids = tokens_of(40)
    with attach_codecs(gemma, gemma_codecs(3), Window(sinks=2, recent=30, flush=4)) as session:
        early, late = session.new_cache(), session.new_cache()
        gemma(ids[:, :20], **{session.keyword: early})
        early.crop(-6)
        again = gemma(ids[:, 14:20], **{session.keyword: early}).logits
        assert early.get_seq_length() == 20
        expected = gemma(ids[:, :20], **{session.keyword: session.new_cache()}).logits[:, 14:]
        torch.testing.assert_close(again, expected, rtol=1e-6, atol=1e-6)
        gemma(ids[:, :30], **{session.keyword: late})
        with pytest.raises(AatcError, match="only the latest 1 are still exact"):
            late.crop(-2)
        late.crop(-1)
        again = gemma(ids[:, 29:31], **{session.keyword: late}).logits
        expected = gemma(ids[:, :31], **{session.keyword: session.new_cache()}).logits[:, 29:]
        torch.testing.assert_close(again, expected, rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_saved_copied_and_selected(gemma, gemma_codecs, tmp_path):
    ids, step = tokens_of(33, batch=3), tokens_of(1, seed=4)
    with attach_codecs(gemma, gemma_codecs(3), WINDOW) as session:
        cache = session.new_cache()
        gemma(ids, **{session.keyword: cache})
        save_cache(cache, session, tmp_path / "cache")
        loaded, copied = load_cache(session, tmp_path / "cache"), copy.deepcopy(cache)
        expected = gemma(step.expand(3, 1), **{session.keyword: cache}).logits
        assert torch.equal(gemma(step.expand(3, 1), **{session.keyword: loaded}).logits, expected)
        copied.reorder_cache(torch.tensor([2, 0, 0]))
        got = gemma(step.expand(3, 1), **{session.keyword: copied}).logits
        torch.testing.assert_close(got, expected[[2, 0, 0]], rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_crossing_into_other_frequencies_is_refused(family_named, codecs):
    """longrope turns all positions anew beyond its switch: a cache may be on either side of it, not on both."""
    model = family_named("phi3-long")
    ids = tokens_of(80)
    # packed tokens end below the switch: their tables alone would not show on which side the context is
    with attach_codecs(model, codecs(4, 32, 1, 16), Window(sinks=2, recent=24, flush=4)) as session:
        assert session.spec.switch == 64
        cache, beyond = session.new_cache(), session.new_cache()
        model(ids[:, :64], **{session.keyword: cache})
        with pytest.raises(AatcError, match="beyond 64 tokens this model rotates with other frequencies"):
            model(ids[:, 64:65], **{session.keyword: cache})
        rows = [model(ids[:, :70], **{session.keyword: beyond}).logits[0]]
        rows += [model(ids[:, t : t + 1], **{session.keyword: beyond}).logits[0] for t in range(70, 80)]
    own = model(ids).logits[0]
    # rows of the last query only: earlier ones of a longer text are those of the same, longer frequencies
    assert (torch.cat(rows)[70:] - own[70:]).abs().max() < 1e-2 * own.abs().max()


@torch.no_grad()
def test_prompts_that_are_seen_once_end_at_the_sliding_window(gemma, gemma_codecs):
    """Behind a prompt longer than the sliding window, exact and coded, as in a pass over all of it."""
    sites, tokens, prompt = attention_sites(gemma), tokens_of(70, batch=2), 58
    places = torch.arange(prompt - 1, 69)
    seen = SeenPrompts.of(gemma, sites, tokens[:, :prompt])
    method = Method("coded", gemma_codecs(3), WINDOW, "pre-rope")
    exact, coded = (seen.logits(gemma, sites, one, tokens[:, prompt:]) for one in (None, method))
    assert torch.allclose(exact, logits_at(gemma, tokens, places), rtol=1e-4, atol=1e-5)
    assert torch.allclose(coded, forced_logits(gemma, sites, method, tokens, places, prompt), rtol=1e-4, atol=1e-5)
    # the codes are seen
    assert not torch.allclose(exact, coded, rtol=1e-4, atol=1e-5)
