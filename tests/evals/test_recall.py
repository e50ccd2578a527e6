"""recall: the tokens it reads against a live cache fed token by token, its means by hand, and the command."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from aatc_cli.artifacts.evaluation import read_measurement
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import CollectSettings
from aatc_cli.config import make_budget
from aatc_cli.evals.opened import open_subjects
from aatc_cli.evals.recall.measure import measure
from aatc_cli.evals.recall.parts import rows_of
from aatc_cli.evals.recall.result import RecallToken, Result
from aatc_cli.evals.recall.settings import Settings
from aatc_cli.evals.recall.table import tables
from aatc_cli.evals.subjects import EvalOptions, Subject
from aatc_cli.models.loading import find_model
from aatc_cli.profiles import TextMixture, load_recipe
from aatc_cli.runtime.attach import attach
from aatc_cli.stages.allocate import allocate
from aatc_cli.stages.collect import CollectOptions, collect
from aatc_cli.stages.whiten import Wanted, whiten
from aatc_cli.text.mentions import mentions

LENGTH, GAP = 420, 200
FILLER = "and so on it goes for ever with all of that "


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two windows of bytes: a name and a number in the first, a name in the second."""
    first = f"it was Zelda who came in 1987 {FILLER * 6}when Zelda left in 1987 {FILLER * 9}"[:LENGTH]
    second = f"all that Milo knew {FILLER * 5}{FILLER}of Milo was so {FILLER * 9}"[:LENGTH]
    path = tmp_path_factory.mktemp("text") / "names.txt"
    path.write_text(first + second)
    return path


