"""Children that meet faults, and what is left behind by them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from aatc_cli.artifacts.artifact import open_artifact
from aatc_cli.artifacts.manifest import read_manifest

SERVER = Path(__file__).with_name("children.py")


@dataclass(frozen=True)
class Ended:
    """How a child ended: exit code (negative: the signal), output, calls of the file system, seconds."""

    code: int
    out: str
    err: str
    calls: int
    seconds: float


class Children:
    """Runs commands in children of one process that has everything loaded."""

    def __init__(self, process: subprocess.Popen[str], scratch: Path) -> None:
        self.process, self.scratch, self.number = process, scratch, 0
        self.folders: dict[int, Path] = {}

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """One request to the process and its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": do} | request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the process that forks children ended"
        return json.loads(line)

    def start(self, *argv: object, folder: Path, **fault: Any) -> int:
        """Start a child with a fault under ``folder``; its process id."""
        self.number += 1
        out = self.scratch / str(self.number)
        out.mkdir()
        out.chmod(0o777)
        pid = self.ask("start", argv=[str(a) for a in argv], out=str(out), folder=str(folder), **fault)["pid"]
        self.folders[pid] = out
        return pid

    def end(self, pid: int, after: float | None = None, signal_name: str = "SIGKILL") -> Ended:
        """Wait for a child, sending it a signal ``after`` so many seconds."""
        answer = self.ask("wait", pid=pid, after=after, signal_name=signal_name)
        out = self.folders.pop(pid)
        count = out / "calls"

        def read(file: Path) -> str:
            # a child may have been killed before it opened them
            return file.read_text("utf-8", "replace") if file.exists() else ""

        ended = Ended(
            answer["code"],
            *(read(out / name) for name in ("stdout", "stderr")),
            int(read(count) or -1),
            answer["seconds"],
        )
        shutil.rmtree(out)
        return ended

    def run(
        self, *argv: object, folder: Path, after: float | None = None, signal_name: str = "SIGKILL", **fault: Any
    ) -> Ended:
        """Start a child and wait for it."""
        return self.end(self.start(*argv, folder=folder, **fault), after, signal_name)


