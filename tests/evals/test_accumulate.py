"""accumulate: a live cache fed one by one against the parallel evaluator, and what each way of writing scores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aatc_cli.artifacts.evaluation import read_measurement, write_evaluation
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import CollectSettings
from aatc_cli.artifacts.study import StudyCell
from aatc_cli.config import make_budget
from aatc_cli.evals.accumulate.decoding import Draw
from aatc_cli.evals.accumulate.measure import measure
from aatc_cli.evals.accumulate.result import Result
from aatc_cli.evals.accumulate.settings import Settings
from aatc_cli.evals.accumulate.table import tables
from aatc_cli.evals.forced.passes import forced_logits
from aatc_cli.evals.forced.subject_method import method_of
from aatc_cli.evals.opened import Opened, open_subjects
from aatc_cli.evals.study_scores import cell_score
from aatc_cli.evals.subjects import EvalOptions, Subject
from aatc_cli.models.adapter import attention_sites
from aatc_cli.models.loading import find_model
from aatc_cli.profiles import TextMixture, load_recipe
from aatc_cli.runtime.second_pass import Reader
from aatc_cli.stages.allocate import allocate
from aatc_cli.stages.collect import CollectOptions, collect
from aatc_cli.stages.whiten import Wanted, whiten
from aatc_cli.text.windows import consecutive_windows

PROMPT, STEPS = 150, 60


@pytest.fixture(scope="module")
def opened(tiny_llama: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """The model's own cache, a plan with a packed cache and a method without, in float64."""
    run = Run(tmp_path_factory.mktemp("accumulate") / "run")
    settings = CollectSettings(samples=4, length=260, rows=64, fisher=4)
    source = find_model(str(tiny_llama))
    collect(run, "stats", source, TextMixture(sources=[str(corpus)], samples=4, length=260), settings, CollectOptions())
    subjects = [Subject(load_recipe("fp16"), None)]
    for name, bits in (("paper", 3), ("kivi", 2)):
        recipe = load_recipe(name)
        whiten(run, transform_stats=run.stats(), rate_stats=run.stats(), wanted=Wanted.by(recipe))
        subjects.append(Subject(recipe, allocate(run, recipe, [make_budget(bits=bits)])[0]))
    return open_subjects("accumulate", run, source, subjects, EvalOptions(dtype="float32", batch=2))


@pytest.fixture(scope="module")
def results(opened: Opened, corpus: Path) -> list[Result]:
    return measure(opened, Settings(text=(str(corpus),), prompt=PROMPT, tokens=STEPS, limit=3))


