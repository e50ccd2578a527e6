"""The commands on a tiny model: what they print where, what they leave alone, and how they end."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import aatc_cli
from aatc_cli.artifacts.artifact import ArtifactWriter, open_artifact
from aatc_cli.artifacts.plan import Plan
from aatc_cli.cli.options import GROUPS
from aatc_cli.evals import TASKS, Task
from aatc_cli.evals.reading import read_evaluations

ROOT = Path(aatc_cli.__file__).parents[1]
COMMANDS = ["collect", "whiten", "allocate", "inspect", "eval", "study", "report"]


@pytest.fixture
def collect(aatc: Any, tiny_llama: Path, corpus: Path, tmp_path: Path) -> Any:
    """Run ``aatc collect`` on the tiny model into the test's own run."""

    def run(*arguments: object) -> Any:
        defaults = ("--run", tmp_path / "run", "--model", tiny_llama, "--text", corpus, "--samples", 6, "--length", 48)
        return aatc("collect", *defaults, *arguments)

    return run


def process(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "aatc_cli", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, text=True, **({"capture_output": True} | options))


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_of_every_command(aatc: Any, command: str, flag: str) -> None:
    outcome = aatc(command, flag)
    assert (outcome.code, outcome.err) == (0, "")
    assert "Usage: aatc " + command in outcome.out
    assert "--run" in outcome.out or command == "eval"


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_help_of_every_task(aatc: Any, task: Task) -> None:
    """Every field of its settings is an option, and so are the groups that it reads and no others."""
    outcome = aatc("eval", task.name, "--help")
    assert (outcome.code, outcome.err) == (0, "")
    for name in task.part("settings", "Settings").model_fields:
        assert "--" + name.replace("_", "-") in outcome.out
    for group, options in GROUPS.items():
        for name, _, _ in options:
            read = any(name in [entry[0] for entry in GROUPS[one]] for one in task.reads)
            own = name in task.part("settings", "Settings").model_fields
            shown = re.search(rf"--{name.replace('_', '-')}\b(?!-)", outcome.out) is not None
            assert shown == (read or own), (group, name)


def test_version_and_no_command(aatc: Any) -> None:
    assert aatc("--version").out == f"aatc {aatc_cli.__version__}\n"
    outcome = aatc()
    assert outcome.code == 2
    assert all(command in outcome.out for command in COMMANDS)
    assert "Error" not in outcome.out + outcome.err


def test_the_whole_pipeline_with_json(aatc: Any, collect: Any, tiny_llama: Path, tmp_path: Path, corpus: Path) -> None:
    """Every command gives exactly one JSON document on stdout, which says what is on disk."""
    run = tmp_path / "run"
    stats = collect("--json")
    assert stats.code == 0
    assert stats.json == {"path": str(run / "stats"), "digest": open_artifact(run / "stats", "stats").manifest.digest}
    assert "collect: " in stats.err

    transform = aatc("whiten", "--run", run, "--json")
    path = run / "transforms" / "whiten"
    assert transform.json == {"path": str(path), "digest": open_artifact(path, "transform").manifest.digest}

    plans = aatc(
        "allocate", "--run", run, "--budget", 3, "--budget", 4.5, "--recipe", "paper", "--recipe", "var-only", "--json"
    )
    names = ["paper-3", "paper-4.5", "var-only-3", "var-only-4.5"]
    assert [Path(fact["path"]).name for fact in plans.json] == names
    assert sorted(p.name for p in (run / "plans").iterdir()) == names
    for fact in plans.json:
        plan = Plan.open(Path(fact["path"]))
        assert fact["plan"] == plan.digest
        assert fact["bits_mean"] == plan.mean_bits
        assert fact["bytes_total"] == plan.layout.bytes(8192)

    check = aatc("allocate", "--check", run / "plans" / "paper-3", "--json")
    [checked] = check.json
    assert (check.code, checked["identical"], checked["differences"]) == (0, True, [])
    assert (checked["plan"], checked["path"]) == (plans.json[0]["plan"], plans.json[0]["path"])

    assert len(aatc("inspect", "--run", run, "--json").json["artifacts"]) == 6
    assert aatc("inspect", "--run", run, "--budget", 3, "--json").json["budget"] == "3"
    assert aatc("inspect", run, "--budget", 3, "--json").json["budget"] == "3"
    assert aatc("inspect", "--plan", run / "plans" / "var-only-3", "--json").json["recipe"] == "var-only"
    for name, kind in (("stats", "stats"), ("transforms/whiten", "transform"), ("plans/paper-3", "plan")):
        assert aatc("inspect", run / name, "--json").json["kind"] == kind
    assert aatc("inspect", "--model", tiny_llama, "--json").json["architecture"] == "llama"
    profile = aatc("inspect", "--profile", "llama-3.1-8b-instruct", "--budget", 2.5, "--json")
    assert profile.json["ratio"] == pytest.approx(5.82, rel=0.03)

    options = ("--run", run, "--model", tiny_llama, "--text", corpus, "--length", 160, "--limit", 1)
    evaluated = aatc("eval", *options, "--recipe", "fp16", "--recipe", "paper", "--budget", 3, "--json")
    assert evaluated.code == 0, evaluated.err
    assert [(e["recipe"], e["budget"]) for e in evaluated.json] == [("fp16", None), ("paper", "3")]
    assert evaluated.json[0]["kl_mean"] < evaluated.json[1]["kl_mean"]
    stored = [evaluation.model_dump(mode="json") for evaluation in read_evaluations(run / "evals")]
    entries = evaluated.json
    paths = [Path(entry.pop("path")) for entry in entries]
    assert stored == entries
    assert paths == [next((run / "evals").glob(f"kl.{name}*")) for name in ("fp16", "paper")]
    assert aatc("inspect", paths[1], "--json").json == entries[1]
    assert evaluated.json[1]["plan"] == plans.json[0]["plan"]
    assert evaluated.json[1]["bytes_total"] == Plan.open(run / "plans" / "paper-3").layout.bytes(160)
    assert evaluated.json[0]["bytes_total"] == 160 * 4 * 2 * 32 * 2

    report = aatc("report", "--run", run, "--json")
    assert report.code == 0, report.err
    assert all(Path(path).is_file() for path in report.json.values())


