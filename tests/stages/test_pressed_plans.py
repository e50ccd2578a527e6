"""Presses from plan to evaluation on a tiny model: budgets, bytes found, prompts in the protocol, refusals."""

from __future__ import annotations

import json
import shutil

import pytest

from aatc_cli.artifacts.plan import Plan
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.transform import Transform
from aatc_cli.config import make_budget
from aatc_cli.core.layout import packed_tokens
from aatc_cli.core.press.layout import PressLayout
from aatc_cli.errors import AatcError, ArtifactError, UsageError
from aatc_cli.evals.subjects import Subject
from aatc_cli.methods import registry
from aatc_cli.methods.press import Press
from aatc_cli.methods.registry import PRESSES
from aatc_cli.profiles import available, load_recipe
from aatc_cli.stages.allocate import allocate, check
from aatc_cli.stages.whiten import Wanted, whiten
from aatc_cli.studies.matching import Matcher

NAMES = [press.name for press in PRESSES if not press.nothing and not press.says_classes]
SIZE = {"length": 240, "limit": 1, "prompt": 200, "first": 200}


@pytest.fixture(scope="module")
def run(base_run, tmp_path_factory) -> Run:
    """A run with the Transforms that codes of single kv heads need."""
    found = Run(shutil.copytree(base_run, tmp_path_factory.mktemp("pressed") / "run"))
    wanted = Wanted.by(load_recipe("paper+kvzip-0.5"))
    whiten(found, transform_stats=found.stats(), rate_stats=found.stats(), wanted=wanted)
    return found


def planned(run: Run, name: str, bits: float) -> Subject:
    plan = allocate(run, load_recipe(name), [make_budget(bits=bits)])[0]
    return Subject(plan.recipe, plan)


@pytest.mark.parametrize("name", NAMES)
def test_eviction_alone_from_plan_to_divergence(measured, run, name, tiny_llama, corpus):
    subjects = [planned(run, name, bits) for bits in (2.0, 8.0)]
    for subject, bits in zip(subjects, (2.0, 8.0), strict=True):
        assert subject.plan.layout.bits_packed == pytest.approx(bits, abs=0.01)
        assert subject.plan.layout.bits_packed <= bits + 1e-9
        assert check(subject.plan) == []
        with pytest.raises(AatcError, match=f"recipe {name} has no packed cache: its press"):
            subject.plan.codecs("cpu")
    found = measured("kl", run, tiny_llama, subjects, text=[corpus], **SIZE)
    assert all(0 < evaluation.kl_mean < 20 for evaluation in found)
    # one window of a random model says that more tokens are better for half of the tokens, not that they are for few
    assert found[1].kl_mean < 1.1 * found[0].kl_mean
    for subject, evaluation in zip(subjects, found, strict=True):
        assert evaluation.protocol["prompt"] == 200
        assert evaluation.bits_packed <= float(evaluation.budget) + 1e-9
        # 68 tokens are packed behind the prompt: whole ones are kept
        assert evaluation.kept_share == pytest.approx(subject.plan.keep, abs=1 / 64)
        law = subject.plan.layout.of_prompt(200)
        # shares that are not even begin more blocks of values that are part empty
        spare = sum(values.value_block_bytes for layer in law.heads for _, values in layer)
        assert evaluation.bytes_total <= law.bytes(240) + spare


@pytest.mark.parametrize("press", ["h2o", "snapkv", "expected-attention", "kvzip"])
def test_a_code_behind_a_press_stays_within_its_budget(measured, run, press, tiny_llama, corpus):
    """The code gets what the press leaves, and where heads share places it is by bytes."""
    subject = planned(run, f"paper+{press}-0.5", 3.0)
    layout = subject.plan.layout
    assert isinstance(layout, PressLayout)
    assert 2.9 < layout.bits_packed <= 3.0 + 1e-9
    assert subject.plan.keep == 0.5
    found = measured("kl", run, tiny_llama, [subject], text=[corpus], **SIZE)[0]
    assert found.kl_mean > 0
    # a head of few tokens rounds them to whole ones
    assert found.bits_packed <= 3.0 * (1 + 1 / 32)
    assert abs(found.kept_share - 0.5) < 0.2


@pytest.mark.parametrize("press", ["snapkv", "kvzip", "streaming-llm"])
def test_a_number_of_tokens_stays_whatever_the_text(measured, run, press, tiny_llama, corpus):
    """keep as a number: budgets are bits of a number that stays, and of longer texts ever less is held."""
    subject = planned(run, f"paper+{press}-24t", 8.0)
    layout = subject.plan.layout
    assert subject.plan.keep == 24
    assert check(subject.plan) == []
    assert 7.9 < layout.bits_packed <= 8.0 + 1e-9
    # from here on only what says which tokens stay grows: a bit for every token and kv head, in whole bytes
    more = layout.bytes(4096) - layout.bytes(2048)
    assert more == 2048 // 8 * layout.geometry.layers * layout.geometry.kv_heads
    found = measured("kl", run, tiny_llama, [subject], text=[corpus], **SIZE)[0]
    packed = packed_tokens(200 if press != "streaming-llm" else 240, subject.recipe.window)
    assert found.kept_share == pytest.approx(24 / packed, abs=1e-2)
    assert found.bits_packed < 0.6 * layout.bits_packed


