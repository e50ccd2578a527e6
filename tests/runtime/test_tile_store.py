"""The cache of tiles under a model: the evaluator's numbers and classes, every way of feeding it, and its bytes."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from aatc_cli.config import Window
from aatc_cli.core import SIDES
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.core.tile_rule import TileRule
from aatc_cli.errors import AatcError
from aatc_cli.evals.forced.passes import forced_logits
from aatc_cli.evals.forced.teacher_forced import Method
from aatc_cli.evals.forced.tiles import tiled_logits
from aatc_cli.models.adapter import attention_layers, attention_sites
from aatc_cli.models.loading import find_model, load_model
from aatc_cli.runtime.attach import attach
from aatc_cli.runtime.session import Session
from aatc_cli.runtime.tiles.form import tiles_spec

WINDOW = Window(sinks=2, recent=32, flush=16)
LENGTH = 109


@pytest.fixture(scope="module", params=["tiny_llama", "tiny_qwen2"])
def model(request):
    return load_model(find_model(str(request.getfixturevalue(request.param)))).double()


def tokens_of(length: int = LENGTH, batch: int = 1, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(seed))


def codecs_of(
    bits: tuple[int, ...], groups: int, rule: TileRule, *, centred: bool = False
) -> list[dict[str, TileCodec]]:
    """Codecs of four layers of two kv heads of 16, one transform per site; widths differ by class and channel."""
    size, found = 32 // groups, []
    for layer in range(4):
        sides = {}
        for index, side in enumerate(SIDES):
            generator = torch.Generator().manual_seed(10 * layer + index)
            encode = torch.randn(groups, size, size, generator=generator, dtype=torch.float64) + 3 * torch.eye(size)
            ones = torch.ones(32, dtype=torch.float64)
            codec = TransformCodec(encode, torch.linalg.inv(encode), ones, ones.long(), ones, "lloyd", scale_bits=8)
            if centred:
                codec = replace(codec, centre=torch.randn(32, generator=generator, dtype=torch.float64))
            widths = torch.tensor(bits)[:, None].expand(-1, 32).clone()
            widths[:, ::3] = (widths[:, ::3] + 1) * (widths[:, ::3] > 0)
            sides[side] = TileCodec(codec, widths, rule)
        found.append(sides)
    return found


def session_of(model, codecs, window: Window = WINDOW, kind="packed") -> Session:
    layers = attention_layers(model)
    return Session.of("tiles", model, layers, tiles_spec(model, layers, codecs, window, None, kind))


def stores_of(cache) -> list:
    return [store for group in cache.state.groups for store in group.stores]


@torch.no_grad()
def feed(session, cache, tokens, parts) -> torch.Tensor:
    """Logits of all ``tokens`` [1, T], fed in ``parts``."""
    found, start = [], 0
    for count in parts:
        piece = tokens[:, start : start + count]
        found.append(session.model(piece, use_cache=True, **{session.keyword: cache}).logits)
        start += count
    return torch.cat(found, 1)


CASES = [((1, 3, 6), "head", 2), ((0, 3, 6), "head", 2), ((1, 3, 6), "layer", 1), ((0, 2, 5), "layer", 2)]


@pytest.mark.parametrize("centred", [False, True], ids=["about-zero", "about-a-mean"])
@pytest.mark.parametrize("kind", ["packed", "simulated"])
@pytest.mark.parametrize(("bits", "order", "groups"), CASES)
def test_token_by_token_it_is_the_evaluator(model, bits, order, groups, kind, centred):
    tokens = tokens_of()
    codecs = codecs_of(bits, groups, TileRule((8, 4, 4), order), centred=centred)
    classes: dict[int, torch.Tensor] = {}
    sites = attention_sites(model)
    expected = tiled_logits(model, sites, codecs, codecs[0]["k"].rule, WINDOW, tokens, 0, classes.__setitem__)
    session = session_of(model, codecs, kind=kind)
    with session.attached():
        cache = session.new_cache()
        got = feed(session, cache, tokens, [1] * LENGTH)[0, :-1]
    assert (got - expected).abs().max() < 1e-9 * expected.abs().max()
    assert session.kind == kind
    for layer, store in enumerate(stores_of(cache)):
        (_, tiles), *rest = store.pages.parts(1 << 20)
        assert not rest
        held = store.layer.held.unpack(tiles)[1].transpose(1, 2).flatten(2)
        assert torch.equal(held, classes[layer])


@pytest.fixture
def in_float64():
    """The cache sums what tokens receive in float32, the evaluator of this model in float64: near ties rank apart."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("prompt", [1, 34, 50, 66, 108])
