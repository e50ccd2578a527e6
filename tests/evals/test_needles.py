"""aatc eval needles: a needle lies where it is asked to, every cache is asked, and the map is of what was answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aatc_cli.artifacts.evaluation import read_measurement, write_evaluation
from aatc_cli.artifacts.run import Run
from aatc_cli.evals.answers.interval import wilson
from aatc_cli.evals.needles.prompts import needle_samples
from aatc_cli.evals.needles.result import Result
from aatc_cli.evals.needles.table import tables

ESSAY = " ".join(f"Sentence {number} says nothing of interest to anybody." for number in range(400))


def words(prompt: Any) -> list[int]:
    return list(range(len((prompt.text + prompt.prefix).split())))


@pytest.mark.parametrize("depth", [0, 25, 50, 100])
def test_a_needle_lies_at_its_depth(depth: int) -> None:
    samples = needle_samples(ESSAY, 600, depth, 3, 0, words)
    for sample in samples:
        text, [number] = sample.prompt.text, sample.prompt.answers
        essay = text.partition("afterwards.\n")[2].rpartition("\nWhat is")[0]
        assert essay.count(number) == 1
        assert abs(essay.index(number) / len(essay) - depth / 100) < 0.04
        # the context is filled, with room for the answer
        assert 600 - 32 - 12 < len(sample.tokens) <= 600 - 32
    assert len({sample.prompt.answers for sample in samples}) == 3


def test_needles_are_the_same_at_every_depth_and_others_of_another_seed() -> None:
    shallow, deep, other = (
        [sample.prompt.answers for sample in needle_samples(ESSAY, 600, depth, 3, seed, words)]
        for depth, seed in ((0, 0), (100, 0), (0, 1))
    )
    assert shallow == deep
    assert shallow != other


@pytest.mark.parametrize(
    ("scores", "low", "high"),
    [([1.0, 1.0], 0.342, 1.0), ([0.0] * 10, 0.0, 0.278), ([1.0] * 5 + [0.0] * 5, 0.237, 0.763), ([0.5], 0.055, 0.945)],
)
def test_the_interval_is_honest_at_the_edge(scores: list[float], low: float, high: float) -> None:
    """Values of Wilson's formula; the standard error of two right answers of two is zero."""
    assert wilson(scores) == pytest.approx((low, high), abs=1e-3)


@pytest.fixture
def run(new_model: Any, corpus: Path, tmp_path: Path, aatc: Any) -> tuple[Path, Path]:
    """A run of a tiny model with room for prompts in bytes, with a plan."""
    model = new_model(tmp_path / "tiny", max_position_embeddings=1100)
    where = ("--run", tmp_path / "run")
    common = ("--model", model, "--text", corpus, "--samples", 4, "--length", 64, "--rows", 64)
    for command in (("collect", *common), ("whiten",), ("allocate", "--budget", 3)):
        assert aatc(*command, *where).code == 0
    return tmp_path / "run", model


def test_every_cache_is_asked_and_written(aatc: Any, run: tuple[Path, Path]) -> None:
    folder, model = run
    asked = ("eval", "needles", "--run", folder, "--model", model, "--context", 700, "--depth", "0,100", "--limit", 2)
    everyone = (*asked, "--recipe", "fp16", "paper", "--budget", 3)
    found = aatc(*everyone, "--json")
    assert found.code == 0, found.err
    assert [(r["recipe"], r["cache"]) for r in found.json] == [("fp16", None), ("paper", "packed")]
    for result in found.json:
        assert [(c["context"], c["depth"], c["samples"]) for c in result["cells"]] == [(700, 0, 2), (700, 100, 2)]
        for cell in result["cells"]:
            hits = [wanted in answer for wanted, answer in zip(cell["wanted"], cell["answers"], strict=True)]
            assert cell["score"] == sum(hits) / 2
            assert cell["low"] <= cell["score"] <= cell["high"]
    again = aatc(*everyone, "--json")
    assert again.err.count("nothing to do") == 2
    assert again.json == found.json
    simulated = aatc(*asked, "--budget", 3, "--cache", "simulated", "--json")
    assert simulated.code == 0, simulated.err
    assert (simulated.json[0]["cache"], simulated.json[0]["simulated"]) == ("simulated", True)
    files = sorted((folder / "evals").glob("needles.*.json"))
    assert len(files) == 3
    [stored] = [read_measurement(path, Result) for path in files if "fp16" in path.name]
    assert stored.heat == [[cell.score] for cell in stored.cells]
    [table] = tables([stored])
    assert [row[0] for row in table.rows] == ["0 %", "100 %"]
    shown = aatc("inspect", files[0])
    assert "needles found by" in " ".join(shown.out.split())


def test_a_study_forces_answers_and_goes_on_where_it_was(aatc: Any, run: tuple[Path, Path], tmp_path: Path) -> None:
    folder, model = run
    study = tmp_path / "maps.toml"
    study.write_text(
        'name = "maps"\nsummary = "maps"\nmethods = [{recipe = "fp16"}, {recipe = "paper", budgets = [3]}]\n'
        '[[tasks]]\ntask = "needles"\nmode = "forced"\ncontexts = [700]\ndepths = [0, 100]\nlimit = 2\n'
    )
    asked = ("study", study, "--run", folder, "--model", model)
    found = aatc(*asked)
    assert found.code == 0, found.err
    files = sorted((folder / "evals").glob("needles.*.json"))
    results = [read_measurement(path, Result) for path in files]
    assert [(r.recipe, r.forced, r.cache, len(r.cells)) for r in results] == [
        ("fp16", True, None, 2),
        ("paper", True, None, 2),
    ]
    for cell in (cell for result in results for cell in result.cells):
        assert len(cell.logprobs or []) == cell.samples == 2
        assert cell.answers == []
    assert results[0].cells[1].logprobs != results[1].cells[1].logprobs
    # a map that was cut off: its last cell is asked again, and is what it was
    write_evaluation(folder / "evals", results[1].model_copy(update={"cells": results[1].cells[:1]}))
    assert aatc(*asked).code == 0
    again = read_measurement(files[1], Result)
    assert [cell.logprobs for cell in again.cells] == [cell.logprobs for cell in results[1].cells]


def test_what_cannot_be_asked(refuses: Any, run: tuple[Path, Path]) -> None:
    folder, model = run
    asked = ("eval", "needles", "--run", folder, "--model", model, "--budget", 3)
    refuses(*asked, "--context", 4096, says=("4096", "1100"), folder=folder)
    refuses(*asked, "--context", 160, says=("paper-3 keeps exact",), folder=folder)
    refuses(*asked, "--context", 300, says=("does not fit into a context of 300",), folder=folder)
    refuses(*asked, "--mode", "forced", "--cache", "packed", says=("without a cache",), folder=folder, code=2)
    refuses(*asked, "--depth", 101, says=("--depth",), folder=folder, code=2)


@pytest.mark.real
def test_the_real_model_finds_a_needle(measured: Any, real_model_path: Path, tmp_path: Path) -> None:
    from aatc_cli.evals.subjects import Subject
    from aatc_cli.profiles import load_recipe

    subjects = [Subject(load_recipe("fp16"), None)]
    asked = {"context": (320,), "depth": (50, 100), "limit": 1}
    [result] = measured("needles", Run(tmp_path / "run"), real_model_path, subjects, **asked)
    assert result.heat == [[1.0], [1.0]]
