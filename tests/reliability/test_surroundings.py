"""No terminal, no network, absent packages, a locale that is not UTF-8."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

COMMANDS = ("collect", "whiten", "allocate", "eval", "report")
HUB_TEXT = "hf:owner/data:default:train:text"
RULER = ("ruler", "--context", "400", "--subtask", "qa_1")


def error_of(ended: Any) -> str:
    """The error and the hint of a command that failed as it should."""
    lines = [line for line in ended.err.splitlines() if line.startswith(("Error: ", "Hint: "))]
    assert [line.split(":")[0] for line in lines] == ["Error", "Hint"], ended.err
    assert ended.code == 1
    assert "Traceback" not in ended.err
    assert ended.out == ""
    return "\n".join(lines)


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("form", [(), ("--json",)], ids=["tables", "json"])
def test_no_terminal(workshop: Any, tmp_path: Path, name: str, form: tuple[str, ...]) -> None:
    """Plain lines: no escape codes, no carriage returns; with --json one document and nothing else."""
    command = workshop.begin(name, tmp_path / "run", replacing=False)
    ended = workshop.children.run(*command, *form, folder=tmp_path / "run")
    assert ended.code == 0
    for text in (ended.out, ended.err):
        assert not set(text) & {"\x1b", "\r", "\b"}, text
    assert all(line == line.rstrip() for line in ended.err.splitlines())
    if form:
        json.loads(ended.out)
    if name in ("collect", "whiten", "eval"):
        assert " steps\n" in ended.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("collect", "--model", "owner/model", "--text", "CORPUS"), "owner/model"),
        (("inspect", "--model", "owner/model"), "owner/model"),
        (("collect", "--model", "MODEL", "--length", "48", "--text", HUB_TEXT), "owner/data"),
        (("eval", "--model", "owner/model", "--recipe", "fp16"), "owner/model"),
        (("eval", *RULER, "--model", "MODEL", "--recipe", "fp16", "--data", "hub"), "hub"),
    ],
)
def test_no_network(workshop: Any, tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    """Connections cannot be opened, and nothing says beforehand that there are none."""
    places = {"MODEL": str(workshop.model), "CORPUS": str(workshop.corpus)}
    command = [places.get(part, part) for part in arguments]
    ended = workshop.children.run(*command, "--run", tmp_path / "run", folder=tmp_path, offline=True)
    assert says in error_of(ended)
    assert not (tmp_path / "run" / "stats").exists()


@pytest.mark.parametrize(
    ("package", "arguments"),
    [
        ("datasets", ("collect", "--model", "MODEL", "--length", "48", "--text", HUB_TEXT)),
        ("lm_eval", ("eval", "gsm8k", "--model", "MODEL", "--recipe", "fp16", "--data", "hub")),
        ("lm_eval", ("eval", "longbench", "--model", "MODEL", "--recipe", "fp16", "--data", "hub")),
        ("gguf", ("collect", "--model", "junk.gguf")),
    ],
)
def test_a_package_that_is_absent(workshop: Any, tmp_path: Path, package: str, arguments: tuple[str, ...]) -> None:
    places = {"MODEL": str(workshop.model), "CORPUS": str(workshop.corpus)}
    (tmp_path / "junk.gguf").write_bytes(b"GGUF" + bytes(64))
    command = [places.get(part, part) for part in arguments]
    ended = workshop.children.run(
        *command, "--run", tmp_path / "run", folder=tmp_path, absent=[package], cwd=str(tmp_path)
    )
    error = error_of(ended)
    assert package.replace("_", "-") in error.replace("_", "-")


# packages that are imported when a command begins: only a process without them shows what is said
ABSENT = """
import sys
package, *sys.argv = sys.argv[1:]
class Absent:
    def find_spec(self, name, *_):
        if name.split(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from aatc_cli.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("package", "arguments"),
    [
        ("pydantic", ("inspect",)),
        ("torch", ("collect", "--model", "x")),
        ("rich", ("inspect",)),
        *(
            pytest.param(*cell, marks=pytest.mark.slow)
            for cell in (
                ("scipy", ("collect", "--model", "x")),
                ("matplotlib", ("report",)),
                ("jinja2", ("report",)),
                ("transformers", ("collect", "--model", "x")),
                ("numpy", ("report",)),
                ("safetensors", ("inspect",)),
            )
        ),
    ],
)
def test_a_package_that_never_was(tmp_path: Path, package: str, arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-c", ABSENT, package, "aatc", *arguments]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    lines = result.stderr.splitlines()
    assert (result.returncode, result.stdout) == (1, "")
    assert lines == [f"Error: the package {package} is not installed", f"Hint: pip install {package}"]


LOCALE = """
import locale, sys
from aatc_cli.__main__ import main
assert locale.getpreferredencoding(False).upper() not in ("UTF-8", "UTF8"), locale.getpreferredencoding(False)
for line in sys.stdin.read().splitlines():
    sys.argv = ["aatc", *line.split("\\t")]
    try:
        main()
    except SystemExit as stop:
        if stop.code:
            raise
"""


@pytest.mark.slow
def test_a_locale_that_is_not_utf_8(workshop: Any, tmp_path: Path) -> None:
    """All commands under LC_ALL=C with Python's UTF-8 mode off: the same artifacts."""
    place, text = tmp_path / "run", tmp_path / "corpus.txt"
    text.write_bytes(workshop.corpus.read_bytes())
    lines = []
    for name in COMMANDS:
        command = [str(part) for part in workshop.command(name, place)]
        lines.append("\t".join([str(text) if part == str(workshop.corpus) else part for part in command]))
    lines += [f"inspect\t--run\t{place}", f"inspect\t--run\t{place}\t--budget\t3"]
    environment = os.environ | {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment.pop("PYTHONIOENCODING", None)
    result = subprocess.run(
        [sys.executable, "-c", LOCALE], input="\n".join(lines), capture_output=True, env=environment, encoding="utf-8"
    )
    assert result.returncode == 0, result.stderr
    for name in COMMANDS[:-1]:
        assert workshop.contents(name, place) == workshop.after[name], name
    assert workshop.contents("report", place).keys() == workshop.after["report"].keys()