@pytest.mark.parametrize(("bits", "order", "groups"), CASES)
@torch.no_grad()
def test_behind_a_prompt_it_is_the_evaluator(model, bits, order, groups, prompt, in_float64):
    """Two sequences in one prefill, then token by token: exact in the prompt, packed behind it."""
    tokens, codecs = tokens_of(batch=2), codecs_of(bits, groups, TileRule((8, 4, 4), order))
    method = Method("tiles", codecs, WINDOW, "pre-rope")
    places = torch.arange(prompt - 1, LENGTH)
    expected = forced_logits(model, attention_sites(model), method, tokens, places, prompt)
    session = session_of(model, codecs)
    with session.attached():
        got = feed(session, session.new_cache(), tokens, [prompt] + [1] * (LENGTH - prompt))
    assert (got[:, prompt - 1 :] - expected).abs().max() < 1e-9 * expected.abs().max()
    # what stands behind changes nothing before, nor what else is asked for
    fewer = forced_logits(model, attention_sites(model), method, tokens[:, : prompt + 1], places[:2], prompt)
    torch.testing.assert_close(fewer, expected[:, :2])


@torch.no_grad()
def test_a_prompt_in_one_pass_is_ranked_by_what_its_tokens_received(model):
    """A prompt attends to itself exactly, so its classes are those of a model without a cache."""
    codecs, tokens = codecs_of((1, 3, 6), 2, TileRule((8, 4, 4))), tokens_of()
    session = session_of(model, codecs)
    with session.attached():
        cache = session.new_cache()
        feed(session, cache, tokens, [LENGTH])
    exact = codecs_of((15, 15, 15), 2, TileRule((8, 4, 4)))
    classes: dict[int, torch.Tensor] = {}
    # codes of fifteen and sixteen bits change nothing that a class depends on
    tiled_logits(model, attention_sites(model), exact, TileRule((8, 4, 4)), WINDOW, tokens, 0, classes.__setitem__)
    for layer, store in enumerate(stores_of(cache)):
        ((_, tiles),) = store.pages.parts(1 << 20)
        held = store.layer.held.unpack(tiles)[1].transpose(1, 2).flatten(2)
        assert (held == classes[layer]).double().mean() > 0.99


@pytest.mark.parametrize("parts", [(40, 30, *[1] * 39), (1, *[1] * 60, 48), (2, 33, 74)])
def test_parts_of_a_text_leave_the_bytes_of_the_window_rule(model, parts):
    codecs, tokens = codecs_of((1, 3, 6), 2, TileRule((8, 4, 4))), tokens_of()
    session = session_of(model, codecs)
    with session.attached():
        cache = session.new_cache()
        got = feed(session, cache, tokens, parts)
    assert bool(torch.isfinite(got).all())
    assert {store.packed for store in stores_of(cache)} == {80}
    assert {store.exact.ring_keys.shape[1] for store in stores_of(cache)} == {32}


def test_rows_of_a_ragged_batch_are_the_prompts_alone(model):
    codecs = codecs_of((1, 3, 6), 2, TileRule((8, 4, 4)))
    session = session_of(model, codecs)
    lengths, tokens = (71, 90, 90), tokens_of(90, 3)
    mask = torch.zeros(3, 90, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, 90 - length :] = 1
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with session.attached():
        cache = session.new_cache()
        together = model.generate(tokens, attention_mask=mask, **options, **{session.keyword: cache})
        for row, length in enumerate(lengths):
            alone = session.new_cache()
            single = tokens[row : row + 1, 90 - length :]
            out = model.generate(single, attention_mask=torch.ones_like(single), **options, **{session.keyword: alone})
            assert torch.equal(out[0, length:], together[row, 90:])


def test_copies_and_beams_share_tiles_by_reference(model):
    codecs = codecs_of((1, 3, 6), 2, TileRule((8, 4, 4)))
    session = session_of(model, codecs)
    tokens = tokens_of(100)
    with session.attached():
        cache = session.new_cache()
        feed(session, cache, tokens, [100])
        tiles = [run.data_ptr() for store in stores_of(cache) for run in store.pages._runs[0]]
        other = copy.deepcopy(cache)
        assert [run.data_ptr() for store in stores_of(other) for run in store.pages._runs[0]] == tiles
        before = session.bytes_live(cache)
        ends = [feed(session, one, tokens_of(30, seed=seed), [1] * 30) for one, seed in ((cache, 5), (other, 6))]
        cold = session.new_cache()
        feed(session, cold, tokens, [100])
        again = feed(session, cold, tokens_of(30, seed=6), [1] * 30)
        assert torch.equal(again, ends[1])
        assert not torch.equal(*ends)
        beams = session.new_cache()
        feed(session, beams, tokens, [100])
        beams.reorder_cache(torch.tensor([0, 0, 0]))
        exact = sum(sum(t.nbytes for t in store.exact.tensors().values()) for store in stores_of(cold))
        assert session.bytes_live(beams) < before + 3 * exact
        found = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=30,
            num_beams=3,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            **{session.keyword: session.new_cache()},
        )
        assert found.shape == (1, 130)