@pytest.fixture(scope="session")
def children(tmp_path_factory) -> Iterator[Children]:
    """The process that forks, started once."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    command = [sys.executable, str(SERVER)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", env=environment
    ) as process:
        yield Children(process, tmp_path_factory.mktemp("children"))
        assert process.stdin is not None
        process.stdin.close()


COMMANDS = ("collect", "whiten", "allocate", "eval", "report", "study", "save")
STUDY = """
name = "small"
summary = "Two methods"
methods = [{ recipe = "fp16" }, { recipe = "paper", budgets = [3] }]
tasks = [{ task = "kl", length = 160, limit = 1 }]
"""
INPUTS = {
    "collect": (),
    "whiten": ("stats",),
    "allocate": ("transforms",),
    # Stats tell which share of a text was calibration text
    "eval": ("stats", "transforms", "plans"),
    "report": ("stats", "transforms", "plans", "evals"),
    "study": ("stats", "transforms", "plans"),
    "save": (),
}
RESULTS = {
    "collect": "stats",
    "whiten": "transforms",
    "allocate": "plans",
    "eval": "evals",
    "report": "report",
    "study": "studies",
    "save": "cache",
}


class Workshop:
    """Two undisturbed runs of the pipeline, of another seed each, and what any run holds that a reader accepts."""

    def __init__(self, children: Children, model: Path, corpus: Path, root: Path) -> None:
        self.children, self.model, self.corpus, self.root = children, model, corpus, root
        self.old, self.new, self.results = root / "old", root / "new", RESULTS
        self.study = root / "small.toml"
        self.study.write_text(STUDY, encoding="utf-8")
        for seed, run in ((1, self.old), (0, self.new)):
            for name in COMMANDS[:-1]:
                # in the parent of all children, which so has loaded what the command needs
                answer = children.ask("prepare", argv=[str(part) for part in self.command(name, run, seed=seed)])
                assert answer["code"] == 0, name
        for tokens, run in ((151, self.old), (150, self.new)):
            request = {"model": str(model), "plan": str(self.new / "plans" / "paper-3"), "tokens": tokens}
            digest = children.ask("prepare_cache", **request)["digest"]
            assert children.run("save", run / "cache", folder=run).code == 0
            assert children.run("load", run / "cache", folder=run).out == digest
        self.before = {name: self.contents(name, self.old) for name in COMMANDS}
        self.after = {name: self.contents(name, self.new) for name in COMMANDS}

    def command(self, name: str, run: Path, *, seed: int = 0) -> list[object]:
        """The arguments of a command on a run."""
        model = ("--model", self.model, "--text", self.corpus)
        return {
            "collect": [
                "collect",
                "--run",
                run,
                *model,
                "--samples",
                5,
                "--length",
                48,
                "--rows",
                64,
                "--checkpoint-seconds",
                0,
                "--seed",
                seed,
            ],
            "whiten": ["whiten", "--run", run],
            "allocate": ["allocate", "--run", run, "--budget", 3, "--budget", 4],
            "eval": [
                "eval",
                "--run",
                run,
                *model,
                "--length",
                160,
                "--limit",
                1,
                "--recipe",
                "fp16",
                "--budget",
                3,
                "--recipe",
                "paper",
            ],
            "report": ["report", "--run", run],
            "study": ["study", self.study, "--run", run, *model],
            "save": ["save", run / "cache"],
        }[name]

    def begin(self, name: str, run: Path, *, replacing: bool) -> list[object]:
        """Make ``run`` what it is before a command, with the older results of it in place or not; the command."""
        if run.exists():
            shutil.rmtree(run)
        run.mkdir()
        for folder in INPUTS[name]:
            shutil.copytree(self.new / folder, run / folder)
        if replacing:
            shutil.copytree(self.old / RESULTS[name], run / RESULTS[name])
        forced = ["--force"] if replacing and name not in ("report", "study", "save") else []
        return [*self.command(name, run), *forced]

    def contents(self, name: str, run: Path) -> dict[str, str]:
        """What a command's readers accept of its results, by path; fails for anything in sight that they refuse."""
        from aatc_cli.artifacts.evaluation import read_evaluation
        from aatc_cli.artifacts.run import Run
        from aatc_cli.artifacts.study import read_study

        place, found = Run(run), {}
        if name == "collect":
            # of a checkpoint too every tensor is what its manifest says, but it is no result
            artifacts = [path for path in [run / "stats", *run.glob(".*.partial")] if path.exists()]
        else:
            artifacts = {"whiten": place.transforms, "allocate": place.plans}.get(name, list)()
        for path in artifacts:
            manifest = read_manifest(path)
            assert sum(tensor.nbytes for _, tensor in open_artifact(path, manifest.kind).tensors()) > 0
            if not path.name.endswith(".partial"):
                found[path.name] = manifest.digest
        for path in sorted(place.evals.glob("*.json")) if name == "eval" else []:
            found[path.name] = read_evaluation(path).model_copy(update={"seconds": 0.0}).model_dump_json()
        for path in sorted(place.report.glob("[!.]*")) if name == "report" else []:
            found[path.name] = path.read_text(encoding="utf-8")
        for path in sorted((run / "studies").glob("*.json")) if name == "study" else []:
            cells = read_study(path).cells
            # one after the other; those that are there are of evaluations that are there
            assert all(read_evaluation(run / str(cell.file)).task == "kl" for cell in cells)
            found |= {path.name: json.dumps([cell.row for cell in cells])} if len(cells) == 2 else {}
        if name == "save" and (run / "cache").exists():
            loaded = self.children.run("load", run / "cache", folder=run)
            assert loaded.code == 0, loaded.err
            found["cache"] = loaded.out
        return found

    def litter(self, run: Path) -> list[str]:
        """Names of temporary files and folders, and of checkpoints."""
        marks = (".tmp-", ".old-", ".part")
        return [str(path.relative_to(run)) for path in run.rglob("*") if any(mark in path.name for mark in marks)]

    def check(self, name: str, run: Path, *, replacing: bool) -> None:
        """After a fault: all that a reader accepts is whole, the old or the new; nothing old is lost."""
        old, new, found = self.before[name], self.after[name], self.contents(name, run)
        for path, content in found.items():
            assert content in (old.get(path), new.get(path)), path
        if replacing:
            # between two renames the old one is aside, where the next writer or reader finds it
            aside = [Path(path).name for path in self.litter(run) if ".old-" in path]
            missing = old.keys() - found.keys()
            assert all(any(one.startswith(f".{path}.old-") for one in aside) for path in missing), missing

    def finish(self, name: str, run: Path, command: list[object]) -> None:
        """The same command again does the job: results as undisturbed, and nothing is left lying about."""
        ended = self.children.run(*command, folder=run)
        assert ended.code == 0, ended.err
        assert self.contents(name, run) == self.after[name]
        assert self.litter(run) == []


@pytest.fixture(scope="session")
def workshop(children, tiny_llama, corpus, tmp_path_factory) -> Workshop:
    """The two runs, and commands on copies of them."""
    return Workshop(children, tiny_llama, corpus, tmp_path_factory.mktemp("workshop"))
