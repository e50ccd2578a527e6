"""A cache belongs to its session: another plan, model, window, dtype or form, or a model that changed, is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from aatc_cli.config import Window
from aatc_cli.errors import AatcError, ArtifactError
from aatc_cli.models.compressed import HostedCache
from aatc_cli.models.loading import find_model, load_model
from aatc_cli.runtime.attach import attach_codecs, plain, prepare_codecs
from aatc_cli.runtime.cache_file import load_cache, save_cache
from aatc_cli.runtime.model_digest import byte_sums
from aatc_cli.runtime.prefill import shared_prefill
from aatc_cli.runtime.state import CompressedState

WINDOW = Window(sinks=2, recent=8, flush=4)
IDS = torch.randint(1, 256, (1, 30), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model(tiny_llama: Path) -> Any:
    return load_model(find_model(str(tiny_llama))).double()


@pytest.fixture
def plan(codecs: Any) -> Any:
    return codecs(4, 32, 2, 3)


def fed(model: Any, session: Any, cache: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, **{session.keyword: cache}).logits


def test_a_cache_of_another_plan_is_refused(model: Any, plan: Any, codecs: Any) -> None:
    """It used to be taken, and gave the numbers and the bytes of the other plan."""
    other = codecs(4, 32, 2, 1)
    with attach_codecs(model, other, WINDOW) as session:
        theirs, empty = session.new_cache(), session.new_cache()
        fed(model, session, theirs)
    with attach_codecs(model, plan, WINDOW) as session:
        for cache in (theirs, empty, copy.deepcopy(theirs)):
            with pytest.raises(AatcError, match="another plan, window or dtype"):
                fed(model, session, cache, IDS[:, :1])
        assert theirs.get_seq_length() == 30
        with pytest.raises(AatcError, match="another plan"):
            model.generate(IDS, max_new_tokens=2, pad_token_id=0, **{session.keyword: empty})
    changed = Window(sinks=2, recent=8, flush=2)
    with attach_codecs(model, other, changed) as session, pytest.raises(AatcError, match="another plan, window"):
        fed(model, session, theirs, IDS[:, :1])
    with attach_codecs(model, other, WINDOW, "simulated") as session, pytest.raises(AatcError, match="packed tokens"):
        fed(model, session, theirs, IDS[:, :1])


def test_a_cache_of_another_model_is_refused(model: Any, plan: Any, new_model: Any, tmp_path: Path) -> None:
    other = load_model(find_model(str(new_model(tmp_path / "other", seed=5)))).double()
    with attach_codecs(model, plan, WINDOW) as first, attach_codecs(other, plan, WINDOW) as second:
        cache = first.new_cache()
        fed(model, first, cache)
        with pytest.raises(AatcError, match="another model"):
            fed(other, second, cache, IDS[:, :1])
        # and nothing of it was touched
        fed(model, first, cache, IDS[:, :1])
        assert cache.get_seq_length() == 31


def test_an_equal_session_takes_it_and_goes_on_exactly(model: Any, plan: Any) -> None:
    with attach_codecs(model, plan, WINDOW) as session:
        cache, whole = session.new_cache(), session.new_cache()
        for each in (cache, whole):
            fed(model, session, each, IDS[:, :20])
        expected = fed(model, session, whole, IDS[:, 20:21])
    with attach_codecs(model, plan, WINDOW) as session:
        assert torch.equal(fed(model, session, cache, IDS[:, 20:21]), expected)


def test_a_cache_of_no_session_is_refused(model: Any, plan: Any, tmp_path: Path) -> None:
    with attach_codecs(model, plan, WINDOW) as session:
        bare = HostedCache(CompressedState(session.spec), 4)
        with pytest.raises(AatcError, match="of no session"):
            fed(model, session, bare)
        with pytest.raises(AatcError, match="of no session"):
            save_cache(bare, session, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


class Adapter(nn.Module):
    """What libraries of adapters put in place of a projection."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1.5 * self.base_layer(x)


