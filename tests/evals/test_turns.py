"""turns: the answers of every turn against a live cache that is fed the whole conversation, and the command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import CollectSettings
from aatc_cli.config import make_budget
from aatc_cli.evals.opened import Opened, open_subjects
from aatc_cli.evals.subjects import EvalOptions, Subject
from aatc_cli.evals.turns.conversation import conversations
from aatc_cli.evals.turns.measure import measure
from aatc_cli.evals.turns.settings import Settings
from aatc_cli.models.loading import find_model
from aatc_cli.profiles import TextMixture, load_recipe
from aatc_cli.runtime.attach import attach
from aatc_cli.runtime.prefill import shared_prefill
from aatc_cli.stages.allocate import allocate
from aatc_cli.stages.collect import CollectOptions, collect
from aatc_cli.stages.whiten import Wanted, whiten
from aatc_cli.text.ruler.needles import essay_words

CONTEXT = 600


@pytest.fixture(scope="module")
def opened(new_model: Any, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """A plan of the paper beside the model's own cache, of a model with room for a conversation in bytes."""
    place = tmp_path_factory.mktemp("turns")
    model = new_model(place / "tiny", max_position_embeddings=1600)
    run, source = Run(place / "run"), find_model(str(model))
    mixture = TextMixture(sources=[str(corpus)], samples=4, length=260)
    settings = CollectSettings(samples=4, length=260)
    collect(run, "stats", source, mixture, settings, CollectOptions())
    recipe = load_recipe("paper")
    whiten(run, transform_stats=run.stats(), rate_stats=run.stats(), wanted=Wanted.by(recipe))
    plan = allocate(run, recipe, [make_budget(bits=3)])[0]
    subjects = [Subject(load_recipe("fp16"), None), Subject(recipe, plan)]
    return open_subjects("turns", run, source, subjects, EvalOptions(dtype="float32", batch=2))


@torch.no_grad()
def test_answers_are_those_of_a_live_cache(opened: Opened, corpus: Path) -> None:
    """The first turn as a prompt, then every token by itself; log-probabilities of each answer by hand."""
    settings = Settings(text=(str(corpus),), context=(CONTEXT,), turns=2, between=4, limit=1)
    results = measure(opened, settings)
    model, tokenizer = opened.model(), opened.tokenizer
    job = conversations(essay_words(corpus.read_text()), CONTEXT, settings, tokenizer)
    for place, (sample, reference) in enumerate(zip(job.samples, job.references, strict=True)):
        ids = torch.tensor([sample.tokens])
        with attach(model, opened.subjects[1].plan) as session:
            mask = torch.ones_like(ids)
        logits, cache = shared_prefill([session], ids, mask, mask.cumsum(-1) - 1)[0]
        steps = [logits[0]]
        with attach(model, opened.subjects[1].plan) as again:
            for token in reference.tokens[:-1]:
                out = model(torch.tensor([[token]]), use_cache=True, **{again.keyword: cache})
                steps.append(out.logits[0, -1])
        plain = model(torch.tensor([sample.tokens + reference.tokens])).logits[0, len(sample.tokens) - 1 : -1]
        for result, each in zip(results, (plain, torch.stack(steps)), strict=True):
            right = torch.tensor(reference.tokens)[:, None]
            found = each.double().log_softmax(-1).gather(1, right)[:, 0]
            for turn, (begin, end) in enumerate(reference.spans, 1):
                row = result.row(f"turn {turn}", CONTEXT)
                assert row is not None
                assert row.logprobs is not None
                assert row.logprobs[place] == pytest.approx(float(found[begin:end].sum()), rel=1e-3)


def test_every_turn_asks_for_another_number_of_the_first_text(opened: Opened, corpus: Path) -> None:
    settings = Settings(text=(str(corpus),), turns=4, between=12, limit=3)
    tokenizer = opened.tokenizer
    job = conversations(essay_words(corpus.read_text()), 1024, settings, tokenizer)
    lengths = [len(sample.tokens) for sample in job.samples]
    assert 1000 < min(lengths) <= max(lengths) <= 1024 - 12
    for sample, reference in zip(job.samples, job.references, strict=True):
        first, rest = sample.prompt.text, tokenizer.raw.decode(reference.tokens)
        answers = [tokenizer.raw.decode(reference.tokens[begin:end]) for begin, end in reference.spans]
        assert len(set(answers)) == 4
        assert all(len(answer) == 7 and first.count(answer) == 1 for answer in answers)
        assert rest.count("mentioned in the first text?") == 3
        # asked in another order than they stand in the text, of keys that stand there
        for answer in answers[1:]:
            key = rest.split(f" mentioned in the first text is {answer}")[0].rsplit(" for ", 1)[1]
            assert f"for {key} is: {answer}." in first


def test_the_command(opened: Opened, corpus: Path, aatc: Callable[..., Any]) -> None:
    where = ("--run", opened.run.root, "--model", opened.source.reference, "--text", corpus, "--dtype", "float32")
    asked = ("--context", CONTEXT, "--turns", 2, "--between", 0, "--limit", 2, "--recipe", "fp16")
    found = aatc("eval", "turns", *where, *asked, "--json")
    assert found.code == 0, found.err
    assert [row["subtask"] for row in found.json[0]["rows"]] == ["turn 1", "turn 2"]
    again = aatc("eval", "turns", *where, *asked)
    assert "nothing to do" in again.err
    assert "log-probability of the right answer" in again.out
