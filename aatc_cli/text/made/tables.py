"""Tables in CSV, in Markdown and in JSON lines: columns of names, dates and numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random

from aatc_cli.text.made.words import GIVEN, PLACES, THINGS

_COLUMNS: dict[str, Callable[[Random], str]] = {
    "id": lambda random: str(random.randint(1000, 99999)),
    "date": lambda random: f"{random.randint(1990, 2024)}-{random.randint(1, 12):02}-{random.randint(1, 28):02}",
    "item": lambda random: random.choice(THINGS),
    "place": lambda random: random.choice(PLACES),
    "seller": lambda random: random.choice(GIVEN),
    "price": lambda random: f"{random.uniform(1, 900):.2f}",
    "count": lambda random: str(random.randint(1, 400)),
    "share": lambda random: f"{random.random():.3f}",
    "weight_kg": lambda random: f"{random.expovariate(0.1):.1f}",
    "in_stock": lambda random: random.choice(("yes", "no")),
    "temperature": lambda random: f"{random.gauss(12, 9):.1f}",
}


def tables_document(random: Random) -> str:
    """One table of five to seven columns and some two dozen rows, with a line that says what it is."""
    names = random.sample(list(_COLUMNS), random.randint(5, 7))
    rows = [[_COLUMNS[name](random) for name in names] for _ in range(random.randint(22, 34))]
    title = f"{random.choice(THINGS).capitalize()}s of {random.choice(PLACES)}, {random.randint(1990, 2024)}"
    write = random.choice((_csv, _markdown, _json))
    return f"{title}\n\n{write(names, rows)}\n"


def _csv(names: list[str], rows: list[list[str]]) -> str:
    return "\n".join(",".join(row) for row in (names, *rows))


def _markdown(names: list[str], rows: list[list[str]]) -> str:
    lines = (names, ["---"] * len(names), *rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def _json(names: list[str], rows: list[list[str]]) -> str:
    return "\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows)
