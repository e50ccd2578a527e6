"""A number belongs to exactly what it was measured on: what is taken over, what is another file, what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from aatc_cli.artifacts.evaluation import Measurement, read_evaluation, write_evaluation
from aatc_cli.artifacts.run import Run
from aatc_cli.evals import find_task, opened
from aatc_cli.evals.call import Call
from aatc_cli.evals.subjects import EvalOptions, Subject
from aatc_cli.models.loading import find_model
from aatc_cli.profiles import load_recipe
from aatc_cli.stages.eval import evaluate

SIZE = ("--length", 200, "--limit", 2, "--first", 150)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "one" / "text.txt"
    path.parent.mkdir()
    path.write_text("".join(f"line {index} of a text that nobody has calibrated on.\n" for index in range(60)))
    return path


@pytest.fixture
def ask(aatc: Any, run_folder: Path, tiny_llama: Path, text: Path) -> Any:
    """Evaluate KL of the plan and of the reference; later options win."""

    def run(*options: object, model: Path = tiny_llama, of: Path = text) -> Any:
        where = ("--run", run_folder, "--model", model, "--text", of, *SIZE)
        return aatc("eval", *where, "--recipe", "fp16", "--recipe", "paper", "--budget", 3, "--json", *options)

    return run


def files(run: Path) -> dict[str, str]:
    return {path.name: path.read_text("utf-8") for path in (run / "evals").glob("*.json")}


@pytest.mark.parametrize(
    "options",
    [("--limit", 1), ("--first", 151), ("--length", 201), ("--dtype", "bfloat16")],
    ids=lambda options: str(options[0]).strip("-"),
)
def test_another_question_is_another_file(ask: Any, run_folder: Path, options: tuple[object, ...]) -> None:
    """On the code before, --limit 1 after --limit 2 and another dtype replaced what was there."""
    first = ask()
    assert first.code == 0, first.err
    before = files(run_folder)
    other = ask(*options)
    assert other.code == 0, other.err
    assert "nothing to do" not in other.err
    after = files(run_folder)
    assert len(after) == len(before) + 2
    assert {name: after[name] for name in before} == before
    again = ask()
    assert again.err.count("nothing to do") == 2
    assert again.json == first.json


def test_two_texts_of_one_name(ask: Any, run_folder: Path, text: Path, tmp_path: Path) -> None:
    ask()
    before = files(run_folder)
    (tmp_path / "two").mkdir()
    other = tmp_path / "two" / text.name
    other.write_text(text.read_text().upper())
    found = ask(of=other)
    assert found.code == 0, found.err
    assert files(run_folder).items() > before.items()
    assert len(files(run_folder)) == 4
    # a text that changes in its place is another one as well
    text.write_text(text.read_text().replace("nobody", "no body"))
    assert "nothing to do" not in ask().err
    assert len(files(run_folder)) == 6


def copy_of(model: Path, place: Path) -> Path:
    return Path(shutil.copytree(model, place / model.name))


def test_the_reference_belongs_to_its_configuration(aatc: Any, ask: Any, tiny_llama: Path, tmp_path: Path) -> None:
    """Another base of the rotary embedding: the same weights, another model. Its old result was taken over."""
    assert ask("--run", tmp_path / "fresh").code == 1
    model = copy_of(tiny_llama, tmp_path)
    reference = ("eval", "perplexity", "--run", tmp_path / "fresh", "--recipe", "fp16", *SIZE, "--json")
    first = aatc(*reference, "--model", model)
    assert first.code == 0, first.err
    config = json.loads((model / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    (model / "config.json").write_text(json.dumps(config))
    second = aatc(*reference, "--model", model)
    assert second.code == 0, second.err
    assert "nothing to do" not in second.err
    assert second.json[0]["perplexity"] != first.json[0]["perplexity"]
    assert len(files(tmp_path / "fresh")) == 2


def test_the_reference_belongs_to_its_tokenizer(aatc: Any, tiny_llama: Path, tmp_path: Path, text: Path) -> None:
    """The windows are tokens: another tokenizer makes others of the same text."""
    model = copy_of(tiny_llama, tmp_path)
    command = ("eval", "perplexity", "--run", tmp_path / "run", "--recipe", "fp16", "--text", text, *SIZE, "--json")
    first = aatc(*command, "--model", model)
    assert first.code == 0, first.err
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["e"], vocabulary["x"] = vocabulary["x"], vocabulary["e"]
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    second = aatc(*command, "--model", model)
    assert second.code == 0, second.err
    assert "nothing to do" not in second.err
    assert second.json[0]["protocol"]["tokens"] != first.json[0]["protocol"]["tokens"]
    assert second.json[0]["tokenizer_hash"] != first.json[0]["tokenizer_hash"]
    assert len(files(tmp_path / "run")) == 2


def test_a_result_of_another_plan_is_refused_and_kept(
    aatc: Any, ask: Any, refuses: Any, run_folder: Path, tiny_llama: Path, text: Path
) -> None:
    first = ask()
    assert aatc("whiten", "--run", run_folder, "--head-groups", 2, "--force").code == 0
    assert aatc("allocate", "--run", run_folder, "--budget", 3, "--force").code == 0
    where = ("--run", run_folder, "--model", tiny_llama, "--text", text, *SIZE, "--budget", 3)
    said = ("was measured on something else", "plan was", "now")
    outcome = refuses("eval", *where, says=said, folder=run_folder)
    assert "--force" in outcome.err
    assert first.json[1]["plan"][:12] in outcome.err
    forced = aatc("eval", *where, "--force", "--json")
    assert forced.code == 0, forced.err
    assert forced.json[0]["plan"] != first.json[1]["plan"]


def test_a_forged_protocol_is_not_taken_over(ask: Any, run_folder: Path) -> None:
    """Two protocols whose short hashes coincide: the whole is compared, not the file's name."""
    ask()
    [path] = (run_folder / "evals").glob("kl.paper-3.*")
    found = read_evaluation(path)
    assert found.protocol is not None
    other = found.model_copy(update={"protocol": found.protocol | {"windows": 9}})
    written = write_evaluation(run_folder / "evals", other)
    written.rename(path)
    outcome = ask()
    assert outcome.code == 1
    assert "protocol.windows was 9, now 2" in outcome.err


