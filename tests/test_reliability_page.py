"""The page on reliability: a row for every side of every case, and every test it names is there."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reliability.md"
# twenty cases, and how many sides each of them has
SIDES = {
    1: 3,
    2: 3,
    3: 5,
    4: 1,
    5: 2,
    6: 2,
    7: 12,
    8: 4,
    9: 4,
    10: 7,
    11: 3,
    12: 3,
    13: 3,
    14: 2,
    15: 1,
    16: 2,
    17: 3,
    18: 2,
    19: 3,
    20: 3,
}
NODE = re.compile(r"`(tests/[\w/]+\.py)::(\w+)(\[[^`]*\])?`")
HEADINGS = (
    "Crashes",
    "Corruption",
    "Outside the run",
    "Numerics",
    "Wrong numbers",
    "Determinism",
    "Long run",
    "Command line",
    "Cases",
)


@cache
def functions_of(file: str) -> frozenset[str]:
    """Names of the test functions that pytest would collect from a file."""
    tree = ast.parse((ROOT / file).read_text("utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name[:5] == "test_")


def rows() -> list[tuple[int, str, str]]:
    """Case, failure and what holds it, of every row of the table of cases."""
    table = PAGE.read_text("utf-8").partition("\n## Cases\n")[2]
    found = re.findall(r"^\| (\d+) \| (.+?) \| (.+) \|$", table, re.M)
    return [(int(case), failure, held) for case, failure, held in found]


def test_its_sections_come_in_order() -> None:
    assert tuple(re.findall(r"^## (.+)$", PAGE.read_text("utf-8"), re.M)) == HEADINGS


def test_every_side_of_every_case_has_a_row() -> None:
    assert len(SIDES) == 20
    assert Counter(case for case, _, _ in rows()) == SIDES
    assert [case for case, _, _ in rows()] == sorted(case for case, _, _ in rows())
    failures = [failure for _, failure, _ in rows()]
    assert len(set(failures)) == len(failures)


def test_every_row_names_a_test_or_says_why_there_is_none() -> None:
    for case, failure, held in rows():
        if held.startswith("not covered: "):
            assert len(held) > 40, (case, failure)
        else:
            assert ", ".join(match[0] for match in NODE.finditer(held)) == held, (case, failure)


def test_the_tests_it_names_are_there() -> None:
    named = NODE.findall(PAGE.read_text("utf-8"))
    assert len(named) > 100
    assert [f"{file}::{name}" for file, name, _ in named if name not in functions_of(file)] == []


@pytest.mark.parametrize("name", ["test_nothing_of_the_kind", "rows"])
def test_a_test_that_is_not_there_would_be_seen(name: str) -> None:
    assert name not in functions_of("tests/test_reliability_page.py")
    assert "test_the_tests_it_names_are_there" in functions_of("tests/test_reliability_page.py")
