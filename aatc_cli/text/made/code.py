"""Source text in Python, C and SQL: small functions with names, loops and calls of one another."""

from __future__ import annotations

from random import Random

from aatc_cli.text.made.words import THINGS

_WORDS = """
    add build check close count fetch find join load merge open parse read remove send sort split store sum take trim
    update write"""
_VERBS = tuple(_WORDS.split())


def code_document(random: Random) -> str:
    """A file of one language."""
    return random.choice((_python, _python, _c, _sql))(random)


def _name(random: Random) -> str:
    return f"{random.choice(_VERBS)}_{random.choice(THINGS)}"


def _python(random: Random) -> str:
    known: list[str] = []
    parts = ["from __future__ import annotations\n\nimport json\nfrom dataclasses import dataclass\n"]
    kind = random.choice(THINGS).capitalize()
    fields = random.sample(THINGS, 4)
    parts.append(
        f"@dataclass\nclass {kind}:\n" + "".join(f"    {field}: int = {random.randint(0, 99)}\n" for field in fields)
    )
    for _ in range(6):
        name, one, two = _name(random), *random.sample(THINGS, 2)
        limit, field = random.randint(2, 500), random.choice(fields)
        call = f"{random.choice(known)}({one}s, {random.randint(1, 9)})" if known else f"len({one}s)"
        parts.append(
            f"def {name}({one}s: list[{kind}], {two}: int = {random.randint(0, 9)}) -> int:\n"
            f'    """The {field} of all {one}s above {two}."""\n'
            f"    total = 0\n"
            f"    for index, {one} in enumerate({one}s):\n"
            f"        if {one}.{field} > {two} and index < {limit}:\n"
            f"            total += {one}.{field} * {random.randint(2, 12)}\n"
            f"        elif {one}.{random.choice(fields)} == {random.randint(0, 99)}:\n"
            f'            raise ValueError(f"no {field} in {{index}}")\n'
            f"    return total + {call}\n"
        )
        known.append(name)
    parts.append(f'if __name__ == "__main__":\n    print(json.dumps({known[-1]}([{kind}()])))\n')
    return "\n\n".join(parts)


def _c(random: Random) -> str:
    kind, fields = random.choice(THINGS), random.sample(THINGS, 3)
    parts = ["#include <stdio.h>\n#include <stdlib.h>\n"]
    parts.append(f"struct {kind} {{\n" + "".join(f"    int {field};\n" for field in fields) + "};\n")
    for _ in range(7):
        name, field, other = _name(random), random.choice(fields), random.choice(fields)
        parts.append(
            f"static int {name}(const struct {kind} *items, size_t count)\n{{\n"
            f"    int total = {random.randint(0, 9)};\n\n"
            f"    for (size_t i = 0; i < count; i++) {{\n"
            f"        if (items[i].{field} > {random.randint(1, 900)})\n"
            f"            total += items[i].{other};\n"
            f"    }}\n    return total;\n}}\n"
        )
    return "\n".join(parts)


def _sql(random: Random) -> str:
    table, columns = random.choice(THINGS), random.sample(THINGS, 4)
    lines = [f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, {', '.join(f'{c} INTEGER' for c in columns)});"]
    for number in range(14):
        values = ", ".join(str(random.randint(0, 9999)) for _ in columns)
        lines.append(f"INSERT INTO {table} VALUES ({number + 1}, {values});")
    for _ in range(9):
        one, two = random.sample(columns, 2)
        lines.append(
            f"SELECT {one}, SUM({two}) AS total FROM {table} WHERE {two} > {random.randint(1, 5000)} "
            f"GROUP BY {one} ORDER BY total DESC LIMIT {random.randint(3, 50)};"
        )
    return "\n".join(lines) + "\n"
