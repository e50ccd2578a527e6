"""Several values behind one option, and options that are made of settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aatc_cli.cli.making import spread

REPEATABLE = {"--plan": False, "--budget": True}


@pytest.mark.parametrize(
    ("given", "parsed"),
    [
        ("--plan a b --json", "--plan a --plan b --json"),
        ("--plan a --plan b", "--plan a --plan b"),
        ("--plan=a b", "--plan a --plan b"),
        ("--budget 2,3 4", "--budget 2 --budget 3 --budget 4"),
        ("--budget=2,3 --json", "--budget 2 --budget 3 --json"),
        # a path may hold a comma
        ("--plan a,b", "--plan a,b"),
        # the first value is one whatever it looks like, and no value at all is for the parser to refuse
        ("--budget -1", "--budget -1"),
        ("--budget", "--budget"),
        ("--budget --", "--budget --"),
        ("NAME --budget 2 --limit 3", "NAME --budget 2 --limit 3"),
        ("--limit 3 x", "--limit 3 x"),
    ],
)
def test_every_value_gets_its_option(given: str, parsed: str) -> None:
    assert spread(given.split(), REPEATABLE) == parsed.split()


def test_plans_by_a_pattern(aatc: Any, refuses: Any, run_folder: Path) -> None:
    """As the shell expands it, and as it stands in quotes."""
    assert aatc("allocate", "--run", run_folder, "--budget", "4,5").code == 0
    plans = sorted((run_folder / "plans").iterdir())
    for named in (plans, [run_folder / "plans" / "*"]):
        outcome = aatc("allocate", "--check", *named, "--json")
        assert outcome.code == 0, outcome.err
        assert [Path(fact["path"]) for fact in outcome.json] == plans
        assert all(fact["identical"] for fact in outcome.json)
    refuses("allocate", "--check", run_folder / "x*", says=("nothing matches",), folder=run_folder, code=2)


def test_eval_without_a_task_is_kl_of_all_plans(aatc: Any, run_folder: Path, tiny_llama: Path, corpus: Path) -> None:
    assert aatc("allocate", "--run", run_folder, "--budget", "4,5").code == 0
    where = ("--run", run_folder, "--model", tiny_llama, "--text", corpus, "--length", 160, "--limit", 1)
    outcome = aatc("eval", *where, "--json")
    assert outcome.code == 0, outcome.err
    assert [(e["task"], e["budget"]) for e in outcome.json] == [("kl", "3"), ("kl", "4"), ("kl", "5")]
    again = aatc("eval", "kl", *where, "--plan", run_folder / "plans" / "*", "--json")
    assert again.json == outcome.json


def test_an_option_that_a_task_does_not_read_cannot_be_given(refuses: Any, run_folder: Path, tiny_llama: Path) -> None:
    where = ("--run", run_folder, "--model", tiny_llama)
    for task, option in (("kl", "--queries"), ("memory", "--text"), ("ruler", "--first"), ("perplexity", "--cache")):
        refuses("eval", task, *where, option, 1, says=(option,), folder=run_folder, code=2)


def test_the_form_of_old_says_the_new_one(refuses: Any, run_folder: Path) -> None:
    for arguments, new in ((("--task", "ruler"), "aatc eval ruler"), (("--study=main",), "aatc study main")):
        outcome = refuses("eval", "--run", run_folder, *arguments, says=("is a word of",), folder=run_folder, code=2)
        assert new in outcome.err