def test_a_recorded_step_is_taken_back_as_if_it_had_not_been(model):
    """Assisted decoding: candidates are tried one by one, and what they paid goes with them."""
    codecs, tokens = codecs_of((1, 3, 6), 2, TileRule((8, 4, 4))), tokens_of(140)
    session = session_of(model, codecs)
    with torch.no_grad(), session.attached():
        plain, tried = session.new_cache(), session.new_cache()
        tried.activate_past_recording()
        feed(session, plain, tokens, [60, *[1] * 79])
        options = {"use_cache": True, session.keyword: tried}
        model(tokens[:, :60], logits_to_keep=1, **options)
        done = 60
        while done < 139:
            candidates = torch.cat((tokens[:, done : done + 3], tokens_of(4, seed=done)), 1)
            model(candidates, logits_to_keep=candidates.shape[1] + 1, **options)
            kept = min(3, 139 - done)
            tried.crop(kept - candidates.shape[1])
            done += kept
    assert tried.get_seq_length() == plain.get_seq_length() == 139
    for left, right in zip(stores_of(plain), stores_of(tried), strict=True):
        mine, theirs = left.tensors(), right.tensors()
        assert torch.equal(mine["tiles"], theirs["tiles"])
        assert torch.allclose(mine["ring_received"], theirs["ring_received"], rtol=1e-6, atol=0)


def test_contents_go_to_disk_and_back(model, tmp_path):
    from aatc_cli.runtime.cache_file import load_cache, save_cache

    codecs, tokens = codecs_of((0, 3, 6), 2, TileRule((8, 4, 4))), tokens_of()
    session = session_of(model, codecs)
    with session.attached():
        cache = session.new_cache()
        feed(session, cache, tokens, [80, *[1] * 29])
        save_cache(cache, session, tmp_path / "cache")
        again = load_cache(session, tmp_path / "cache")
        more = tokens_of(20, seed=9)
        assert torch.equal(feed(session, cache, more, [1] * 20), feed(session, again, more, [1] * 20))


def test_windows_and_groups_that_tiles_cannot_have_are_refused(model):
    with pytest.raises(AatcError, match="tiles of 16 tokens cannot leave a window"):
        session_of(model, codecs_of((1, 3, 6), 2, TileRule((8, 4, 4))), Window(sinks=2, recent=32, flush=8))
    with pytest.raises(AatcError, match="every head has an order of its own"):
        session_of(model, codecs_of((1, 3, 6), 1, TileRule((8, 4, 4))))


@pytest.fixture(scope="module")
def plan(tiny_llama, corpus, tmp_path_factory):
    from aatc_cli.artifacts.run import Run
    from aatc_cli.artifacts.stats import CollectSettings
    from aatc_cli.config import make_budget
    from aatc_cli.profiles import TextMixture, load_recipe
    from aatc_cli.stages.allocate import allocate
    from aatc_cli.stages.collect import CollectOptions, collect
    from aatc_cli.stages.whiten import Wanted, whiten

    run, recipe = Run(tmp_path_factory.mktemp("tiles") / "run"), load_recipe("loss-aware-tiles")
    settings = CollectSettings(samples=4, length=260, rows=64, fisher=4)
    mixture = TextMixture(sources=[str(corpus)], samples=4, length=260)
    collect(run, "stats", find_model(str(tiny_llama)), mixture, settings, CollectOptions(batch=2))
    whiten(run, transform_stats=run.stats(), rate_stats=run.stats(), wanted=Wanted.by(recipe))
    return allocate(run, recipe, [make_budget(bits=2.5)])[0]


@torch.no_grad()
def test_a_plan_of_tiles_is_attached_and_its_bytes_are_the_law_at_every_length(plan, tiny_llama):
    model = load_model(find_model(str(tiny_llama)))
    with attach(model, plan) as session:
        assert session.kind == "packed"
        cache = session.new_cache()
        tokens = tokens_of(400, batch=2)
        done = 0
        for count in (1, 2, 3, 60, 66, 64, 1, 1, 63, 1, 138):
            model(tokens[:, done : done + count], **{session.keyword: cache})
            done += count
            assert session.bytes_live(cache) == cache.state.bytes_predicted() > 0
        # float32 rows are twice the law's float16
        parts = plan.layout.breakdown(done, 2)
        extra = parts["sinks"] + parts["window"]
        assert session.bytes_live(cache) == plan.layout.bytes(done, 2) + extra
        assert parts["codes_keys"] > 0 < parts["received"]
        law, held = plan.layout.tiles, [store.layer.held.nbytes for store in stores_of(cache)]
        assert held == [tile.total for tile in law]
    with pytest.raises(AatcError, match="has no heads of 16"), attach(model, plan, "fused"):
        pass


@torch.no_grad()
def test_packed_and_simulated_tiles_of_a_plan_answer_alike(plan, tiny_llama):
    model = load_model(find_model(str(tiny_llama))).double()
    tokens, found = tokens_of(300), {}
    for kind in ("packed", "simulated"):
        with attach(model, plan, kind) as session:
            found[kind] = feed(session, session.new_cache(), tokens, [220, *[1] * 80])
    assert torch.equal(found["packed"], found["simulated"])
