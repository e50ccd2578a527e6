"""Every published recipe answers RULER's prompts through its simulated cache, from Stats to the result file."""

from __future__ import annotations

import pytest

from aatc_cli.artifacts.evaluation import read_measurement
from aatc_cli.artifacts.run import Run
from aatc_cli.evals.answers import asking
from aatc_cli.evals.answers.result import BenchmarkResult
from aatc_cli.profiles import available, load_recipe
from aatc_cli.studies.definition import Study
from aatc_cli.studies.methods import Methods

# no essay and no long instruction: the shortest prompts there are
CONTEXT, SUBTASK = 1024, "niah_single_1"
# a cache that is predicted is stored and read as a whole: tests/stages/test_stored.py
LIVE = [name for name in available("recipes") if not load_recipe(name).choices.prediction.predicts]
# and tiles need Stats that ranked tokens in their window: tests/methods/test_priced.py
HELD = [name for name in LIVE if load_recipe(name).tokens is None]
PUBLISHED = [name for name in HELD if not load_recipe(name).packed and name != "fp16"]


@pytest.fixture(scope="module")
def model(new_model, tmp_path_factory):
    """A tiny model with room for two prompts in bytes and heads of 32, whose flush blocks fill groups of 64."""
    folder = tmp_path_factory.mktemp("generate") / "tiny"
    return new_model(folder, max_position_embeddings=2400, num_hidden_layers=2, head_dim=32)


@pytest.fixture(scope="module")
def run(model, with_gradients, tmp_path_factory) -> Run:
    return with_gradients(tmp_path_factory.mktemp("generate-run"), model)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_method_generates(measured, name, run, model, monkeypatch):
    recipe = load_recipe(name)
    bits = {"palu": 4.0, "fp8": 8.0, "ratequant": 3.0, "kvtc": 3.0, "kvtc-global": 3.0, "kvarn-k4v2": 3.0}.get(
        name, 2.0
    )
    study = Study.model_validate(
        {"name": "s", "summary": "s", "methods": [{"recipe": name, "budgets": [bits]}], "tasks": [{"task": "gsm8k"}]}
    )
    [entrant] = Methods(run).entrants(study)
    if entrant.subject is None and recipe.quantizer in ("quanto", "hqq"):
        pytest.skip(entrant.row.reason)
    assert entrant.subject is not None, entrant.row.reason
    asked, generate = [], asking.generate

    def watched(*arguments):
        # in full, and not only up to a right answer: every step goes through the cache
        asked.append((arguments[3], generate(*arguments[:-1], lambda row, tokens: False)))
        return asked[-1][1]

    monkeypatch.setattr(asking, "generate", watched)
    [result] = measured("ruler", run, model, [entrant.subject], context=(CONTEXT,), limit=1, subtask=(SUBTASK,))
    [[caches, [[tokens]]]] = asked
    assert caches[0].kind == "simulated"
    assert len(tokens) == 128
    assert result.simulated is True
    assert [(row.subtask, row.context, row.samples, len(row.scores)) for row in result.rows] == [
        (SUBTASK, CONTEXT, 1, 1)
    ]
    kept = read_measurement(run.evals / result.file_name, BenchmarkResult)
    assert kept.rows == result.rows
    assert kept.plan == entrant.row.plan
