"""Closed streams, little memory, numbers of thousands of digits: one error and one hint, never a traceback."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aatc_cli.artifacts.artifact import ArtifactWriter, open_artifact


def shell(line: str, folder: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """``line`` in a shell, in which AATC is the command line; its streams are caught unless the line closes them."""
    aatc = f"{sys.executable} -m aatc_cli"
    done = subprocess.run(
        ["sh", "-c", line.replace("AATC", aatc)], capture_output=True, text=True, cwd=folder, timeout=120, **options
    )
    assert "Traceback" not in done.stderr
    return done


def one_error(done: subprocess.CompletedProcess[str], *says: str) -> None:
    assert done.returncode == 1, done
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["Error", "Hint"], done.stderr
    for part in says:
        assert part in done.stderr


@pytest.mark.parametrize("command", ["--help", "--version", "inspect PLAN", "inspect PLAN --json", "list recipes"])
def test_a_closed_standard_output_is_an_error(run_folder: Path, command: str) -> None:
    command = command.replace("PLAN", str(run_folder / "plans" / "paper-3"))
    one_error(shell(f"AATC {command} >&-", run_folder), "standard output is closed", "> /dev/null")
    assert shell(f"AATC {command} >&- 2>&-", run_folder).returncode == 1


@pytest.mark.parametrize("closed", ["2>&-", "<&-", "<&- 2>&-"])
def test_a_closed_error_output_or_input_changes_nothing(run_folder: Path, closed: str) -> None:
    plan = run_folder / "plans" / "paper-3"
    usual = shell(f"AATC inspect {plan} --json", run_folder)
    found = shell(f"AATC inspect {plan} --json {closed}", run_folder)
    assert (found.returncode, found.stdout) == (0, usual.stdout)
    assert json.loads(found.stdout)["kind"] == "plan"
    assert shell(f"AATC inspect {run_folder / 'none'} {closed}", run_folder).returncode == 1
    assert shell(f"AATC inspect --no-such-option {closed}", run_folder).returncode == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_standard_output_is_named_and_loses_nothing(run_folder: Path) -> None:
    one_error(shell(f"AATC inspect {run_folder} --json > /dev/full", run_folder), "standard output cannot be written")
    one_error(shell(f"AATC allocate --run {run_folder} --budget 4 -q > /dev/full", run_folder), "No space left")
    assert shell(f"AATC allocate --check {run_folder / 'plans' / 'paper-4'}", run_folder).returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_error_output_stops_nothing(run_folder: Path) -> None:
    assert shell(f"AATC allocate --run {run_folder} --budget 4 2> /dev/full", run_folder).returncode == 0
    assert shell("AATC inspect --no-such-option 2> /dev/full", run_folder).returncode == 2


def test_no_artifact_becomes_a_standard_stream(run_folder: Path) -> None:
    """With streams closed the next file that is opened would be one: what is said then would be written into it."""
    done = shell(f"AATC allocate --run {run_folder} --budget 4 <&- 2>&-", run_folder)
    assert done.returncode == 0
    assert shell(f"AATC allocate --check {run_folder / 'plans' / 'paper-4'}", run_folder).returncode == 0


@pytest.mark.parametrize("kind", ["recipe", "profile"])
def test_a_toml_integer_of_thousands_of_digits(aatc: Any, tmp_path: Path, kind: str) -> None:
    file = tmp_path / "big.toml"
    file.write_text(f'name = "big"\nmax_bits = {"9" * 5000}\n')
    command = {
        "recipe": ["allocate", "--run", tmp_path, "--recipe", file, "--budget", 2],
        "profile": ["inspect", "--profile", file, "--budget", 2],
    }[kind]
    outcome = aatc(*command)
    assert outcome.code == 1
    assert "big.toml is not valid TOML" in outcome.err
    assert [line.split(":")[0] for line in outcome.err.splitlines()] == ["Error", "Hint"]


@pytest.mark.parametrize("digits", [20, 400, 5000])
def test_a_context_of_many_digits(aatc: Any, digits: int) -> None:
    outcome = aatc("inspect", "--profile", "llama-3.1-8b-instruct", "--budget", 2, "--context", "9" * digits)
    assert outcome.code == 2
    assert "--context" in outcome.err


@pytest.mark.parametrize("place", ["transforms/whiten", "plans/paper-3", "stats"])
def test_a_file_of_holes_under_a_memory_limit(run_folder: Path, place: str) -> None:
    with (run_folder / place / "tensors.safetensors").open("r+b") as file:
        file.truncate(1 << 40)
    limit = 4 << 30
    command = {"stats": f"AATC whiten --run {run_folder} --percentile 98 --force"}.get(
        place, f"AATC inspect {run_folder / place}"
    )
    done = shell(command, run_folder, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))
    one_error(done, "is damaged", "1,099,511,627,776 bytes")


def forged(run: Path, change: Callable[[str, np.ndarray], np.ndarray]) -> Path:
    """The Transform of ``run`` with other tensors and hashes that agree with them."""
    artifact = open_artifact(run / "transforms" / "whiten", "transform")
    manifest = artifact.manifest
    parts = {name: change(name, artifact.array(name)) for name in manifest.tensors}
    with ArtifactWriter(artifact.path, "transform") as writer:
        for name, part in parts.items():
            writer.add(name, part)
        writer.commit(
            settings=manifest.settings,
            model=manifest.model,
            inputs=manifest.inputs,
            texts=manifest.texts,
            results=manifest.results,
        )
    return artifact.path


VARIANCES: dict[str, tuple[Callable[[np.ndarray], np.ndarray], str]] = {
    "empty": (lambda part: part[:0], "does not hold finite numbers of shape"),
    "zero": (lambda part: 0 * part, "are zero in every channel of every layer"),
    "negative": (lambda part: -part, "has negative values"),
    "infinite": (lambda part: part + np.inf, "does not hold finite numbers of shape"),
    "integers": (lambda part: part.astype(np.int64), "does not hold finite numbers of shape"),
}


@pytest.mark.parametrize("kind", VARIANCES)
@pytest.mark.parametrize("recipe", ["paper", "uniform", "var-only"])
def test_a_transform_whose_variances_cannot_be(aatc: Any, run_folder: Path, kind: str, recipe: str) -> None:
    change, says = VARIANCES[kind]
    forged(run_folder, lambda name, part: change(part) if name.endswith(".variance") else part)
    outcome = aatc("allocate", "--run", run_folder, "--recipe", recipe, "--budget", 4)
    assert outcome.code == 1, outcome
    assert says in outcome.err
    assert not (run_folder / "plans" / f"{recipe}-4").exists()


def test_a_dead_site_is_none_of_that(aatc: Any, run_folder: Path) -> None:
    """Values of one layer that are zero are a fact of a model."""
    forged(run_folder, lambda name, part: 0 * part if name == "layers.1.v.variance" else part)
    assert aatc("allocate", "--run", run_folder, "--budget", 4).code == 0
    outcome = aatc("inspect", run_folder / "transforms" / "whiten", "--json")
    dead = next(site for site in outcome.json["sites"] if (site["layer"], site["side"]) == (1, "v"))
    assert (dead["effective_rank"], dead["top_over_median"]) == (0.0, 0.0)