def test_tables_for_people(aatc: Any, collect: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    stats = collect()
    digest = open_artifact(run / "stats", "stats").manifest.digest
    assert stats.out == f"{run / 'stats'} {digest}\n"
    assert aatc("whiten", "--run", run).out.startswith(f"{run / 'transforms' / 'whiten'} ")
    out = aatc("allocate", "--run", run, "--budget", 3).out
    assert "packed bits" in out
    plan = Plan.open(run / "plans" / "paper-3")
    assert plan.digest[:12] in out
    out = aatc("inspect", "--run", run, "--recipe", "paper", "--budget", 3).out
    assert "channels at 0..16 bits" in out
    assert f"{plan.layout.bytes(8192):,}" in out
    out = aatc("allocate", "--check", run / "plans" / "paper-3").out
    assert out == f"{run / 'plans' / 'paper-3'}: identical ({plan.digest[:12]})\n"


def test_nothing_to_do_says_so_and_touches_nothing(aatc: Any, collect: Any, tmp_path: Path, snapshot: Any) -> None:
    run = tmp_path / "run"
    commands = [
        ("collect", lambda *more: collect(*more)),
        ("whiten", lambda *more: aatc("whiten", "--run", run, *more)),
        ("allocate", lambda *more: aatc("allocate", "--run", run, "--budget", 3, "--budget", 4, *more)),
    ]
    first = {name: command("--json") for name, command in commands}
    before = snapshot(run)
    for name, command in commands:
        again = command("--json")
        assert again.code == 0
        assert f"{name}: inputs unchanged, nothing to do" in again.err
        assert again.json == first[name].json
        assert snapshot(run) == before
    for name, command in commands:
        forced = command("--json", "--force")
        assert "nothing to do" not in forced.err
        # made again from the same inputs, it is the same
        assert forced.json == first[name].json
    assert {path: content for path, (content, _) in snapshot(run).items() if "manifest" in path} == {
        path: content for path, (content, _) in before.items() if "manifest" in path
    }
    assert snapshot(run) != before


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("collect", "--seed", 1), ("settings.seed was 0, now 1",)),
        (("collect", "--samples", 7), ("settings.samples was 6, now 7", "texts[0].windows was 6, now 7")),
        (("whiten", "--percentile", 90), ("settings.percentile was 99.0, now 90.0",)),
        (("whiten", "--head-groups", 2), ("settings.head_groups.k was 1, now 2",)),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value[0], str) and " " not in value[0] else None,
)
def test_a_changed_setting_is_refused_with_both_values(
    aatc: Any, collect: Any, refuses: Any, tmp_path: Path, tiny_llama: Path, corpus: Path, command: Any, says: Any
) -> None:
    run = tmp_path / "run"
    collect()
    aatc("whiten", "--run", run)
    where = ["--run", run]
    if command[0] == "collect":
        where += ["--model", tiny_llama, "--text", corpus, "--samples", 6, "--length", 48]
    outcome = refuses(command[0], *where, *command[1:], says=says, folder=run)
    assert "--force" in outcome.err
    assert aatc(command[0], *where, *command[1:], "--force").code == 0


