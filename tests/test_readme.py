"""The README is true: its gigabytes are the byte law, its snippet runs, its files are there."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from aatc_cli.config import make_budget
from aatc_cli.profiles import available, load_model_profile, load_recipe
from aatc_cli.stages.inspecting.profile import inspect_profile

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
# as one line, however it is wrapped
FLAT = " ".join(README.split())


def law(recipe: str, bits: float) -> dict[str, Any]:
    found = inspect_profile(
        load_model_profile("llama-3.1-8b-instruct"), load_recipe(recipe), make_budget(bits=bits), 32768
    )
    return found.data


def test_gigabytes() -> None:
    rows = re.findall(r"^\| ([\d.]+) \| ([\d.]+) GB \| ([\d.]+) x \|$", README, re.M)
    assert [bits for bits, _, _ in rows] == ["3", "2.5", "2"]
    for bits, size, ratio in rows:
        found = law("paper", float(bits))
        assert (f"{found['bytes_total'] / 1e9:.2f}", f"{found['ratio']:.1f}") == (size, ratio)
    assert f"| 16 (float16) | {law('paper', 2)['bytes_fp16'] / 1e9:.2f} GB |" in README
    matrices = law("paper", 2)["bytes_static"]
    assert f"matrices of {matrices / 1e6:.0f} MB" in FLAT
    first = " ".join(README.split("\n\n")[1].split())
    assert all(f"{size} GB" in first for size in ("4.29", *(size for bits, size, _ in rows if bits != "2.5")))


@pytest.mark.parametrize("recipe", ["paper", "loss-aware-fused"])
def test_the_table_of_quality_and_speed(recipe: str) -> None:
    [row] = re.findall(rf"^\| `{recipe}` at 2 bits \| ([\d.]+) GB \| ([\d.]+ ± [\d.]+) \|", README, re.M)
    assert row[0] == f"{law(recipe, 2)['bytes_total'] / 1e9:.2f}"
    # the same figure stands where it was measured
    assert any(row[1] in page.read_text("utf-8") for page in (ROOT / "docs").rglob("*.md"))


def test_counts() -> None:
    from aatc_cli.models.architectures import ARCHITECTURES

    assert f"[{len(ARCHITECTURES)} architectures]" in FLAT
    assert f"{len(available('models')) - 1} other models" in FLAT


def test_the_snippet_runs(
    run_folder: Path, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    # a plan of the run that is there, in the place of the one that the demo makes
    shutil.copytree(run_folder / "plans" / "paper-3", run_folder / "plans" / "loss-aware-tiles-2")
    (tmp_path / ".models").mkdir()
    (tmp_path / ".models" / "SmolLM2-135M-Instruct").symlink_to(tiny_llama)
    monkeypatch.chdir(tmp_path)
    [snippet] = re.findall(r"^```python\n(.*?)^```$", README, re.S | re.M)
    capsys.readouterr()
    exec(snippet, {})
    assert re.search(r"\d+ bytes$", capsys.readouterr().out.strip())


def test_what_a_stranger_looks_for() -> None:
    licence = (ROOT / "LICENSE").read_text("utf-8")
    assert "Apache License" in licence
    assert "Version 2.0, January 2004" in licence
    for name in ("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "aatc_cli/py.typed"):
        assert (ROOT / name).is_file(), name
        assert name == "aatc_cli/py.typed" or name in README


def test_the_citation_is_valid() -> None:
    import yaml

    import aatc_cli

    data = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(data)
    assert data["version"] == aatc_cli.__version__
    assert data["preferred-citation"]["authors"][0]["family-names"] == "Laus"
