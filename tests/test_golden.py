"""A small Transform of each kind and its plan are in the repository; ``make golden-check`` derives the plans anew."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from aatc_cli.artifacts.artifact import Artifact, ArtifactWriter, open_artifact
from aatc_cli.artifacts.manifest import MANIFEST, TENSORS

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden" / "run"
PLANS = ("loss-aware-3", "paper-3")
TRANSFORMS = ("metric", "whiten")

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@pytest.mark.skipif(not os.environ.get("AATC_GENERATE_EXPECTED"), reason="on demand: make golden")
def test_write_the_golden_run(aatc: Any, tiny_llama: Path, corpus: Path, tmp_path: Path) -> None:
    """The commands that docs/ci.md shows, on the tests' tiny random model and text."""
    run = ("--run", tmp_path / "run")
    size = ("--samples", 6, "--length", 192, "--rows", 256, "--fisher", 6)
    for command in (
        ("collect", *run, "--model", tiny_llama, "--text", corpus, *size),
        ("whiten", *run),
        ("whiten", *run, "--transform", "metric"),
        ("allocate", *run, "--recipe", "paper", "--recipe", "loss-aware", "--budget", 3),
    ):
        outcome = aatc(*command)
        assert outcome.code == 0, outcome.err
    shutil.rmtree(GOLDEN, ignore_errors=True)
    for part in ("transforms", "plans"):
        shutil.copytree(tmp_path / "run" / part, GOLDEN / part)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "golden"))


def golden_check(golden: Path, scratch: Path) -> subprocess.CompletedProcess[str]:
    command = ["make", "golden-check", f"GOLDEN={golden}", f"REDERIVED={scratch}"]
    # the aatc of this environment, whether or not its folder is on the PATH
    command += [f"AATC={sys.executable} -m aatc_cli"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def rewrite(plan: Artifact, widths: dict[str, torch.Tensor], **results: object) -> None:
    """Write a plan again, sound in itself, with other widths or results."""
    tensors, kept = dict(plan.tensors()) | widths, plan.manifest
    with ArtifactWriter(plan.path, "plan") as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.commit(
            settings=kept.settings,
            model=kept.model,
            inputs=kept.inputs,
            results=kept.results | results,
            provenance=kept.provenance,
        )


def test_the_golden_run_is_small_and_names_no_place() -> None:
    folders = [*(f"plans/{name}" for name in PLANS), *(f"transforms/{name}" for name in TRANSFORMS)]
    files = [path for path in GOLDEN.rglob("*") if path.is_file()]
    assert {str(path.relative_to(GOLDEN)) for path in files} == {
        f"{folder}/{file}" for folder in folders for file in (MANIFEST, TENSORS)
    }
    assert sum(path.stat().st_size for path in files) < 300_000
    for name in TRANSFORMS:
        manifest = open_artifact(GOLDEN / "transforms" / name, "transform").manifest
        assert "/" not in manifest.model.name + "".join(text.name for text in manifest.texts)
    # more layers than are protected, and widths that differ: there is something to allocate
    widths = dict(open_artifact(GOLDEN / "plans" / "paper-3", "plan").tensors())
    assert len(widths) == 8
    assert len(set(torch.cat(list(widths.values())).tolist())) > 3


@needs_make
def test_the_committed_plans_are_derived_again(tmp_path: Path) -> None:
    done = golden_check(GOLDEN, tmp_path / "again")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(": ")[1][:9] for line in done.stdout.splitlines() if ": identical" in line] == ["identical"] * 2


@needs_make
def test_a_plan_with_one_other_width(copied: Path, tmp_path: Path) -> None:
    """Nothing is damaged: only deriving the plan anew shows that it is not the Transform's."""
    plan = open_artifact(copied / "plans" / "paper-3", "plan")
    name = "layers.1.k.bits"
    widths = plan.tensor(name).clone()
    widths[5] += 1
    rewrite(plan, {name: widths})
    done = golden_check(copied, tmp_path / "again")
    assert done.returncode != 0
    # the title is wrapped to the width of its table
    assert "1 channels differ" in " ".join(done.stdout.split())
    [row] = [line for line in done.stdout.splitlines() if "1 k" in line]
    assert [int(word) for word in row.split() if word.isdigit()] == [1, 5, int(widths[5]), int(widths[5]) - 1]


@needs_make
def test_a_plan_with_other_bytes(copied: Path, tmp_path: Path) -> None:
    """The widths are right and the plan is sound, but it promises what the byte law does not."""
    plan = open_artifact(copied / "plans" / "loss-aware-3", "plan")
    law = plan.manifest.results["layout"]
    rewrite(plan, {}, layout=law | {"bytes_total": law["bytes_total"] - 8})
    done = golden_check(copied, tmp_path / "again")
    assert done.returncode != 0
    assert done.stdout.count("identical") == 2
    changed = [line.split() for line in done.stdout.splitlines() if '"bytes_total"' in line]
    assert [(mark, int(count.strip(","))) for mark, _, count in changed] == [
        ("<", law["bytes_total"] - 8),
        (">", law["bytes_total"]),
    ]


@pytest.mark.parametrize("folder", ["plans/paper-3", "transforms/whiten"])
def test_damaged_tensors(refuses: Any, copied: Path, folder: str) -> None:
    tensors = copied / folder / TENSORS
    content = tensors.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    tensors.write_bytes(content[:start] + bytes(byte ^ 1 for byte in content[start:]))
    command = ("allocate", "--check", copied / "plans" / "paper-3")
    refuses(*command, says=(str(copied / folder), "damaged"), folder=copied)