def test_a_budget_in_bytes_and_one_that_nothing_fits(run):
    plan = allocate(run, load_recipe("paper+snapkv-0.25"), [make_budget(ratio=6.0, context=4096)])[0]
    assert plan.layout.ratio(4096) >= 6.0
    share = allocate(run, load_recipe("snapkv"), [make_budget(ratio=6.0, context=4096)])[0]
    assert 6.0 <= share.layout.ratio(4096) < 6.1
    with pytest.raises(AatcError, match="nothing of h2o fits this budget"):
        allocate(run, load_recipe("h2o"), [make_budget(bits=0.02)])


def test_a_prompt_is_another_protocol(measured, run, tiny_llama, corpus):
    subject = planned(run, "h2o", 4.0)
    asked = {"text": [corpus], "length": 240, "limit": 1, "first": 200}
    one, two = (measured("kl", run, tiny_llama, [subject], **asked, prompt=prompt)[0] for prompt in (0, 200))
    assert "prompt" not in one.protocol
    assert one.file_name != two.file_name
    assert one.kl_mean != two.kl_mean
    seen = measured("perplexity", run, tiny_llama, [subject], text=[corpus], length=240, limit=1, prompt=190)[0]
    assert seen.first_position == 190


def test_what_is_refused(measured, run, tiny_llama, corpus, tmp_path):
    late, early = planned(run, "snapkv", 2.0), planned(run, "h2o", 2.0)
    asked = {"text": [corpus], "length": 240, "limit": 1}
    with pytest.raises(AatcError, match="press snapkv of snapkv-2 acts when a prompt ends"):
        measured("kl", run, tiny_llama, [late], **asked)
    with pytest.raises(UsageError, match="--first 150 lies in the prompt"):
        measured("kl", run, tiny_llama, [early], **asked, prompt=200, first=150)
    with pytest.raises(UsageError, match="leaves no position"):
        measured("kl", run, tiny_llama, [early], **asked, prompt=239, first=239)
    for name, says in (
        ("kivi+h2o-0.5", "goes with codes of one token"),
        ("kvtc-global+h2o-0.5", "goes with codes of one token"),
        ("paper+snapkv", "needs keep"),
        ("loss-aware-tiles+h2o-0.5", "take tokens out of tiles again"),
        ("fp16+h2o", "this recipe allocates nothing"),
        ("paper+nobody-0.5", "'nobody' is none of none, streaming-llm"),
        ("paper+h2o-7", "a share is at most 1"),
        ("paper+h2o-0.5t", "a share is at most 1"),
        ("paper+h2o-7.5t", "a whole number of tokens, not 7.5"),
        ("loss-aware-tiles+priced-64t", "a share, and no number of tokens"),
        ("nobody+h2o-0.5", "no recipe named 'nobody'"),
    ):
        with pytest.raises(AatcError, match=says):
            load_recipe(name)
    plain = tmp_path / "mine.toml"
    text = 'name = "mine"\nsummary = "x"\n{}allocator = "one-width"\nquantizer = "grouped-minmax"\n'
    mixed = 'press = "h2o"\ntransform = "hadamard"\nkeep = 0.5\n'
    for line, says in (("keep = 0.5\n", 'press "none"'), (mixed, "per-head")):
        plain.write_text(text.format(line) + 'key_weight = "none"\nvalue_weight = "none"\nmin_bits = 1\nmax_bits = 8\n')
        with pytest.raises(AatcError, match=says):
            load_recipe(str(plain))


def test_a_damaged_share_is_named(run, tmp_path):
    copy = Run(tmp_path / "run")
    planned(run, "h2o", 2.0)
    shutil.copytree(run.root, copy.root)
    manifest = copy.plan("h2o", make_budget(bits=2.0)) / "manifest.json"
    data = json.loads(manifest.read_text("utf-8"))
    assert 0 < data["results"]["keep"] < 0.2
    manifest.write_text(manifest.read_text("utf-8").replace('"keep"', '"kept"'), "utf-8")
    with pytest.raises(ArtifactError):
        Plan.open(copy.plan("h2o", make_budget(bits=2.0)))


class OldestStay(Press):
    """One class, and one place in the registry: a press of one's own."""

    name, meaning, acts = "oldest", "the oldest tokens", "flush"

    def score(self, seen):
        return -seen.places.double().expand(seen.held.shape)


def test_a_press_of_ones_own_is_one_class_and_one_line(measured, run, tiny_llama, corpus, monkeypatch):
    monkeypatch.setattr(registry, "PRESSES", (*registry.PRESSES, OldestStay()))
    monkeypatch.setitem(registry.AXES, "press", registry.PRESSES)
    subject = planned(run, "paper+oldest-0.5", 3.0)
    [found] = measured("kl", run, tiny_llama, [subject], text=[corpus], **SIZE)
    assert found.kl_mean > 0
    assert found.kept_share == pytest.approx(0.5, abs=1 / 64)


def test_a_study_finds_the_share_of_packed_bits(run):
    transform = Transform.open(run.transform("identity"))
    budget = Matcher.of(transform, load_recipe("h2o")).budget(2.0)
    assert planned(run, "h2o", budget.value).plan.layout.bits_packed == pytest.approx(2.0, abs=0.01)


def test_recipes_without_a_press_write_nothing_of_it():
    for name in available("recipes"):
        recipe = load_recipe(name)
        assert ("press" in recipe.model_dump()) is recipe.pressed
        assert ("keep" in recipe.model_dump()) is recipe.pressed
    assert load_recipe("paper+snapkv-0.25").transform_name == "whiten-keys-per-head-values-per-head"
