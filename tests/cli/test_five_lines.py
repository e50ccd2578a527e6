"""The sweep of docs/pipeline/automation.md, as a shell runs it: budgets in, the smallest good plan out."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "pipeline" / "automation.md"


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_the_five_lines(tiny_llama: Path, corpus: Path, tmp_path: Path) -> None:
    script = re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text("utf-8"), re.S | re.M)[0]
    assert len(script.strip().splitlines()) == 5
    for name in ("web.txt", "held-out.txt"):
        (tmp_path / name).write_text(corpus.read_text("utf-8"), "utf-8")
    (tmp_path / "my-model").symlink_to(tiny_llama)
    # windows that fit the model of the tests
    script = script.replace("--text web.txt", "--text web.txt --samples 8 --length 160 --rows 256")
    script = script.replace("--text held-out.txt", "--text held-out.txt --length 256 --limit 2 --first 150")
    command = tmp_path / "bin" / "aatc"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m aatc_cli "$@"\n', "utf-8")
    command.chmod(0o755)
    path = f"{command.parent}{os.pathsep}{os.environ['PATH']}"
    source = str(Path(__file__).parents[2])
    environment = os.environ | {"PATH": path, "PYTHONPATH": source, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # two bits and less do not pay for the protected layers of a model of four: the others are made all the same
    assert "3 of 5 plans cannot be made" in done.stderr
    inspected = [str(command), "inspect", "shipped", "--json"]
    [plan] = json.loads(subprocess.check_output(inspected, cwd=tmp_path, env=environment))["plans"]
    assert plan["kl_worst"] <= 0.02
    assert plan["budget"] == "3"
    assert (tmp_path / "shipped" / "README.md").is_file()