def test_results_of_earlier_versions_are_shown_and_not_taken_over(ask: Any, aatc: Any, run_folder: Path) -> None:
    new = ask().json[1]
    old = {name: value for name, value in new.items() if name not in ("protocol", "cache", "config_hash", "path")}
    old |= {"schema_version": 1}
    path = run_folder / "evals" / "kl.paper-3.text.txt.200-150.json"
    path.write_text(json.dumps(old))
    shown = aatc("inspect", path, "--json")
    assert (shown.code, shown.json["kl_mean"], shown.json["protocol"]) == (0, new["kl_mean"], None)
    for version in (4, 99):
        path.write_text(json.dumps(old | {"schema_version": version}))
        refused = aatc("inspect", path)
        assert refused.code == 1
        assert f"schema version {version}; this aatc reads versions 1 to 3" in refused.err


def test_a_recipe_file_is_the_one_the_plan_was_made_with(
    refuses: Any, aatc: Any, run_folder: Path, tiny_llama: Path, text: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('name = "mine"\nsummary = "s"\ntransform = "whiten"\n')
    assert aatc("allocate", "--run", run_folder, "--recipe", recipe, "--budget", 3).code == 0
    where = ("--run", run_folder, "--model", tiny_llama, "--text", text, *SIZE)
    asked = ("--recipe", recipe, "--budget", 3)
    assert aatc("eval", *where, *asked).code == 0
    recipe.write_text('name = "mine"\nsummary = "in other words"\ntransform = "whiten"\n')
    assert "nothing to do" in aatc("eval", *where, *asked).err
    recipe.write_text('name = "mine"\nsummary = "s"\ntransform = "whiten"\n[window]\nsinks = 8\n')
    says = ("was made with another recipe mine", "window.sinks was 4, now 8")
    refuses("eval", *where, *asked, says=says, folder=run_folder)


@pytest.mark.parametrize("task", ["kl", "perplexity", "distortion"])
def test_windows_that_a_plan_keeps_exact_measure_nothing(
    refuses: Any, run_folder: Path, tiny_llama: Path, text: Path, task: str
) -> None:
    """132 tokens fit into 4 sinks and a window of 128: the KL of 0.0 was written as a measurement."""
    where = ("eval", task, "--run", run_folder, "--model", tiny_llama, "--text", text, "--budget", 3)
    for length in (132, 133):
        refuses(*where, "--length", length, says=(f"{length} tokens", "paper-3 keeps exact"), folder=run_folder)


def test_from_the_length_that_is_named_something_is_measured(ask: Any) -> None:
    found = ask("--length", 134, "--first", 132)
    assert found.code == 0, found.err
    assert found.json[1]["kl_mean"] > 1e-6


def test_text_that_was_calibrated_on_is_said(ask: Any, corpus: Path, text: Path) -> None:
    own, other = ask(of=corpus), ask()
    assert own.json[1]["calibration_share"] > 0.5
    assert "is calibration text of paper-3" in own.err
    assert other.json[1]["calibration_share"] == 0
    assert "calibration text" not in other.err
    assert own.json[0]["calibration_share"] is None


def test_a_profile_that_is_named_beats_a_model_of_the_environment(
    aatc: Any, refuses: Any, run_folder: Path, tiny_llama: Path, text: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """aatc eval memory --profile with AATC_MODEL set measured the model of the environment."""
    monkeypatch.setenv("AATC_MODEL", str(tiny_llama))
    sizes = ("--context", 40, "--budget", 2)
    [result] = aatc("eval", "memory", "--profile", "smollm2-135m-instruct", "--run", tmp_path, *sizes, "--json").json
    assert (result["synthetic"], result["model"]) == (True, "HuggingFaceTB/SmolLM2-135M-Instruct")
    # where a model is needed, that of the environment must be the one of the profile
    where = ("--run", run_folder, "--text", text, *SIZE, "--budget", 3, "--profile", "smollm2-135m-instruct")
    says = ("profile smollm2-135m-instruct expects layers = 30, but the model has 4",)
    refuses("eval", *where, says=says, folder=run_folder)
    refuses("eval", "memory", *where[:2], "--model", tiny_llama, *where[-2:], "--budget", 3, says=says, folder=tmp_path)


def test_speed_and_memory_are_told_apart_by_what_they_measured(aatc: Any, run_folder: Path, tiny_llama: Path) -> None:
    where = ("--run", run_folder, "--model", tiny_llama, "--budget", 3)
    for task, more in (("memory", ()), ("speed", ("--repeats", 1))):
        for context in (150, 160):
            assert aatc("eval", task, *where, *more, "--context", context).code == 0
        assert len(list((run_folder / "evals").glob(f"{task}.paper-3.*.json"))) == 2
        again = aatc("eval", task, *where, *more, "--context", 150)
        assert "is there already, nothing to do" in again.err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--dtype", "float32"), "is measured in float16, not float32"),
        (("--recipe", "kivi"), "kivi has no packed cache"),
        (("--cache", "simulated"), "is that of the packed cache"),
        (("--plan", "run/plans/x"), "measured without plans"),
    ],
)
def test_what_a_profile_alone_does_not_read_is_refused(refuses: Any, tmp_path: Path, options: Any, says: str) -> None:
    where = ("eval", "memory", "--profile", "smollm2-135m-instruct", "--run", tmp_path, "--budget", 2, "--context", 40)
    refuses(*where, *options, says=(says,), folder=tmp_path, code=2)


