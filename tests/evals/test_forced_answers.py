"""Forced answers: what greedy generation with a live cache answers is, forced, found; and what is counted of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import CollectSettings
from aatc_cli.config import make_budget
from aatc_cli.evals.answers.forced import Forcer, forced_answers
from aatc_cli.evals.answers.generation import Batch, generate
from aatc_cli.evals.caches import session_of
from aatc_cli.evals.opened import Opened, open_subjects
from aatc_cli.evals.ruler.job import Job
from aatc_cli.evals.subjects import EvalOptions, Subject
from aatc_cli.models.compressed import cache_keyword
from aatc_cli.models.loading import find_model
from aatc_cli.profiles import TextMixture, load_recipe
from aatc_cli.runtime.prefill import shared_prefill
from aatc_cli.stages.allocate import allocate
from aatc_cli.stages.collect import CollectOptions, collect
from aatc_cli.stages.whiten import Wanted, whiten
from aatc_cli.text.ruler.prompt import Prompt, Reference, Sample, reference_of

# tiles leave after 196, 260, ... tokens: behind the shorter prompts one leaves while the answer is written
LENGTHS = (250, 250, 205)
ROOM = 24


@pytest.fixture(scope="module")
def opened(tiny_llama: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """Plans of tiles, of one class, and of a method that has no packed cache, beside the model's own."""
    run = Run(tmp_path_factory.mktemp("forced") / "run")
    settings = CollectSettings(samples=4, length=260, rows=64, fisher=4)
    source = find_model(str(tiny_llama))
    collect(run, "stats", source, TextMixture(sources=[str(corpus)], samples=4, length=260), settings, CollectOptions())
    subjects = [Subject(load_recipe("fp16"), None)]
    for name, bits in (("loss-aware-tiles", 1.5), ("loss-aware", 2), ("kivi", 2)):
        recipe = load_recipe(name)
        whiten(run, transform_stats=run.stats(), rate_stats=run.stats(), wanted=Wanted.by(recipe))
        subjects.append(Subject(recipe, allocate(run, recipe, [make_budget(bits=bits)])[0]))
    return open_subjects("ruler", run, source, subjects, EvalOptions(dtype="float32", batch=2))


def job_of(references: list[Reference]) -> Job:
    draw = torch.Generator().manual_seed(5)
    samples = [
        Sample(Prompt("", "", ("x",)), torch.randint(0, 256, (length,), generator=draw).tolist()) for length in LENGTHS
    ]
    return Job("niah_single_1", 300, "string_match_all", ROOM, samples, "", references)


def greedy(opened: Opened, subject: Subject, samples: list[Sample]) -> list[list[int]]:
    """What the model writes with the subject's live cache, prompt by prompt."""
    model = opened.model()
    session = session_of(subject, model, opened.options)
    found = []
    for sample in samples:
        batch = Batch.of([sample.tokens], torch.device("cpu"))
        [[tokens]] = generate(
            model,
            cache_keyword(model),
            batch,
            [session],
            lambda b: shared_prefill([session], b.ids, b.mask, b.positions),
            ROOM,
            frozenset(),
            lambda row, tokens: False,
        )
        found.append(tokens)
    return found


@pytest.mark.parametrize("which", range(4), ids=["fp16", "tiles", "one-class", "kivi"])
def test_what_is_generated_is_found_when_it_is_forced(opened: Opened, which: int) -> None:
    subject = opened.subjects[which]
    written = greedy(opened, subject, job_of([]).samples)
    assert all(len(tokens) == ROOM for tokens in written)
    whole = [Reference(tokens, ((0, ROOM),)) for tokens in written]
    [found], _ = Forcer(opened).answers(job_of(whole), [subject])
    assert [answer.score for answer in found] == [1.0, 1.0, 1.0]
    # one token that is not the most likely, in the second of two strings: the first is found, the second is not
    broken = [[*tokens[:-1], (tokens[-1] + 1) % 256] for tokens in written]
    halves = [Reference(tokens, ((0, 10), (10, ROOM))) for tokens in broken]
    [found], _ = Forcer(opened).answers(job_of(halves), [subject])
    assert [answer.score for answer in found] == [0.5, 0.5, 0.5]


