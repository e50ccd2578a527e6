"""What a command gives on stdout: one JSON document, or tables for people that fit their terminal."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table

# a file or a pipe is read in a terminal of unknown width: the one that all have
_WIDTH = 80
# blanks beside a cell, and at the edge of a table
_AROUND = 2
# no path or name is shortened below this
_SHORTEST = 24
# a longer word in the midst of a table, a path mostly, is folded
_LONGEST_WORD = 40
_NUMBER = re.compile(r"[-+]?[\d.,]+(e[-+]?\d+)?( ?[±/] ?[\d.,]+(e[-+]?\d+)?)*( ?[*%]| [a-zA-Z]{1,3})?")


def print_json(data: Any) -> None:
    """Exactly one JSON document on stdout."""
    sys.stdout.write(json.dumps(data, indent=2, allow_nan=False) + "\n")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table for people on stdout; the first column is text, the others are numbers or text.

    No number is ever cut or folded. What is too wide for the terminal gives up, in this order, the folder that all
    paths are in and the columns that say the same in every row, which the title says instead, and the middle of long
    names; what is still too wide goes on below, under the same first column.
    """
    width = _terminal_width()
    title, rows = _without_folder(title, columns, rows, width)
    title, columns, rows = _without_constants(title, columns, rows, width)
    rows = _with_short_names(columns, rows, width)
    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False, width=width)
    # a path in the title is copied from there: no line break in it
    console.print(title, soft_wrap=True)
    for part in _parts(columns, rows, width):
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for index, room in zip(part, _widths(columns, rows, part, width), strict=True):
            justify: Literal["left", "right"] = "right" if _numeric(rows, index) else "left"
            table.add_column(columns[index], justify=justify, overflow="fold", width=room)
        for row in rows:
            table.add_row(*(row[index] for index in part))
        console.print(table)


def _terminal_width() -> int:
    if sys.stdout.isatty() or os.environ.get("COLUMNS"):
        return max(shutil.get_terminal_size((_WIDTH, 24)).columns, 40)
    return _WIDTH


def _numeric(rows: Sequence[Sequence[str]], index: int) -> bool:
    """Whether a column holds numbers, with their errors and units, or nothing; the first one holds names."""
    return index > 0 and all(not row[index] or _NUMBER.fullmatch(row[index]) for row in rows)


def _least(columns: Sequence[str], rows: Sequence[Sequence[str]], index: int) -> int:
    """The narrowest that a column can be: its longest number, or the longest word of its text.

    The first column, by which rows are found, is folded only where it is very wide.
    """
    cells = [row[index] for row in rows]
    if _numeric(rows, index):
        return max(map(len, [*columns[index].split(), *cells, "-"]))
    longest = max(map(len, [*columns[index].split(), *(word for cell in cells for word in cell.split()), "-"]))
    return max(longest, min(_widest(columns, rows, 0), _LONGEST_WORD)) if index == 0 else min(longest, _LONGEST_WORD)


def _widest(columns: Sequence[str], rows: Sequence[Sequence[str]], index: int) -> int:
    """What a column takes when nothing in it is folded."""
    return max(map(len, [columns[index], *(row[index] for row in rows)]))


def _needed(columns: Sequence[str], rows: Sequence[Sequence[str]], shown: Sequence[int]) -> int:
    """Characters that a table of the columns ``shown`` takes at least."""
    return sum(_least(columns, rows, index) for index in shown) + _AROUND * (len(shown) + 1)


def _widths(columns: Sequence[str], rows: Sequence[Sequence[str]], shown: Sequence[int], width: int) -> list[int]:
    """Characters for each column: its least, and what is left over for those that want more, the most modest first."""
    found = {index: _least(columns, rows, index) for index in shown}
    left = max(width - _needed(columns, rows, shown), 0)
    wanted = {index: _widest(columns, rows, index) - found[index] for index in shown}
    for index in sorted(shown, key=lambda index: wanted[index]):
        more = min(wanted[index], left)
        found[index] += more
        left -= more
    return [found[index] for index in shown]


def _without_folder(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], width: int
) -> tuple[str, list[list[str]]]:
    """The table with names for paths in its first column, where all lie in one folder and it is too wide with it."""
    folders = {row[0].rpartition("/")[0] for row in rows}
    folder = next(iter(folders)) if len(folders) == 1 else ""
    if not folder or _needed(columns, rows, range(len(columns))) <= width:
        return title, [list(row) for row in rows]
    return f"{title}, in {folder}", [[row[0].rpartition("/")[2], *row[1:]] for row in rows]


def _without_constants(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], width: int
) -> tuple[str, list[str], list[list[str]]]:
    """The table without columns that hold one value, which the title says instead, where it is too wide with them."""
    same = [
        index
        for index in range(1, len(columns))
        if len(rows) > 1 and len({row[index] for row in rows}) == 1 and rows[0][index]
    ]
    every = list(range(len(columns)))
    if _needed(columns, rows, every) <= width or not same:
        return title, list(columns), [list(row) for row in rows]
    said = "; ".join(f"{columns[index]} {rows[0][index]}" for index in same)
    kept = [index for index in every if index not in same]
    return f"{title}; {said}", [columns[i] for i in kept], [[row[i] for i in kept] for row in rows]


def _with_short_names(columns: Sequence[str], rows: list[list[str]], width: int) -> list[list[str]]:
    """Words of the first column without their middle, as far as the table is too wide for them."""
    every = list(range(len(columns)))
    over = _needed(columns, rows, every) - width
    longest = max((len(word) for row in rows for word in row[0].split()), default=0)
    if over <= 0 or longest <= _SHORTEST or not rows:
        return rows
    room = max(longest - over, _SHORTEST)
    shorter = [" ".join(_shortened(word, room) for word in row[0].split(" ")) for row in rows]
    # names that would look alike stay whole
    alike = len(set(shorter)) < len({row[0] for row in rows})
    return rows if alike else [[name, *row[1:]] for name, row in zip(shorter, rows, strict=True)]


def _shortened(word: str, room: int) -> str:
    """The word without its middle; of names that differ in their ends more of the end is left."""
    if len(word) <= room:
        return word
    head = (room - 1) // 3
    return f"{word[:head]}…{word[len(word) - (room - 1 - head) :]}"


def _parts(columns: Sequence[str], rows: list[list[str]], width: int) -> list[list[int]]:
    """Columns by table: all of them where they fit, else as many as fit, each table with the first column again."""
    parts: list[list[int]] = [[0]] if columns else []
    for index in range(1, len(columns)):
        wider = [*parts[-1], index]
        if _needed(columns, rows, wider) <= width or parts[-1] == [0]:
            parts[-1] = wider
        else:
            parts.append([0, index])
    return parts
