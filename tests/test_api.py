"""The Python interface: the snippets of its page run; it is typed, light, and refuses what the command line does."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import aatc_cli as aatc

PAGE = Path(__file__).parent.parent / "docs" / "api.md"


def test_the_snippets_run(run_folder, new_model, tiny_llama, tmp_path, monkeypatch, capsys):
    # two bits do not pay for the protected layers of a model of four
    shutil.copytree(run_folder / "plans" / "paper-3", run_folder / "plans" / "paper-2")
    (tmp_path / ".models").mkdir()
    (tmp_path / ".models" / "SmolLM2-135M-Instruct").symlink_to(tiny_llama)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    # the tiny model reads 512 tokens, and has 64 of its own for what it says
    snippets = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.S | re.M)
    assert len(snippets) == 4
    for snippet in snippets:
        exec(snippet.replace("2048", "448"), names)
    said = capsys.readouterr().out
    live, law, plain = (
        int(found.replace(",", ""))
        for found in re.search(r"455 tokens: ([\d,]+) bytes\nby the plan: ([\d,]+), .* ([\d,]+)\n", said).groups()
    )
    assert law < live < plain
    assert re.search(r"^paper-3 3\.\d+ bits [0-9a-f]{12}$", said, re.M)
    assert "there is no plan at run/plans/nothing | run aatc allocate to make it" in said


def test_another_model_is_refused(run_folder, new_model, tmp_path):
    other = new_model(tmp_path / "other", seed=3)
    with pytest.raises(aatc.AatcError, match="is not the one"):
        aatc.open_plan(run_folder / "plans" / "paper-3").load_model(str(other))


def test_an_unknown_setting_is_refused(tiny_llama, corpus, tmp_path):
    with pytest.raises(aatc.AatcError, match="sampels"):
        aatc.collect(str(tiny_llama), [str(corpus)], run=tmp_path, sampels=3)


def test_importing_it_loads_nothing_heavy():
    code = "import sys, aatc_cli as aatc; dir(aatc); print(sorted({'torch', 'pydantic'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_other_name():
    assert "open_plan" in dir(aatc)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        aatc.nothing  # noqa: B018


def test_it_is_typed():
    assert (Path(aatc.__file__).parent / "py.typed").is_file()
