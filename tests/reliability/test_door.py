"""Nothing outside the run is read, written or deleted, whatever lies in the run: links, pipes, forged records."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aatc_cli.artifacts.disk import temporary_beside
from aatc_cli.artifacts.evaluation import write_sealed
from aatc_cli.artifacts.locking import locked, sweep
from aatc_cli.artifacts.manifest import digest_of
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.study import StudyCell, StudyResult, StudyRow, read_studies, update_study
from aatc_cli.errors import AatcError, ArtifactError

SECRET = "not ours\n"


def _link(place: Path, outside: Path) -> None:
    place.symlink_to(outside)


def _hard_link(place: Path, outside: Path) -> None:
    os.link(outside, place)


def _dangling(place: Path, outside: Path) -> None:
    place.symlink_to(outside.with_name("to be made"))


def _own_file(place: Path, outside: Path) -> None:
    place.write_text(SECRET)


LOCKS: dict[str, Callable[[Path, Path], None]] = {
    "link": _link,
    "hard link": _hard_link,
    "dangling link": _dangling,
    "pipe": lambda place, outside: os.mkfifo(place),
    "folder": lambda place, outside: place.mkdir(),
    "a file of the user": _own_file,
}


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A file that is none of the tool's business."""
    path = tmp_path / "outside" / "secret"
    path.parent.mkdir()
    path.write_text(SECRET)
    return path


def _commands(run: Path, model: Path, text: Path) -> dict[str, list[object]]:
    where = ["--run", run]
    judged = ["--model", model, "--text", text]
    return {
        "collect": ["collect", *where, *judged, "--samples", 4, "--length", 48, "--force"],
        "whiten": ["whiten", *where, "--percentile", 98, "--force"],
        "allocate": ["allocate", *where, "--budget", 4],
        "inspect": ["inspect", *where],
        "report": ["report", *where],
    }


@pytest.mark.parametrize("kind", LOCKS)
@pytest.mark.parametrize("place", [".lock", "report/.lock"])
def test_what_lies_in_place_of_a_lock_is_left_alone(
    aatc: Any, run_folder: Path, outside: Path, place: str, kind: str
) -> None:
    lock = run_folder / place
    lock.parent.mkdir(exist_ok=True)
    lock.unlink(missing_ok=True)
    LOCKS[kind](lock, outside)
    command = ["allocate", "--run", run_folder, "--budget", 4] if place == ".lock" else ["report", "--run", run_folder]
    outcome = aatc(*command)
    assert outcome.code == 1, outcome
    assert [line.split(":")[0] for line in outcome.err.splitlines()] == ["Error", "Hint"]
    assert ".lock" in outcome.err
    assert outside.read_text() == SECRET
    assert sorted(path.name for path in outside.parent.iterdir()) == ["secret"]
    assert kind != "a file of the user" or lock.read_text() == SECRET


