"""aatc list: every name that an option takes, without anything heavy."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from aatc_cli.profiles import available, load_model_profile

KINDS = {"recipes": "recipes", "profiles": "models", "studies": "studies"}


@pytest.mark.parametrize(("kind", "folder"), KINDS.items())
def test_every_packaged_name_is_listed(aatc: Any, kind: str, folder: Any) -> None:
    found = aatc("list", kind, "--json")
    assert (found.code, found.err) == (0, "")
    assert sorted(entry["name"] for entry in found.json) == available(folder)
    table = aatc("list", kind).out
    assert all(name in table for name in available(folder))
    assert max(map(len, table.splitlines())) <= 80


def test_profiles_say_what_a_token_takes(aatc: Any) -> None:
    found = {entry["name"]: entry["fp16_bytes_per_token"] for entry in aatc("list", "profiles", "--json").json}
    for name, size in found.items():
        geometry = load_model_profile(name).geometry
        assert size == 2 * 2 * geometry.layers * geometry.channels
    assert found["llama-3.1-8b-instruct"] == 131072


def test_tasks_are_the_commands_of_eval(aatc: Any) -> None:
    found = [entry["task"] for entry in aatc("list", "tasks", "--json").json]
    shown = aatc("eval", "--help").out
    assert "kl" in found
    assert all(f" {task} " in shown for task in found)


def test_models_are_the_architectures(aatc: Any) -> None:
    from aatc_cli.models.architectures import ARCHITECTURES

    assert [entry["architecture"] for entry in aatc("list", "models", "--json").json] == sorted(ARCHITECTURES)


@pytest.mark.parametrize("kind", [*KINDS, "models", "tasks"])
def test_nothing_heavy_is_loaded(kind: str) -> None:
    code = (
        f"import sys; sys.argv = ['aatc', 'list', '{kind}', '--json']\n"
        "from aatc_cli.__main__ import main\n"
        "try: main()\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'scipy'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"


def test_an_unknown_kind(aatc: Any) -> None:
    refused = aatc("list", "recipe")
    assert refused.code == 2
    assert "recipes" in refused.err
