"""aatc pick: the smallest plan that is good enough, joined by digest and never by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

# of three texts' names; what is measured is put in by hand, so that the choice is known
TEXTS = ("one", "two")


@pytest.fixture
def run(aatc: Any, run_folder: Path) -> Path:
    """A run with plans of three sizes, none of them measured."""
    done = aatc("allocate", "--run", run_folder, "--budget", 3.5, "--budget", 4, "-q")
    assert done.code == 0, done.err
    return run_folder


def test_the_smallest_that_is_good_enough(aatc: Any, run: Path, evaluated: Any) -> None:
    for budget, kl in (("3", 0.05), ("3.5", 0.009), ("4", 0.002)):
        evaluated(run, f"paper-{budget}", one=kl)
    picked = aatc("pick", "--run", run, "--kl", 0.01)
    assert (picked.code, picked.out) == (0, f"{run / 'plans' / 'paper-3.5'}\n")
    assert aatc("pick", "--run", run, "--kl", 0.05).out.strip().endswith("paper-3")
    found = aatc("pick", "--run", run, "--kl", 0.01, "--json").json
    assert found["path"] == str(run / "plans" / "paper-3.5")
    assert found["kl"] == {"one": {"mean": 0.009, "stderr": 0.001}}
    [plan] = [each for each in aatc("inspect", run, "--json").json["plans"] if each["path"] == found["path"]]
    assert plan["plan"] == found["plan"]


def test_the_worst_text_counts(aatc: Any, run: Path, evaluated: Any) -> None:
    evaluated(run, "paper-3", one=0.005, two=0.02)
    evaluated(run, "paper-4", one=0.001, two=0.004)
    assert aatc("pick", "--run", run, "--kl", 0.01).out.strip().endswith("paper-4")
    assert aatc("pick", "--run", run, "--kl", 0.01, "--text", "one").out.strip().endswith("paper-3")


def test_none_is_good_enough(aatc: Any, run: Path, evaluated: Any) -> None:
    evaluated(run, "paper-3", one=0.05)
    evaluated(run, "paper-4", one=0.02)
    refused = aatc("pick", "--run", run, "--kl", 0.01)
    assert (refused.code, refused.out) == (1, "")
    assert "Error: no plan has a KL of 0.01 or less: the lowest is 0.02, of paper-4\nHint: " in refused.err


def test_what_was_not_measured_is_passed_over_and_named(aatc: Any, run: Path, evaluated: Any) -> None:
    evaluated(run, "paper-4", one=0.001)
    picked = aatc("pick", "--run", run, "--kl", 0.01)
    assert picked.out.strip().endswith("paper-4")
    assert "pick: paper-3 is passed over: not measured on one" in picked.err
    unmeasured = aatc("pick", "--run", run, "--kl", 0.01, "--text", "three")
    assert "Error: no plan of" in unmeasured.err
    assert "was measured on three" in unmeasured.err


def test_figures_of_another_plan_of_that_name_do_not_count(aatc: Any, run: Path, evaluated: Any) -> None:
    evaluated(run, "paper-3", one=0.001, plan="0" * 64)
    assert "was measured" in aatc("pick", "--run", run, "--kl", 0.01).err


def test_a_stale_plan_is_passed_over(aatc: Any, run: Path, evaluated: Any) -> None:
    evaluated(run, "paper-3", one=0.001)
    assert aatc("whiten", "--run", run, "--percentile", 98, "--force").code == 0
    refused = aatc("pick", "--run", run, "--kl", 0.01)
    assert refused.code == 1
    assert "paper-3 is passed over: it is stale (transform changed)" in refused.err


@pytest.mark.parametrize("kl", ["0", "-1", "nan"])
def test_wishes_that_are_none(aatc: Any, run: Path, kl: str) -> None:
    assert aatc("pick", "--run", run, "--kl", kl).code == 2


def test_only_the_recipes_asked_for(aatc: Any, run: Path, evaluated: Any) -> None:
    assert aatc("whiten", "--run", run, "--transform", "identity").code == 0
    assert aatc("allocate", "--run", run, "--recipe", "uniform", "--budget", 3, "-q").code == 0
    evaluated(run, "uniform-3", one=0.001)
    evaluated(run, "paper-4", one=0.001)
    assert aatc("pick", "--run", run, "--kl", 0.01).out.strip().endswith("uniform-3")
    assert aatc("pick", "--run", run, "--kl", 0.01, "--recipe", "paper").out.strip().endswith("paper-4")


def test_plans_are_compared_by_one_protocol(aatc: Any, run: Path, evaluated: Any) -> None:
    """A plan measured on other windows of the text is not held against those that were measured alike."""
    import json

    from aatc_cli.artifacts.evaluation import read_evaluation, write_evaluation

    for budget, kl in (("3.5", 0.02), ("4", 0.004)):
        evaluated(run, f"paper-{budget}", one=kl)
    [easy] = evaluated(run, "paper-3", one=0.001)
    other = read_evaluation(easy).model_copy(update={"windows": 9, "tokens_scored": 567})
    easy.unlink()
    write_evaluation(run / "evals", other)
    picked = aatc("pick", "--run", run, "--kl", 0.01)
    assert picked.out.strip().endswith("paper-4")
    assert "pick: paper-3 is passed over: not measured on one" in picked.err
    shown = {plan["path"]: plan["kl"] for plan in json.loads(aatc("inspect", run, "--json").out)["plans"]}
    assert shown[str(run / "plans" / "paper-3")] == {}