def test_batches_and_neighbours_change_no_answer(opened: Opened) -> None:
    """All subjects at once in batches of two, against one subject and one prompt at a time."""
    draw = torch.Generator().manual_seed(9)
    lengths = (5, ROOM, 11)
    references = [Reference(torch.randint(0, 256, (n,), generator=draw).tolist(), ((1, 4), (4, n))) for n in lengths]
    together, seconds = Forcer(opened).answers(job_of(references), opened.subjects)
    assert len(seconds) == 4
    for subject, found in zip(opened.subjects, together, strict=True):
        for place in range(3):
            whole = job_of(references)
            alone = Job("", 300, whole.metric, ROOM, [whole.samples[place]], "", [references[place]])
            [[one]], _ = Forcer(opened).answers(alone, [subject])
            assert one.logprob == pytest.approx(found[place].logprob, rel=1e-4)
    # a plan is no other model: codes of two bits are seen in the likelihoods
    assert len({round(found[1].logprob, 3) for found in together}) == 4


def test_what_is_counted_of_an_answer() -> None:
    """By hand: of four tokens the first is a separator, two belong to the first string, one to the second."""
    logits = torch.log(torch.tensor([[0.1, 0.9], [0.25, 0.75], [0.4, 0.6], [0.8, 0.2]], dtype=torch.float64))
    # another answer before it, which is shorter
    references = [Reference([1, 1], ((0, 2),)), Reference([0, 1, 1, 1], ((1, 3), (3, 4)))]
    short, found = forced_answers(torch.stack((logits, logits)), references)
    assert (short.score, short.right) == (1.0, 1.0)
    assert short.logprob == pytest.approx(float(torch.log(torch.tensor(0.9 * 0.75, dtype=torch.float64))))
    assert found.score == 0.5
    assert found.logprob == pytest.approx(float(torch.log(torch.tensor(0.75 * 0.6 * 0.2, dtype=torch.float64))))


def test_strings_of_an_answer_are_told_from_what_joins_them() -> None:
    def encode(prompt: Prompt) -> list[int]:
        return list((prompt.text + prompt.prefix).encode())

    prompt = Prompt("Which?", " They are:", ("ABC", "DE"))
    found = reference_of(Sample(prompt, encode(prompt)), ", ", encode, lambda ids: bytes(ids).decode())
    assert bytes(found.tokens) == b" ABC, DE"
    assert [bytes(found.tokens[begin:end]) for begin, end in found.spans] == [b"ABC", b"DE"]


def test_a_tokenizer_that_joins_prompt_and_answer_is_refused() -> None:
    def encode(prompt: Prompt) -> list[int]:
        return [len(prompt.text + prompt.prefix)]

    prompt = Prompt("Which?", " It is", ("1",))
    with pytest.raises(Exception, match="writes a prompt in other tokens"):
        reference_of(Sample(prompt, encode(prompt)), ", ", encode, str)


@pytest.fixture
def asked(new_model: Any, corpus: Path, tmp_path: Path, aatc: Any) -> tuple[Any, ...]:
    """A run with a plan, and the options that ask it, of a model with room for prompts in bytes."""
    model = new_model(tmp_path / "tiny", max_position_embeddings=1100)
    where = ("--run", tmp_path / "run")
    common = ("--model", model, "--text", corpus, "--samples", 4, "--length", 64, "--rows", 64)
    for command in (("collect", *common), ("whiten",), ("allocate", "--budget", 3)):
        assert aatc(*command, *where).code == 0
    return ("eval", "ruler", "--mode", "forced", "--model", model, *where, "--recipe", "fp16", "--recipe", "paper")


def test_the_command(aatc: Callable[..., Any], refuses: Callable[..., Any], asked: tuple[Any, ...]) -> None:
    given = (*asked, "--budget", 3, "--context", 1024, "--limit", 2)
    found = aatc(*given, "--subtask", "niah_single_1", "--subtask", "fwe", "--batch", 2, "--json")
    assert found.code == 0, found.err
    for result in found.json:
        assert (result["benchmark"], result["cache"], result["simulated"]) == ("ruler-forced", None, False)
        [row] = result["rows"]
        assert (row["subtask"], row["samples"], row["score"]) == ("niah_single_1", 2, 0.0)
        assert row["logprob"] == pytest.approx(sum(row["logprobs"]) / 2)
        assert row["logprob"] < -5
        assert "no one wording" in result["left_out"]["fwe at 1024"]
    assert found.json[1]["rows"][0]["calibration_share"] == 0.0
    table = aatc(*given, "--subtask", "niah_single_1")
    assert "log-probability of the right answer" in table.out
    assert table.err.count("nothing to do") == 2
    refuses(*given, "--cache", "packed", says=("read without a cache",), folder=asked[7], code=2)