def test_an_old_lock_is_a_lock(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("12345")
    with locked(tmp_path, wait=False):
        assert (tmp_path / ".lock").read_text() == str(os.getpid())


FOLDERS = ("stats", "transforms", "plans", "evals", "report", "stability", "studies")


@pytest.mark.parametrize("inside", [False, True], ids=["out", "within"])
@pytest.mark.parametrize("command", ["collect", "whiten", "allocate", "inspect", "report"])
@pytest.mark.parametrize("folder", FOLDERS)
def test_no_folder_of_a_run_is_followed(
    aatc: Any,
    run_folder: Path,
    tiny_llama: Path,
    corpus: Path,
    tmp_path: Path,
    snapshot: Any,
    folder: str,
    command: str,
    inside: bool,
) -> None:
    """The folder lies elsewhere, and a link in its place: whoever needs it refuses, and nothing there changes."""
    elsewhere = run_folder / "other-place" if inside else tmp_path / "elsewhere"
    if (run_folder / folder).exists():
        shutil.move(run_folder / folder, elsewhere)
    else:
        elsewhere.mkdir()
    (run_folder / folder).symlink_to(elsewhere)
    before = snapshot(elsewhere)
    outcome = aatc(*_commands(run_folder, tiny_llama, corpus)[command])
    assert snapshot(elsewhere) == before
    assert "Traceback" not in outcome.err
    needs = {
        "collect": ("stats",),
        "whiten": ("stats", "transforms"),
        "allocate": ("transforms", "plans"),
        "inspect": ("transforms", "plans", "evals", "stats"),
        "report": ("plans", "evals", "report", "transforms", "studies", "stats"),
    }[command]
    if folder in needs:
        assert outcome.code == 1, outcome
        assert "symbolic link" in outcome.err


@pytest.mark.parametrize("inner", ["manifest.json", "tensors.safetensors"])
@pytest.mark.parametrize("place", ["stats", "transforms/whiten", "plans/paper-3"])
def test_no_file_of_an_artifact_is_followed(
    aatc: Any, run_folder: Path, tmp_path: Path, place: str, inner: str
) -> None:
    file = run_folder / place / inner
    shutil.move(file, tmp_path / "moved")
    file.symlink_to(tmp_path / "moved")
    outcome = aatc("inspect", run_folder / place)
    assert outcome.code == 1, outcome
    assert outcome.out == ""


CELL = StudyCell(row="paper-2", task="kl", text="t", length=8)


def _sealed_study(run: Path, **changes: object) -> Path:
    row = StudyRow(name="paper-2", label="p", recipe="paper", stats=None, asked=2.0, matched=False)
    made = StudyResult(study="quick", summary="s", model="m", model_fingerprint="f", rows=(row,), cells=(CELL,))
    path = run / "studies" / "quick.json"
    write_sealed(path, made)
    raw = json.loads(path.read_text())
    raw |= changes
    raw.pop("digest")
    path.write_text(json.dumps(raw | {"digest": digest_of(raw)}))
    return path


@pytest.mark.parametrize(
    "file",
    [
        "../outside/evals/secret.json",
        "/etc/evals/passwd.json",
        "studies/../../evals/x.json",
        "studies/../evals/x.json",
        "studies/./evals/x.json",
        "evals/../x.json",
        "studies/a/b/evals/x.json",
        "evals/x.json\n",
    ],
)
def test_a_forged_study_names_no_file_outside(tmp_path: Path, file: str) -> None:
    _sealed_study(tmp_path, cells=[CELL.model_dump(mode="json") | {"file": file}])
    with pytest.raises(ArtifactError, match="not a valid study"):
        read_studies(tmp_path)


@pytest.mark.parametrize("name", ["../../quick", "/tmp/quick", "a/b", "..", ".hidden", "", "other"])
def test_a_forged_study_has_no_name_that_leads_elsewhere(tmp_path: Path, name: str) -> None:
    path = _sealed_study(tmp_path, study=name)
    with pytest.raises(ArtifactError):
        read_studies(tmp_path)
    assert path.is_file()


def test_a_link_in_place_of_a_named_evaluation_is_no_way_out(tmp_path: Path, outside: Path) -> None:
    (tmp_path / "evals").symlink_to(outside.parent)
    with pytest.raises(ArtifactError, match="symbolic link"):
        Run(tmp_path).evaluation("evals/secret.json")
    (tmp_path / "evals").unlink()
    (tmp_path / "evals").mkdir()
    (tmp_path / "evals" / "x.json").symlink_to(outside)
    with pytest.raises(ArtifactError, match="symbolic link"):
        Run(tmp_path).evaluation("evals/x.json")


def test_studies_that_are_a_link_are_not_written(tmp_path: Path, outside: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "studies").symlink_to(outside.parent)
    empty = StudyResult(study="quick", summary="s", model="m", model_fingerprint="f")
    with pytest.raises(AatcError, match="symbolic link"):
        update_study(run, empty, lambda result: result)
    assert sorted(path.name for path in outside.parent.iterdir()) == ["secret"]


@pytest.mark.parametrize("name", ["..", "../x", "a/b", "/tmp", ".x", ""])
def test_names_that_lead_elsewhere(tmp_path: Path, name: str) -> None:
    run = Run(tmp_path)
    for place in (run.stats, lambda each: run.within("studies", each), run.transform, run.evaluation):
        with pytest.raises(AatcError):
            place(name)


def test_only_what_a_killed_writer_left_is_swept(tmp_path: Path, outside: Path) -> None:
    """Names with the mark and 16 random digits are ours; a user's own are not, and links are removed, not followed."""
    theirs = [".notes.tmp-1", ".x.old-2", ".y.tmp-aatc", "a.tmp-aatc-0123456789abcdef", ".z.tmp-aatc-0123456789abcdeg"]
    for name in theirs:
        (tmp_path / name).write_text(SECRET)
    ours = temporary_beside(tmp_path / "plan", "tmp")
    ours.mkdir()
    (ours / "part").write_text("x")
    aside = temporary_beside(tmp_path / "old-plan", "old")
    aside.mkdir()
    planted = temporary_beside(tmp_path / "planted", "old")
    planted.symlink_to(outside.parent)
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*theirs, "old-plan", "outside"])
    assert outside.read_text() == SECRET


def test_temporary_names_cannot_be_guessed(tmp_path: Path) -> None:
    names = {temporary_beside(tmp_path / "plan", "tmp").name for _ in range(100)}
    assert len(names) == 100


def test_a_terabyte_of_holes_is_refused_before_it_is_read(run_folder: Path, aatc: Any) -> None:
    with (run_folder / "transforms" / "whiten" / "manifest.json").open("r+b") as handle:
        handle.truncate(1 << 40)
    outcome = aatc("inspect", run_folder / "transforms" / "whiten")
    assert outcome.code == 1
    assert "larger than 64 MiB" in outcome.err


