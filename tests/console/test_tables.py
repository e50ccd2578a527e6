"""Tables for people: within 80 columns, every number whole."""

from __future__ import annotations

from typing import Any

import pytest

from aatc_cli.console import print_table

EVALUATIONS = (
    ["method", "text", "bits", "effective", "ratio", "KL (nats)", "KL p99", "top-1", "NLL (nats)"],
    [
        ["fp16", "builtin:python-docs-test", "16", "16", "1", "5.37e-08 ± 1.4e-08", "4.55e-07", "1 ± 0", "2.36 ± 0.2"],
        ["paper-2", "builtin:python-docs-test", "2", "3.904", "4.098", "0.0189 ± 0.0026", "0.132", "0.93 ± 0.0049", ""],
    ],
)


@pytest.fixture
def table(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    def printed(columns: list[str], rows: list[list[str]], title: str = "title", width: int | None = None) -> list[str]:
        monkeypatch.delenv("COLUMNS", raising=False)
        if width is not None:
            monkeypatch.setenv("COLUMNS", str(width))
        print_table(title, columns, rows)
        return [line.rstrip() for line in capsys.readouterr().out.splitlines() if line.strip()]

    return printed


@pytest.mark.parametrize("width", [None, 60, 80, 100, 200])
def test_no_number_is_broken(table: Any, width: int | None) -> None:
    columns, rows = EVALUATIONS
    lines = table(columns, rows, width=width)
    assert max(map(len, lines)) <= (width or 80)
    text = "\n".join(lines)
    for row in rows:
        for cell in row:
            assert cell in text, cell
    for name in columns:
        assert all(word in text for word in name.split()), name


def test_what_all_rows_share_goes_into_the_title(table: Any) -> None:
    lines = table(*EVALUATIONS)
    assert lines[0] == "title; text builtin:python-docs-test"
    assert sum("builtin" in line for line in lines) == 1
    # where there is room nothing moves
    assert sum("builtin" in line for line in table(*EVALUATIONS, width=200)) == 2


def test_what_is_too_wide_goes_on_under_the_same_names(table: Any) -> None:
    lines = table(*EVALUATIONS)
    assert [line.split()[0] for line in lines if line.strip().startswith(("fp16", "paper"))] == ["fp16", "paper-2"] * 2
    # numbers stand under each other
    ends = {line.index(cell) + len(cell) for cell in ("4.55e-07", "0.132") for line in lines if cell in line}
    assert len(ends) == 1


def test_a_folder_that_all_paths_share_is_said_once(table: Any) -> None:
    folder = "/somewhere/on/a/disk/with/a/long/name/runs/of/today/plans"
    rows = [[f"{folder}/{name}", "2.000", "2.330", "6.87", digest] for name, digest in (("a-2", "ab"), ("b-2", "cd"))]
    lines = table(["plan", "bits", "effective bits", "ratio", "digest"], rows)
    assert lines[0] == f"title, in {folder}"
    assert [line.split()[0] for line in lines[-2:]] == ["a-2", "b-2"]


def test_long_names_lose_their_middle_and_stay_apart(table: Any) -> None:
    numbers = [[str(10**9 + 7 * k + i) for i in range(5)] for k in range(2)]
    alike = [[f"{'x' * 30}{i}{'y' * 30}", *numbers[i]] for i in range(2)]
    columns = ["name", *"abcde"]
    text = "\n".join(table(columns, alike))
    assert all(row[0] in text for row in alike)
    apart = [[f"{'x' * 60}{i}", *numbers[i]] for i in range(2)]
    lines = table(columns, apart)
    assert max(map(len, lines)) <= 80
    assert [line.split()[0][-2:] for line in lines if "…" in line] == ["x0", "x1"] * 2


def test_text_is_folded_between_words(table: Any) -> None:
    prose = "statistics are held for the whole model beside it, and the sampled rows of all of its layers are as well"
    lines = table(["fact", "value"], [["layers", "32"], ["memory", prose]])
    assert max(map(len, lines)) <= 80
    assert " ".join(" ".join(lines).split()).endswith(prose)


def test_without_rows_there_are_names(table: Any) -> None:
    assert table(["a", "b"], [])[:2] == ["title", " a  b"]
