"""The page on the packed cache: its snippets run as they stand, and every test it names is there."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "cache.md"


def test_the_snippets_run(run_folder, tiny_llama, tmp_path, monkeypatch, capsys):
    # two bits do not pay for the protected layers of a model of four
    shutil.copytree(run_folder / "plans" / "paper-3", run_folder / "plans" / "paper-2")
    (tmp_path / ".models").mkdir()
    (tmp_path / ".models" / "SmolLM2-135M-Instruct").symlink_to(tiny_llama)
    assert run_folder == tmp_path / "run"
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    snippets = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.S | re.M)
    assert len(snippets) == 2
    capsys.readouterr()
    for snippet in snippets:
        exec(snippet, names)
    assert re.search(r"^228 tokens in \d+ bytes, uncompressed \d+$", capsys.readouterr().out, re.M)
    assert (tmp_path / "run" / "caches" / "story" / "manifest.json").is_file()


def test_the_tests_it_names_are_there():
    named = re.findall(r"`(tests/[\w/]+\.py)(?:: (\w+))?`", PAGE.read_text("utf-8"))
    assert len(named) > 20
    for file, name in named:
        text = (ROOT / file).read_text("utf-8")
        assert not name or f"\ndef {name}(" in text, f"{file}: {name}"