def _adapt(model: Any) -> None:
    layer = model.model.layers[1].self_attn
    layer.k_proj = Adapter(layer.k_proj)


def _in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight.mul_(1.5)


def _replace(model: Any) -> None:
    weight = model.model.layers[2].mlp.down_proj.weight
    weight.data = 1.5 * weight.data


def _load(model: Any) -> None:
    model.load_state_dict({name: 2 * tensor for name, tensor in model.state_dict().items()})


def _more_weights(model: Any) -> None:
    model.model.layers[0].mlp.register_parameter("extra", nn.Parameter(torch.ones(1)))


def _drop_out(model: Any) -> None:
    model.model.layers[0].self_attn.attention_dropout = 0.1
    model.train()


def _checkpoint(model: Any) -> None:
    model.gradient_checkpointing_enable()
    model.train()


def _hook(model: Any) -> None:
    model.model.layers[3].self_attn.v_proj.register_forward_hook(lambda module, given, out: 2 * out)


def _rotate_otherwise(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


def _switch(model: Any) -> None:
    model.model.layers[0].self_attn.q_proj._disable_adapters = True


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "dtype": (lambda model: model.float(), "is float32 now and was float64"),
    "half": (lambda model: model.to(torch.bfloat16), "is bfloat16 now and was float64"),
    "device": (lambda model: model.to("meta"), "lies on meta now and lay on cpu"),
    "adapter": (_adapt, r"modules of model.layers.1.self_attn were replaced"),
    "in-place": (_in_place, r"weights of model.layers.2.mlp.down_proj were changed"),
    "replaced": (_replace, r"weights of model.layers.2.mlp.down_proj were changed"),
    "state-dict": (_load, "weights of .* were changed"),
    "more-weights": (_more_weights, "weights of model.layers.0.mlp were changed"),
    "dropout": (_drop_out, "train mode, with a dropout of 0.1"),
    "checkpointing": (_checkpoint, "train mode with gradient checkpointing"),
    "hook": (_hook, r"hook was put on the output of model.layers.3.self_attn.v"),
    "rotation": (_rotate_otherwise, "weights of model.rotary_emb were changed"),
    "switched": (_switch, "adapters of model.layers.0.self_attn.q_proj were switched"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_changed_inside_the_block_is_refused_by_name(model: Any, plan: Any, name: str) -> None:
    change, says = CHANGES[name]
    model.model.layers[0].self_attn.q_proj._active_adapter = ["default"]
    with attach_codecs(model, plan, WINDOW) as session:
        cache = session.new_cache()
        fed(model, session, cache)
        change(model)
        for _ in range(2):
            with pytest.raises(AatcError, match=says):
                fed(model, session, cache, IDS[:, :1].to(next(model.parameters()).device))
        assert cache.get_seq_length() == 30


@pytest.mark.parametrize("name", sorted(set(CHANGES) - {"device", "hook", "switched"}))
def test_a_model_changed_between_blocks_is_refused(model: Any, plan: Any, name: str) -> None:
    """By the session, and by a new one for the caches of before."""
    change, says = CHANGES[name]
    session = prepare_codecs(model, plan, WINDOW)
    with session.attached():
        cache = session.new_cache()
        fed(model, session, cache)
    change(model)
    with pytest.raises(AatcError, match=says), session.attached():
        pass
    # train mode is refused by every session, and an adapter of this kind has no projection to read
    if name in ("dropout", "checkpointing", "adapter"):
        return
    with attach_codecs(model, plan, WINDOW) as fresh, pytest.raises(AatcError, match=r"another plan|before it was"):
        fed(model, fresh, cache, IDS[:, :1])


def test_what_changes_nothing_is_not_refused(model: Any, plan: Any) -> None:
    """Train mode without dropout, frozen weights, a hook that only looks and is elsewhere, another device string."""
    with attach_codecs(model, plan, WINDOW) as session:
        expected = fed(model, session, session.new_cache())
        model.train()
        model.requires_grad_(False)
        model.to("cpu")
        model.model.layers[0].register_forward_hook(lambda module, given, out: None)
        assert torch.equal(fed(model, session, session.new_cache()), expected)


@pytest.mark.parametrize("cache", ["packed", "simulated"])
def test_backward_is_an_error(model: Any, plan: Any, cache: Any) -> None:
    """Gradients used to be zero in every attention, and said nothing."""
    with attach_codecs(model, plan, WINDOW, cache) as session:
        logits = model(IDS, **{session.keyword: session.new_cache()}).logits
        with pytest.raises(AatcError, match="no gradients go through a compressed cache"):
            logits.sum().backward()
        embeds = model.get_input_embeddings()(IDS).detach().requires_grad_()
        model.requires_grad_(False)
        logits = model(inputs_embeds=embeds, **{session.keyword: session.new_cache()}).logits
        with pytest.raises(AatcError, match="no gradients"):
            torch.autograd.grad(logits.sum(), embeds)
        # a forward pass alone is as it was
        assert torch.equal(logits, fed(model, session, session.new_cache()))


@pytest.mark.parametrize("window", [WINDOW, Window(sinks=2, recent=64, flush=16)], ids=["short", "long"])
def test_an_assistant_with_a_compressed_cache_of_its_own(model: Any, plan: Any, codecs: Any, window: Window) -> None:
    """The assistant drafts more tokens than its window holds, and takes most of them back."""
    small = copy.deepcopy(model)
    small.model.layers = small.model.layers[:2]
    small.config.num_hidden_layers = 2
    small.generation_config.assistant_confidence_threshold = 0.0
    small.generation_config.num_assistant_tokens = 12
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    with attach_codecs(model, plan, WINDOW) as main:
        expected = model.generate(IDS, **options, **{main.keyword: main.new_cache()})
        with attach_codecs(small, codecs(2, 32, 2, 2), window) as helper:
            cache = main.new_cache()
            out = model.generate(IDS, assistant_model=small, **options, **{main.keyword: cache})
            assert torch.equal(out, expected)
            # each model still works by itself, and the assistant is given nothing when a person calls it
            assert torch.equal(model.generate(IDS, **options, **{main.keyword: main.new_cache()}), expected)
            with pytest.raises(AatcError, match="needs a compressed cache"):
                small.generate(IDS, **options)
            small.generate(IDS, **options, **{helper.keyword: helper.new_cache()})
        out = model.generate(IDS, assistant_model=small, **options, **{main.keyword: main.new_cache()})
        assert torch.equal(out, expected)
    assert "_prepare_cache_for_generation" not in vars(small) | vars(model)


@torch.no_grad()
def test_drafts_are_taken_back_as_if_they_had_never_been(model: Any, plan: Any) -> None:
    with attach_codecs(model, plan, WINDOW) as session:
        once, twice = session.new_cache(), session._draft_cache()
        for cache in (once, twice):
            fed(model, session, cache, IDS[:, :12])
        for place in range(12, 29):
            fed(model, session, twice, IDS[:, place : place + 1])
        twice.crop(-15)
        for place in range(12, 14):
            fed(model, session, once, IDS[:, place : place + 1])
        left, right = once.state.tensors(), twice.state.tensors()
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)
        assert torch.equal(*(fed(model, session, cache, IDS[:, :1]) for cache in (once, twice)))


def test_one_pass_fills_caches_of_one_model(model: Any, plan: Any, tiny_llama: Path) -> None:
    other = load_model(find_model(str(tiny_llama))).double()
    mask = torch.ones_like(IDS)
    sessions = [plain(model), prepare_codecs(other, plan, WINDOW)]
    with pytest.raises(AatcError, match="caches of one model"):
        shared_prefill(sessions, IDS, mask, mask.cumsum(1) - 1)


def test_any_number_of_a_saved_cache_s_model_matters(model: Any, plan: Any, tmp_path: Path) -> None:
    """The digest used to read 64 numbers of every weight."""
    with attach_codecs(model, plan, WINDOW) as session:
        cache = session.new_cache()
        fed(model, session, cache)
        save_cache(cache, session, tmp_path / "cache")
        load_cache(session, tmp_path / "cache")
    weight = model.model.layers[2].mlp.down_proj.weight.data
    for row, column in ((0, 1), (weight.shape[0] // 2, 3), (weight.shape[0] - 1, weight.shape[1] - 2)):
        weight[row, column] += 1e-9
        with attach_codecs(model, plan, WINDOW) as session, pytest.raises(ArtifactError, match="another model"):
            load_cache(session, tmp_path / "cache")
        weight[row, column] -= 1e-9
    weight[0, :2] = weight[0, :2].flip(0)
    with attach_codecs(model, plan, WINDOW) as session, pytest.raises(ArtifactError, match="another model"):
        load_cache(session, tmp_path / "cache")


def test_sums_see_any_single_change() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        whole = torch.arange(37).to(dtype)
        found = {byte_sums(whole)}
        for place in range(37):
            changed = whole.clone()
            changed[place] += 1
            found.add(byte_sums(changed))
        assert len(found) == 38
    assert byte_sums(torch.empty(0)) == (0, 0)


def test_another_epsilon_between_blocks_is_refused(model: Any, plan: Any) -> None:
    session = prepare_codecs(model, plan, WINDOW)
    with session.attached():
        cache = session.new_cache()
        fed(model, session, cache)
    model.model.layers[0].input_layernorm.variance_epsilon = 0.5
    with pytest.raises(AatcError, match=r"variance_epsilon of model.layers.0.input_layernorm is another"):
        session.attached().__enter__()
    with attach_codecs(model, plan, WINDOW) as fresh, pytest.raises(AatcError, match="the model before it was changed"):
        fed(model, fresh, cache, IDS[:, :1])


def test_autocast_is_refused(tiny_llama: Path, plan: Any) -> None:
    """It changes no weight: keys, values and codes would be of another precision, where it did not crash."""
    model = load_model(find_model(str(tiny_llama)), dtype="float32")
    for kind in ("packed", "simulated"):
        with attach_codecs(model, plan, WINDOW, kind) as session:
            cache = session.new_cache()
            expected = fed(model, session, cache)
            with torch.autocast("cpu", torch.bfloat16), pytest.raises(AatcError, match=r"under torch.autocast"):
                fed(model, session, cache, IDS[:, :1])
            assert torch.equal(fed(model, session, session.new_cache()), expected)


def test_a_part_of_the_model_called_by_itself_is_refused(model: Any, plan: Any) -> None:
    """It would pass all that is looked at before a forward pass."""
    with attach_codecs(model, plan, WINDOW) as session:
        cache = session.new_cache()
        for _ in range(2):
            with pytest.raises(AatcError, match="called by itself"):
                fed(model.model, session, cache)
            fed(model, session, cache, IDS[:, :1])
        with pytest.raises(AatcError, match="called by itself"), torch.no_grad():
            model.forward(IDS[:, :1], **{session.keyword: cache})
        assert cache.get_seq_length() == 2


def test_copies_of_every_kind_stay_with_their_session(model: Any, plan: Any, codecs: Any) -> None:
    with attach_codecs(model, plan, WINDOW) as session:
        cache = session.new_cache()
        fed(model, session, cache)
        deep = copy.deepcopy(cache)
        assert deep.owner is session
        with pytest.raises(TypeError, match="pickle"):
            pickle.dumps(cache)
    with attach_codecs(model, codecs(4, 32, 2, 2), WINDOW) as other:
        for each in (cache, deep, copy.copy(cache)):
            with pytest.raises(AatcError, match="another plan"):
                fed(model, other, each, IDS[:, :1])