def test_one_text_named_twice_is_one(ask: Any, run_folder: Path, text: Path) -> None:
    found = ask("--text", text)
    assert found.code == 0, found.err
    assert len(found.json) == len(files(run_folder)) == 2


def test_two_plans_of_one_name(refuses: Any, aatc: Any, run_folder: Path, tiny_llama: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(run_folder, tmp_path / "other"))
    assert aatc("whiten", "--run", other, "--head-groups", 2, "--force").code == 0
    assert aatc("allocate", "--run", other, "--budget", 3, "--force").code == 0
    plans = (run_folder / "plans" / "paper-3", other / "plans" / "paper-3")
    where = ("eval", "--run", run_folder, "--model", tiny_llama, "--plan", *plans)
    refuses(*where, says=("two different plans are called paper-3",), folder=run_folder, code=2)


class NotBesideOthersError(Exception):
    pass


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("kl", {"length": 300}),
        ("perplexity", {"length": 300}),
        ("recall", {"length": 300, "gap": 16}),
        ("accumulate", {"prompt": 160, "tokens": 16}),
        ("ruler", {"context": (700,), "subtask": ("niah_single_1",)}),
        ("ruler", {"context": (700,), "subtask": ("niah_single_1",), "mode": "forced"}),
        ("turns", {"context": (600,), "turns": 2, "between": 4}),
        ("needles", {"context": (700,), "depth": (50,), "mode": "forced"}),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value.get("mode", "")),
)
def test_what_a_call_does_not_accept_is_never_measured(
    name: str, asked: dict[str, Any], new_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every task that a study asks shows its results before a model is loaded, with their whole protocol."""
    model = new_model(tmp_path / "tiny", max_position_embeddings=1600)
    text = tmp_path / "text.txt"
    text.write_text("and so on it goes until Zelda comes again in 1987 " * 80)
    shown: list[Measurement] = []

    def refuse(draft: Measurement) -> None:
        shown.append(draft)
        raise NotBesideOthersError

    def load(*args: object, **options: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(opened, "load_model", load)
    options = EvalOptions(dtype="float32", accept=refuse)
    call = Call(Run(tmp_path / "run"), options, find_model(str(model)), subjects=[Subject(load_recipe("fp16"), None)])
    task = find_task(name)
    with pytest.raises(NotBesideOthersError):
        evaluate(task, call, task.part("settings", "Settings")(text=(str(text),), limit=1, **asked))
    [draft] = shown
    assert draft.protocol is not None
    assert draft.protocol["task"] == name
