"""`attach`: one call for every cache of a plan, which are refused by name where they cannot be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from aatc_cli.artifacts.plan import Plan
from aatc_cli.errors import AatcError
from aatc_cli.models.loading import find_model, load_model
from aatc_cli.runtime import forms as module
from aatc_cli.runtime.attach import attach, attach_codecs, plain, prepare
from aatc_cli.runtime.cache_file import load_cache, save_cache
from aatc_cli.runtime.forms import chosen

IDS = torch.randint(1, 256, (1, 170), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model(tiny_llama: Path) -> Any:
    return load_model(find_model(str(tiny_llama)), dtype="float32")


@pytest.fixture
def plan(run_folder: Path) -> Plan:
    return Plan.open(run_folder / "plans" / "paper-3")


@torch.no_grad()
def stepped(model: Any, session: Any, cache: Any) -> torch.Tensor:
    rows = [model(IDS[:, :150], **{session.keyword: cache}).logits[:, -1]]
    rows += [model(IDS[:, t : t + 1], **{session.keyword: cache}).logits[:, -1] for t in range(150, 170)]
    return torch.stack(rows)


def test_packed_is_what_its_codecs_are(model: Any, plan: Plan) -> None:
    with attach_codecs(model, plan.codecs("cpu"), plan.recipe.window) as session:
        expected = stepped(model, session, session.new_cache())
    for cache in ("auto", "packed"):
        with attach(model, plan, cache) as session:
            held = session.new_cache()
            assert torch.equal(stepped(model, session, held), expected)
            assert (session.kind, session.name, session.digest) == ("packed", plan.name, plan.digest)
            assert session.bytes_live(held) == held.state.bytes_predicted()
            assert session.layout is not None
            # the exact tokens are in the model's float32 here, two bytes a number in the law
            parts = session.layout.breakdown(170)
            assert session.bytes_live(held) == sum(parts.values()) + parts["sinks"] + parts["window"]


def test_simulated_answers_as_packed_and_its_size_is_the_plan_s(model: Any, plan: Plan) -> None:
    with attach(model, plan, "packed") as session:
        held = session.new_cache()
        expected = stepped(model, session, held)
        size = held.state.bytes_predicted()
    with attach(model, plan, "simulated") as session:
        cache = session.new_cache()
        got = stepped(model, session, cache)
        assert session.kind == "simulated"
        assert cache.state.bytes_predicted() == size
        with pytest.raises(AatcError, match="full vectors"):
            session.bytes_live(cache)
    # the same codes but for ties: nearer to each other than to the model's own cache
    own = plain(model)
    exact = stepped(model, own, own.new_cache())
    assert float((got - expected).abs().max()) < 0.2 * float((exact - expected).abs().max())


def test_the_model_s_own_cache_is_a_session_too(model: Any) -> None:
    session = plain(model, "float32")
    with session.attached():
        cache = session.new_cache()
        logits = stepped(model, session, cache)
    assert (session.kind, session.name, session.layout) == ("plain", "float32", None)
    assert session.bytes_live(cache) == 4 * 2 * 170 * 32 * 4
    assert torch.allclose(logits[-1], model(IDS).logits[:, -1], atol=1e-5)


def test_what_cannot_be_is_refused_by_name(model: Any, plan: Plan, tmp_path: Path, tiny_llama: Path) -> None:
    with pytest.raises(AatcError, match="fused kernels pack 64 tokens at once"), attach(model, plan, "fused"):
        pass
    for cache in ("packed", "simulated"):
        with attach(model, plan, cache) as session, pytest.raises(AatcError, match="no spare room"):
            session.new_cache(room=100)
    with pytest.raises(AatcError, match="no spare room"):
        plain(model).new_cache(room=100)
    with attach(model, plan, "simulated") as session:
        with pytest.raises(AatcError, match="simulated, which no file holds"):
            save_cache(session.new_cache(), session, tmp_path / "cache")
        with pytest.raises(AatcError, match="simulated, which no file holds"):
            load_cache(session, tmp_path / "cache")
    other = load_model(find_model(str(tiny_llama)))
    other.config.num_hidden_layers, other.model.layers = 2, other.model.layers[:2]
    with pytest.raises(AatcError, match=r"4 layers of 2 kv heads of 16, this one has 2 layers"), attach(other, plan):
        pass


def test_what_auto_stands_for(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = plan.recipe.window.model_copy(update={"flush": 64})
    heads = plan.groups.model_copy(update=dict.fromkeys(("k", "v"), plan.geometry.kv_heads))
    fit = replace(plan, recipe=plan.recipe.model_copy(update={"window": tiles}), groups=heads)
    grouped = plan.groups.model_copy(update=dict.fromkeys(("k", "v"), 1))
    monkeypatch.setattr(module, "fused_available", lambda: True)
    assert [chosen(fit, "cuda:0"), chosen(fit, "cpu"), chosen(plan, "cuda")] == ["fused", "packed", "packed"]
    assert chosen(replace(fit, groups=grouped), "cuda") == "packed"
    monkeypatch.setattr(module, "fused_available", lambda: False)
    assert chosen(fit, "cuda") == "packed"
    eight = tiles.model_copy(update={"key_bits": 8})
    assert chosen(replace(fit, recipe=plan.recipe.model_copy(update={"window": eight})), "cuda") == "simulated"
    kivi = plan.recipe.model_copy(update={"quantizer": "grouped-minmax"})
    assert chosen(replace(plan, recipe=kivi), "cuda") == "simulated"


def test_tiles_that_do_not_fit_are_packed_by_auto(model: Any, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "chosen", lambda *_: "fused")
    assert prepare(model, plan).kind == "packed"


def test_a_simulated_cache_of_codecs_alone_has_no_law(model: Any, plan: Plan) -> None:
    bare = attach_codecs(model, plan.codecs("cpu"), plan.recipe.window, "simulated")
    with bare as session, pytest.raises(AatcError, match="no byte law"):
        session.new_cache().state.bytes_predicted()
    eight = plan.recipe.window.model_copy(update={"key_bits": 8})
    for cache, says in (("simulated", "simulated cache holds no window of 8 bits"), ("packed", "packed cache holds")):
        with pytest.raises(AatcError, match=says), attach_codecs(model, plan.codecs("cpu"), eight, cache):
            pass