def forge(path: Path, **changes: object) -> None:
    """Change fields of a manifest and give it the digest that agrees with them."""
    raw = json.loads((path / "manifest.json").read_text())
    raw |= changes
    hashed = {key: raw[key] for key in raw if key not in ("digest", "provenance")}
    (path / "manifest.json").write_text(json.dumps(raw | {"digest": digest_of(hashed)}))


@pytest.mark.parametrize("name", ["../../outside", "/tmp/outside", "a/b", ".."])
def test_a_forged_recipe_has_no_name_that_leads_elsewhere(aatc: Any, run_folder: Path, name: str) -> None:
    plan = run_folder / "plans" / "paper-3"
    settings = json.loads((plan / "manifest.json").read_text())["settings"]
    settings["recipe"]["name"] = name
    forge(plan, settings=settings)
    outcome = aatc("inspect", plan)
    assert (outcome.code, outcome.out) == (1, "")
    assert "its settings are not those of a plan" in outcome.err


def test_a_pipe_in_place_of_an_evaluation_keeps_nobody_waiting(aatc: Any, run_folder: Path) -> None:
    (run_folder / "evals").mkdir(exist_ok=True)
    os.mkfifo(run_folder / "evals" / "kl.paper-3.json")
    outcome = aatc("report", "--run", run_folder)
    assert outcome.code == 1
    assert "not a regular file" in outcome.err


@pytest.mark.parametrize("name", ["report.md", "report.html", "results.csv", "report.json"])
def test_a_link_in_place_of_a_report_is_replaced_and_not_followed(
    aatc: Any, run_folder: Path, outside: Path, name: str
) -> None:
    (run_folder / "report").mkdir()
    (run_folder / "report" / name).symlink_to(outside)
    assert aatc("report", "--run", run_folder).code == 0
    assert outside.read_text() == SECRET
    assert not (run_folder / "report" / name).is_symlink()


def test_a_checkpoint_that_is_a_link_is_neither_read_nor_removed(
    aatc: Any, run_folder: Path, tiny_llama: Path, corpus: Path, tmp_path: Path, snapshot: Any
) -> None:
    shutil.copytree(run_folder / "stats", tmp_path / "elsewhere")
    (run_folder / ".stats.partial").symlink_to(tmp_path / "elsewhere")
    before = snapshot(tmp_path / "elsewhere")
    outcome = aatc(*_commands(run_folder, tiny_llama, corpus)["collect"])
    assert outcome.code == 1
    assert "symbolic link" in outcome.err
    assert snapshot(tmp_path / "elsewhere") == before


def test_what_was_moved_aside_is_checked_as_any_artifact(aatc: Any, run_folder: Path) -> None:
    """A foreign plan under the name of a replaced one comes back to its place, and is refused there."""
    plan = run_folder / "plans" / "paper-3"
    forge(plan, inputs={"transform": "0" * 64})
    os.rename(plan, temporary_beside(plan, "old"))
    outcome = aatc("allocate", "--run", run_folder, "--budget", 3)
    assert outcome.code == 1
    assert "inputs.transform was" in outcome.err
    assert aatc("allocate", "--check", plan).code == 1


def test_a_field_given_twice_is_no_way_around_the_digest(run_folder: Path, aatc: Any) -> None:
    """Whichever of the two a parser takes, the digest is over what is used."""
    file = run_folder / "plans" / "paper-3" / "manifest.json"
    text = file.read_text()
    for twice in ('"kind": "stats",', '"schema_version": 1,', '"results": {},', '"digest": "' + "0" * 64 + '",'):
        for changed in (text.replace("{", "{" + twice, 1), text.rstrip()[:-1] + "," + twice.rstrip(",") + "}"):
            file.write_text(changed)
            outcome = aatc("inspect", file.parent, "--json")
            assert outcome.code == 1 or outcome.json["results"] == json.loads(text)["results"]


def test_two_tensors_on_the_same_bytes_are_refused(run_folder: Path, aatc: Any) -> None:
    file = run_folder / "plans" / "paper-3" / "tensors.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    first, second = sorted(header)[:2]
    header[second]["data_offsets"] = header[first]["data_offsets"]
    text = json.dumps(header).encode().ljust(length)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    outcome = aatc("inspect", file.parent)
    assert (outcome.code, outcome.out) == (1, "")


def test_a_run_that_is_a_link_is_the_users_affair(aatc: Any, run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run_folder)
    assert aatc("allocate", "--run", tmp_path / "link", "--budget", 4).code == 0
    assert (run_folder / "plans" / "paper-4" / "manifest.json").is_file()