@pytest.fixture(scope="module")
def results(tiny_llama: Path, corpus: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """Results of the model's own cache, tiles, and a method without packed form; and what they were asked of."""
    run = Run(tmp_path_factory.mktemp("recall") / "run")
    settings = CollectSettings(samples=4, length=260, rows=64, fisher=4)
    source = find_model(str(tiny_llama))
    collect(run, "stats", source, TextMixture(sources=[str(corpus)], samples=4, length=260), settings, CollectOptions())
    subjects = [Subject(load_recipe("fp16"), None)]
    for name, bits in (("loss-aware-tiles", 1.5), ("kivi", 2)):
        recipe = load_recipe(name)
        whiten(run, transform_stats=run.stats(), rate_stats=run.stats(), wanted=Wanted.by(recipe))
        subjects.append(Subject(recipe, allocate(run, recipe, [make_budget(bits=bits)])[0]))
    opened = open_subjects("recall", run, source, subjects, EvalOptions(dtype="float32", batch=2))
    # in float32 near ties of what tokens received, which repeated words have, rank otherwise from one way to another
    opened._model = opened.model().double()
    return opened, measure(opened, Settings(text=(str(text),), length=LENGTH, limit=2, gap=GAP))


@pytest.fixture
def in_float64() -> Iterator[None]:
    """The cache sums what tokens receive in float32 otherwise."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("which", [1, 2], ids=["tiles", "kivi"])
@torch.no_grad()
def test_tokens_are_those_of_a_live_cache(results: tuple[Any, ...], text: Path, which: int, in_float64: None) -> None:
    """Fed one by one; the classes of the first mention are read out of the packed tiles."""
    opened, found = results
    model, plan, result = opened.model(), opened.subjects[which].plan, found[which]
    data = opened.tokenizer.encode(text.read_text())
    for window in range(2):
        tokens = torch.tensor([data[window * LENGTH : (window + 1) * LENGTH]])
        with attach(model, plan) as session:
            cache = session.new_cache()
            steps = [
                model(tokens[:, place : place + 1], use_cache=True, **{session.keyword: cache}).logits[0, -1]
                for place in range(LENGTH)
            ]
        mine = [token for token in result.tokens if token.window == window]
        words = mentions(tokens[0].tolist(), opened.tokenizer.raw.decode, GAP)
        assert [(m.again + j, m.first + j) for m in words for j in range(m.size)] == [
            (token.again, token.first) for token in mine
        ]
        plain = model(tokens).logits[0].double().log_softmax(-1)
        for token in mine:
            right = int(tokens[0, token.again])
            assert right == int(tokens[0, token.first])
            own = steps[token.again - 1].double().log_softmax(-1)
            assert token.logprob == pytest.approx(float(own[right]), abs=1e-6)
            assert token.reference == pytest.approx(float(plain[token.again - 1, right]), abs=1e-6)
            assert token.unread == pytest.approx(float(plain[token.first - 1, right]), abs=1e-6)
            assert token.first_of_all == (int(own.argmax()) == right)
            assert token.agree == (int(own.argmax()) == int(plain[token.again - 1].argmax()))
        if which == 1:
            stores = [store for group in cache.state.groups for store in group.stores]
            held = []
            for store in stores:
                ((_, tiles),) = store.pages.parts(1 << 20)
                held.append(store.layer.held.unpack(tiles)[1].transpose(1, 2).flatten(2)[0])
            orders = torch.cat(held)
            for token in mine:
                classes = orders[:, token.first - 4]
                assert token.classes == pytest.approx([float((classes == k).float().mean()) for k in range(3)])


def test_the_models_own_cache_loses_next_to_nothing(results: tuple[Any, ...]) -> None:
    """Not nothing: as in kl, what fp16 packs is cast to float16."""
    _, (own, tiles, _) = results
    assert own.places == tiles.places == 3
    assert max(abs(token.reference - token.logprob) for token in own.tokens) < 0.02
    assert max(abs(token.reference - token.logprob) for token in tiles.tokens) > 0.02
    assert [row.part for row in own.rows if row.part.startswith("class")] == []
    shares = [row.tokens for row in tiles.rows if row.part.startswith("class")]
    assert sum(shares) == pytest.approx(len(tiles.tokens))
    assert own.row("names").tokens == 9
    assert own.row("numbers").tokens == 4


def token(window: int, gap: int, reference: float, own: float, **changes: Any) -> RecallToken:
    given = {
        "window": window,
        "first": 10,
        "again": 10 + gap,
        "kind": "name",
        "unread": -5.0,
        "reference": reference,
        "logprob": own,
        "first_of_reference": True,
        "first_of_all": True,
        "agree": True,
        "classes": [0.75, 0.25],
    }
    return RecallToken.model_validate(given | changes)


def test_means_and_errors_by_hand() -> None:
    """Losses 1 and 3 in one window, 2 in another: the error is of two windows, whose sums of deviations are 0 and 0."""
    three = [token(0, 300, -0.1, -1.1), token(0, 600, -0.1, -3.1, kind="number"), token(1, 300, -1.0, -3.0)]
    rows = {row.part: row for row in rows_of(three, 256)}
    assert set(rows) == {
        "all",
        "recalled",
        "names",
        "numbers",
        "gap 256 to 511",
        "gap 512 to 1023",
        "class 0",
        "class 1",
    }
    assert rows["all"].loss == pytest.approx(2.0)
    assert rows["all"].loss_stderr == pytest.approx(0.0, abs=1e-12)
    assert (rows["all"].loss_p90, rows["all"].loss_p99) == pytest.approx((3.0, 3.0))
    assert rows["recalled"].tokens == 2
    # deviations from the mean of 1.5 are -0.5 and 0.5, a window each: sqrt(2 / 1 (0.25 + 0.25)) / 2
    assert rows["gap 256 to 511"].loss == pytest.approx(1.5)
    assert rows["gap 256 to 511"].loss_stderr == pytest.approx(0.5)
    assert rows["numbers"].loss_stderr is None
    assert rows["class 0"].tokens == pytest.approx(2.25)
    assert rows["class 1"].loss == pytest.approx(2.0)
    assert rows["all"].probability == pytest.approx((math.exp(-1.1) + math.exp(-3.1) + math.exp(-3.0)) / 3)
    lost = [token(0, 300, -0.1, -1.1, first_of_all=False, agree=False), *three[1:]]
    assert rows_of(lost, 256)[0].kept == pytest.approx(2 / 3)
    assert rows_of(lost, 256)[0].agree == pytest.approx(2 / 3)


def test_the_command(results: tuple[Any, ...], tiny_llama: Path, text: Path, aatc: Any, refuses: Any) -> None:
    opened, found = results
    where = ("--model", tiny_llama, "--run", opened.run.root, "--plan", opened.subjects[1].plan.path)
    asked = ("eval", "recall", *where, "--text", text, "--length", LENGTH, "--limit", 2, "--dtype", "float32")
    again = aatc(*asked, "--gap", GAP, "--json")
    assert again.code == 0, again.err
    assert "nothing to do" in again.err
    [path] = opened.run.evals.glob("recall.loss-aware-tiles*.json")
    assert read_measurement(path, Result) == found[1]
    assert "3 second mentions" in aatc(*asked, "--gap", GAP).out
    assert tables(found)[0].rows[0][0] == "fp16"
    refuses(*asked, "--gap", 100, says=("may still be exact",), folder=opened.run.root, code=2)
    refuses(*asked, "--gap", 400, says=("has no name or number that comes again",), folder=opened.run.root)
    assert aatc("report", "--run", opened.run.root).code == 0
    page = (opened.run.root / "report" / "report.md").read_text()
    assert "3 second mentions in 2 windows of 420 tokens of names.txt" in page
    assert "| recalled |" in page or "| all |" in page