def test_whiten_takes_stats_transform_when_it_is_there(aatc: Any, collect: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    collect()
    collect("--calibration", "transform", "--seed", 1)
    assert sorted(path.name for path in run.iterdir() if not path.name.startswith(".")) == ["stats", "stats-transform"]
    aatc("whiten", "--run", run)
    inputs = open_artifact(run / "transforms" / "whiten", "transform").manifest.inputs
    digests = {name: open_artifact(run / name, "stats").manifest.digest for name in ("stats", "stats-transform")}
    assert inputs == {"transform_stats": digests["stats-transform"], "rate_stats": digests["stats"]}
    assert aatc("whiten", "--run", run, "--transform-stats", run / "stats", "--force").code == 0
    inputs = open_artifact(run / "transforms" / "whiten", "transform").manifest.inputs
    assert inputs == {"transform_stats": digests["stats"], "rate_stats": digests["stats"]}


def test_stability_of_two_draws(aatc: Any, tiny_llama: Path, corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for seed in (0, 1):
        options = ("--samples", 6, "--length", 64, "--seed", seed, "--name", f"draw-{seed}")
        assert aatc("collect", "--run", run, "--model", tiny_llama, "--text", corpus, *options).code == 0
    common = ("eval", "stability", "--run", run, "--model", tiny_llama, "--text", corpus, "--length", 160)
    named = ("--stats", run / "draw-0", "--stats", run / "draw-1")
    shown = aatc(*common, "--recipe", "var-only", "--budget", 4, *named, "--limit", 1, "--json")
    assert shown.code == 0, shown.err
    [result] = shown.json
    assert [row["stats"] for row in result["rows"]] == ["draw-0", "draw-1"]
    assert len(list((run / "evals").glob("stability.var-only-4.draw-0-draw-1.*.json"))) == 1
    table = aatc(*common, "--recipe", "var-only", "--budget", 4, *named, "--limit", 1)
    assert "draw-1" in table.out
    assert "largest / smallest" in " ".join(table.out.split())
    for options, says in (((*named,), "needs a budget"), (("--budget", 4, *named[:2]), "two or more Stats")):
        outcome = aatc(*common, "--recipe", "var-only", *options)
        assert outcome.code == 2
        assert says in outcome.err


def test_a_profile_gives_texts_and_head_groups(aatc: Any, tiny_llama: Path, corpus: Path, tmp_path: Path) -> None:
    profile = tmp_path / "tiny.toml"
    profile.write_text(
        'name = "tiny"\nmodel = "o/tiny"\ncontext = 512\nhead_groups = 2\n'
        "[geometry]\nlayers = 4\nheads = 4\nkv_heads = 2\nhead_dim = 16\nhidden_size = 64\n"
        f'[calibration.rates]\nsources = ["{corpus}"]\nsamples = 6\nlength = 48\n'
    )
    run = tmp_path / "run"
    options = ("--run", run, "--model", tiny_llama)
    assert aatc("collect", *options, "--profile", profile).code == 0
    aatc("whiten", "--run", run)
    transform = open_artifact(run / "transforms" / "whiten", "transform")
    assert transform.manifest.settings["head_groups"] == {"k": 2, "v": 2}
    # the same collection without the profile is another one, since whiten would take other head groups
    outcome = aatc("collect", *options, "--text", corpus, "--samples", 6, "--length", 48)
    assert outcome.code == 1
    assert "settings.head_groups was 2, now 1" in outcome.err
    outcome = aatc("collect", *options, "--profile", profile, "--calibration", "transform")
    assert outcome.code == 2
    assert "profile tiny has no transform calibration" in outcome.err


def test_run_and_model_from_the_environment(
    aatc: Any, tiny_llama: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AATC_RUN", str(tmp_path / "by-name"))
    monkeypatch.setenv("AATC_MODEL", str(tiny_llama))
    monkeypatch.chdir(tmp_path)
    assert aatc("collect", "--text", corpus, "--samples", 6, "--length", 48).code == 0
    assert aatc("whiten").code == 0
    assert aatc("allocate", "--budget", 3).code == 0
    assert len(aatc("inspect", "--json").json["artifacts"]) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["by-name"]
    # an option wins over the environment, and ./run is the default without either
    assert aatc("inspect", "--run", "elsewhere").code == 1
    monkeypatch.delenv("AATC_RUN")
    monkeypatch.delenv("AATC_MODEL")
    assert "there are no artifacts in run" in aatc("inspect").err
    (tmp_path / "by-name").rename(tmp_path / "run")
    assert len(aatc("inspect", "--json").json["artifacts"]) == 3
    assert aatc("collect", "--text", corpus).code == 2


def test_check_prints_the_difference_and_exits_1(aatc: Any, run_folder: Path, snapshot: Any) -> None:
    path = run_folder / "plans" / "paper-3"
    plan = Plan.open(path)
    manifest, parts = plan.manifest, dict(plan.artifact.tensors())
    old = int(parts["layers.2.v.bits"][5])
    parts["layers.2.v.bits"][5] = old + 1
    with ArtifactWriter(path, "plan") as writer:
        for name, tensor in parts.items():
            writer.add(name, tensor)
        writer.commit(
            settings=manifest.settings, model=manifest.model, inputs=manifest.inputs, results=manifest.results
        )
    before = snapshot(run_folder)
    shown = aatc("allocate", "--check", path)
    assert (shown.code, shown.err) == (1, "")
    assert "1 channels differ" in shown.out
    assert re.search(rf"2 v\W+5\W+{old + 1}\W+{old}\b", shown.out)
    data = aatc("allocate", "--check", path, "--json")
    assert data.code == 1
    difference = {"layer": 2, "side": "v", "channel": 5, "planned": old + 1, "derived": old}
    digest = Plan.open(path).digest
    assert data.json == [{"plan": digest, "path": str(path), "identical": False, "differences": [difference]}]
    assert snapshot(run_folder) == before


def test_check_with_a_transform_elsewhere(aatc: Any, run_folder: Path, tmp_path: Path) -> None:
    shutil.move(run_folder / "transforms" / "whiten", tmp_path / "moved")
    path = run_folder / "plans" / "paper-3"
    assert aatc("allocate", "--check", path).code == 1
    assert aatc("allocate", "--check", path, "--transform", tmp_path / "moved").code == 0


def test_check_of_many_plans_at_once(aatc: Any, run_folder: Path) -> None:
    assert aatc("allocate", "--run", run_folder, "--budget", 3.5, "--budget", 4, "-q").code == 0
    plans = sorted((run_folder / "plans").iterdir())
    every = aatc("allocate", "--check", *plans)
    assert (every.code, every.out.count(": identical (")) == (0, 3)
    (plans[1] / "manifest.json").write_text("{}", "utf-8")
    some = aatc("allocate", "--check", *plans, "--json")
    assert some.code == 1
    assert [(found["path"], found["identical"]) for found in some.json] == [
        (str(plan), plan is not plans[1]) for plan in plans
    ]
    assert "schema version None" in some.json[1]["error"]
    refused = aatc("allocate", *plans)
    assert (refused.code, refused.out) == (2, "")


def test_a_budget_that_cannot_be_met_does_not_stop_the_others(aatc: Any, run_folder: Path) -> None:
    budgets = [word for bits in (0.05, 3.5, 0.1, 4) for word in ("--budget", bits)]
    outcome = aatc("allocate", "--run", run_folder, *budgets, "--json")
    assert outcome.code == 1
    assert [fact["budget"] for fact in outcome.json] == ["3.5", "4"]
    assert {plan.name for plan in (run_folder / "plans").iterdir()} == {"paper-3", "paper-3.5", "paper-4"}
    [error] = [line for line in outcome.err.splitlines() if line.startswith("Error: ")]
    assert error.startswith("Error: 2 of 4 plans cannot be made: paper 0.05: ")
    assert "; paper 0.1: " in error
    alone = aatc("allocate", "--run", run_folder, "--budget", 0.05)
    assert (alone.code, alone.out) == (1, "")
    assert "cannot be made" not in alone.err


@pytest.mark.parametrize("options", [("--ratio", 3.5), ("--bytes", "1.1MB")])
def test_ratio_and_bytes_are_met(aatc: Any, run_folder: Path, options: tuple[str, object]) -> None:
    facts = aatc("allocate", "--run", run_folder, *options, "--context", 8192, "--json").json
    assert len(facts) == 1
    plan = Plan.open(Path(facts[0]["path"]))
    if options[0] == "--ratio":
        assert 3.5 <= plan.layout.ratio(8192) < 3.6
    else:
        assert 1_060_000 < plan.layout.bytes(8192) <= 1_100_000
    again = aatc("inspect", "--run", run_folder, *options, "--context", 8192, "--json")
    assert again.json["layout"]["bytes_total"] == plan.layout.bytes(8192)


def test_brackets_and_colons_in_names_are_printed(aatc: Any, tiny_llama: Path, corpus: Path, tmp_path: Path) -> None:
    text = Path(shutil.copy(corpus, tmp_path / "[red]draft :key:.txt"))
    # a path with what a markup language would take for a closing tag
    run = tmp_path / "x[" / "bold]run"
    options = ("--run", run, "--model", tiny_llama, "--text", text, "--samples", 6, "--length", 48)
    outcome = aatc("collect", *options)
    assert outcome.code == 0, outcome.err
    assert str(run) in outcome.err
    assert text.name in aatc("inspect", run / "stats").out


def test_interrupt(aatc: Any, collect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from aatc_cli.stages import collect as stage

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stage, "load_model", interrupt)
    outcome = collect()
    assert outcome.code == 130
    assert outcome.err.splitlines()[-2:] == [
        "Error: interrupted",
        "Hint: run the same command again; collect continues from its last checkpoint",
    ]


def test_a_defect_of_ours_is_not_hidden(aatc: Any, collect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from aatc_cli.stages.collecting import opening

    monkeypatch.setattr(opening, "check_rank", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        collect()


# true processes: the entry point, signals and pipes


def test_a_wrong_command_line_in_a_process() -> None:
    result = process("whiten", "--percentile", "0")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines()[0].startswith("Error: --percentile must lie in (0, 100], got 0")
    assert result.stderr.splitlines()[1].startswith("Hint: ")
    assert len(result.stderr.splitlines()) == 2


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = [sys.executable, "-m", "aatc_cli", "--version"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        assert running.stderr.read() == b""
    assert running.returncode == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_under_stdout() -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        result = process(
            "inspect",
            "--profile",
            "llama-3.1-8b-instruct",
            "--budget",
            "2",
            "--json",
            capture_output=False,
            stdout=full,
            stderr=subprocess.PIPE,
        )
    assert result.returncode == 1
    assert result.stderr.splitlines()[0] == "Error: the standard output cannot be written: No space left on device"
    assert len(result.stderr.splitlines()) == 2


def test_a_terminal_without_the_characters(run_folder: Path) -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "AATC_RUN": str(run_folder)}
    result = process("inspect", "--budget", "3", env=environment)
    assert (result.returncode, result.stderr) == (0, "")
    assert "channels at 0..16 bits" in result.stdout


# stops itself once a window is done, so that the signal comes in the middle on any machine. Who starts the tests may
# have had SIGINT ignored, as a shell does for what it puts into the background, and that is inherited
STOPS = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from aatc_cli.__main__ import main
from aatc_cli.stages.collecting.job import CollectJob
write = CollectJob.write
def stopping(*arguments):
    done = write(*arguments)
    os.kill(os.getpid(), signal.SIGSTOP)
    return done
CollectJob.write = stopping
main()
"""


@pytest.mark.parametrize("ignored", [False, True], ids=["shell", "background"])
def test_ctrl_c_in_a_process(tiny_llama: Path, corpus: Path, tmp_path: Path, ignored: bool) -> None:
    asked = ("--run", tmp_path / "run", "--model", tiny_llama, "--text", corpus, "--samples", 9, "--length", 48)
    command = [sys.executable, "-c", STOPS, "collect", *map(str, asked), "--checkpoint-seconds", "0"]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if ignored else None
    try:
        running = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)
    _, status = os.waitpid(running.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    running.send_signal(signal.SIGINT)
    running.send_signal(signal.SIGCONT)
    out, rest = running.communicate(timeout=600)
    assert (running.returncode, out) == (130, "")
    assert rest.splitlines()[-2] == "Error: interrupted"
    assert not (tmp_path / "run" / "stats").exists()