def test_a_cache_built_token_by_token_is_that_of_the_evaluator(
    opened: Opened, results: list[Result], corpus: Path
) -> None:
    """KL along the text, from one parallel pass behind the same prompt."""
    model, tokenizer = opened.model(), opened.tokenizer
    sites = attention_sites(model)
    windows = consecutive_windows(str(corpus), tokenizer.encode, length=PROMPT + STEPS + 1, limit=3, bos=None).tokens
    positions = torch.arange(PROMPT, PROMPT + STEPS)
    for subject, result in zip(opened.subjects[1:], results[1:], strict=True):
        method = method_of(subject, sites, opened.options, Reader(tokenizer.encode))
        with torch.no_grad():
            p = model(windows).logits[:, positions].double().log_softmax(-1)
        q = forced_logits(model, sites, method, windows, positions, PROMPT).double().log_softmax(-1)
        kl, row = (p.exp() * (p - q)).sum(-1), result.row("text")
        assert row is not None
        assert row.kl_windows == pytest.approx(kl.mean(1).tolist(), rel=2e-3)
        assert row.kl_max == pytest.approx(float(kl.max()), rel=1e-2)
        assert row.kl_p50 == pytest.approx(float(kl.flatten().quantile(0.5)), rel=2e-2)
        quarters = [float(part.mean()) for part in kl.mean(0).split(STEPS // 4)]
        assert row.stretches == pytest.approx(quarters, rel=2e-3)
        right = windows[:, PROMPT + 1 :, None]
        change = (p.gather(-1, right) - q.gather(-1, right)).mean()
        assert row.nll_change == pytest.approx(float(change), rel=1e-2, abs=1e-4)
        assert row.tokens == 3 * STEPS


def test_given_tokens_read_at_once_are_those_fed_one_by_one(
    opened: Opened, results: list[Result], corpus: Path
) -> None:
    settings = Settings(text=(str(corpus),), prompt=PROMPT, tokens=STEPS, limit=3, at_once=True)
    given = settings.model_copy(update={"way": ("text", "uncompressed")})
    for found, live in zip(measure(opened, given), results, strict=True):
        assert found.cache is None
        assert found.file_name != live.file_name
        for row in found.rows:
            other = live.row(row.way)
            assert other is not None
            assert row.kl_windows == pytest.approx(other.kl_windows, rel=2e-3, abs=1e-9)
            assert row.kl_p90 == pytest.approx(other.kl_p90, rel=1e-2, abs=1e-9)
            assert row.nll_uncompressed == pytest.approx(other.nll_uncompressed, rel=1e-5)
            assert row.tokens == other.tokens


def test_the_models_own_cache_is_no_change(results: list[Result]) -> None:
    """Whoever writes: it only differs from one pass by rounding, and it writes what the uncompressed model does."""
    own, others = results[0], results[1:]
    assert [row.way for row in own.rows] == ["text", "own", "uncompressed"]
    assert max(row.kl_max for row in own.rows) < 1e-6
    assert own.row("own").nll == pytest.approx(own.row("uncompressed").nll, rel=1e-5)
    # the uncompressed model writes once, and every cache is fed the same
    assert len({round(result.row("uncompressed").nll_uncompressed, 5) for result in results}) == 1
    assert all(row.kl_mean > 1e-4 for result in others for row in result.rows)
    assert others[0].row("own").nll_uncompressed != pytest.approx(own.row("own").nll_uncompressed, rel=1e-3)


def test_what_a_model_writes_is_drawn_from_its_own_distribution() -> None:
    """Shares of many draws against the softmax they are drawn from; greedy at temperature 0."""
    logits = torch.tensor([[0.3, -1.0, 2.0, 0.0]])
    many = Draw(torch.rand(1, 4000, generator=torch.Generator().manual_seed(1), dtype=torch.float64), 0.7)
    drawn = torch.stack([many(step, logits)[0] for step in range(4000)])
    shares = torch.bincount(drawn, minlength=4) / 4000
    assert shares.tolist() == pytest.approx((logits / 0.7).softmax(-1)[0].tolist(), abs=0.02)
    assert int(Draw(many.numbers, 0.0)(0, logits)) == 2
    # every window draws by itself, whoever stands beside it
    pair, one = Draw.of(3, range(4, 6), 5, 1.0), Draw.of(3, range(5, 6), 5, 1.0)
    assert torch.equal(pair.numbers[1:], one.numbers)


def test_files_tables_and_the_command(
    opened: Opened, results: list[Result], corpus: Path, aatc: Callable[..., Any], tiny_llama: Path
) -> None:
    only = results[1].model_copy(update={"rows": results[1].rows[1:]})
    write_evaluation(opened.run.root / "studies" / "apart" / "evals", only)
    cell = StudyCell(row="paper-3", task="accumulate", file=f"studies/apart/evals/{only.file_name}")
    score = cell_score(opened.run.root, cell)
    assert score is not None
    assert score.mean == results[1].rows[1].kl_mean
    path = opened.run.evals / results[1].file_name
    assert read_measurement(path, Result) == results[1]
    shown = tables(results)
    assert [len(table.rows) for table in shown] == [3, 3, 3]
    assert "what the compressed cache writes" in shown[1].title
    where = ("--run", opened.run.root, "--model", tiny_llama, "--text", corpus, "--dtype", "float32", "--batch", 2)
    asked = ("--prompt", PROMPT, "--tokens", STEPS, "--limit", 3, "--recipe", "paper", "--budget", 3)
    again = aatc("eval", "accumulate", *where, *asked, "--json")
    assert again.code == 0, again.err
    assert "nothing to do" in again.err
    assert again.json[0]["rows"][0]["kl_mean"] == results[1].rows[0].kl_mean
