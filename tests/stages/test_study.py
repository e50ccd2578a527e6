"""aatc study: cells through the stages, interruption, methods that fail, packed bits that were asked for."""

from __future__ import annotations

import json
import re
import shutil
import tomllib

import pytest

from aatc_cli.artifacts.artifact import open_artifact
from aatc_cli.artifacts.evaluation import read_evaluation, read_measurement
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import CollectSettings
from aatc_cli.artifacts.study import StudyCell, StudyResult, StudyRow, read_study, study_path, update_study
from aatc_cli.artifacts.transform import Transform
from aatc_cli.config import Budget
from aatc_cli.core.layout import CacheLayout
from aatc_cli.errors import AatcError, UsageError
from aatc_cli.evals.accumulate.result import Result as Accumulated
from aatc_cli.evals.kl import measure as kl
from aatc_cli.evals.perplexity import measure as perplexity
from aatc_cli.evals.subjects import EvalOptions
from aatc_cli.models import loading
from aatc_cli.models.kept import keeping_models
from aatc_cli.models.loading import find_model
from aatc_cli.profiles import TextMixture, available, load_recipe, profiles_dir
from aatc_cli.stages.allocate import derive
from aatc_cli.stages.collect import CollectOptions, collect
from aatc_cli.stages.whiten import Wanted, whiten
from aatc_cli.studies import columns, sheet
from aatc_cli.studies.definition import Study, StudyMethod, StudyTask, load_study
from aatc_cli.studies.matching import Matcher
from aatc_cli.studies.methods import Methods
from aatc_cli.studies.run import StudyChoices, run_study

STUDY = """
name = "small"
summary = "A few methods on a few windows"

[[methods]]
recipe = "fp16"

[[methods]]
recipe = "paper"
budgets = [3]
packed = [3.5]
label = "ours"

[[methods]]
recipe = "kivi"
budgets = [2]

[[methods]]
recipe = "palu"
budgets = [2.8]

[[tasks]]
task = "kl"
length = 224
first = 160
limit = 1

[[tasks]]
task = "perplexity"
length = 200
limit = 1
"""


@pytest.fixture(scope="module")
def calibrated(tiny_llama, with_gradients, tmp_path_factory) -> Run:
    """Stats with gradients and nothing else; shared, so nothing may write to it."""
    return with_gradients(tmp_path_factory.mktemp("study"), tiny_llama)


@pytest.fixture
def run(calibrated, tmp_path) -> Run:
    shutil.copytree(calibrated.root, tmp_path / "run")
    return Run(tmp_path / "run")


@pytest.fixture
def study_file(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(STUDY, encoding="utf-8")
    return path


@pytest.fixture
def studied(tiny_llama, corpus, run, study_file, aatc):
    def go(*arguments):
        where = ("--model", tiny_llama, "--run", run.root, "--text", corpus, "--json")
        return aatc("study", study_file, *where, *arguments)

    return go


SCORES = kl.forced_scores


def replace_scores(monkeypatch, scores) -> None:
    """Let ``scores`` stand for what scores windows in both tasks of the study."""
    for task in (kl, perplexity):
        monkeypatch.setattr(task, "forced_scores", scores)


def kept_of(folder) -> dict[str, dict]:
    """Contents of all evaluations without their times."""
    files = {path.name: json.loads(path.read_text("utf-8")) for path in folder.glob("*.json")}
    return {
        name: {key: value for key, value in found.items() if key not in ("seconds", "digest")}
        for name, found in files.items()
    }


def test_a_study_makes_what_is_missing_and_computes_nothing_twice(studied, run, monkeypatch):
    loads = []
    whole = loading.AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(
        loading.AutoModelForCausalLM, "from_pretrained", lambda *a, **k: loads.append(a) or whole(*a, **k)
    )
    first = studied()
    assert first.code == 0, first.err
    assert len(loads) == 1
    rows = {row["name"]: row for row in first.json["rows"]}
    assert list(rows) == ["fp16", "paper-3", "paper@3.5", "kivi-2", "palu-2.8"]
    assert rows["paper-3"]["label"] == "ours"
    assert rows["kivi-2"]["bits_packed"] == 3.0
    assert [rows[name]["simulated"] for name in ("fp16", "paper-3", "kivi-2")] == [False, False, True]
    assert {cell["file"].split("/")[-1].split(".")[0] for cell in first.json["cells"]} == {"kl", "perplexity"}
    assert len(first.json["cells"]) == 10
    for cell in first.json["cells"]:
        found = read_evaluation(run.root / cell["file"])
        assert (found.plan, found.recipe) == (rows[cell["row"]]["plan"], rows[cell["row"]]["recipe"])
        assert found.length == cell["length"]
    # the file says the same, and a second call finds everything
    assert read_study(study_path(run.root, "small")).model_dump(mode="json") == first.json
    times = {path: path.stat().st_mtime_ns for path in run.evals.glob("*.json")}
    again = studied()
    assert again.json == first.json
    assert len(loads) == 1
    assert {path: path.stat().st_mtime_ns for path in run.evals.glob("*.json")} == times
    # with --force all is computed anew, to the same figures
    before = kept_of(run.evals)
    forced = studied("--force", "--recipe", "kivi")
    assert forced.code == 0, forced.err
    assert [row["name"] for row in forced.json["rows"]] == list(rows)
    assert kept_of(run.evals) == before
    changed = {path.name for path in times if path.exists() and path.stat().st_mtime_ns != times[path]}
    assert {name.split(".")[1] for name in changed if "kivi" in name} == {"kivi-2"}
    assert all("kivi" in name for name in changed)


def test_an_interrupted_study_goes_on_where_it_was(studied, run, calibrated, tmp_path, monkeypatch):
    whole = studied()
    expected = kept_of(run.evals)
    shutil.rmtree(run.root)
    shutil.copytree(calibrated.root, run.root)
    monkeypatch.setattr(columns, "_TOGETHER", 2)
    scored = []

    def stop_later(frame, subjects):
        if len(scored) == 2:
            raise KeyboardInterrupt
        scored.append([subject.name for subject in subjects])
        return SCORES(frame, subjects)

    replace_scores(monkeypatch, stop_later)
    assert studied().code == 130
    assert [len(names) for names in scored] == [2, 2]
    part = read_study(study_path(run.root, "small"))
    assert len(part.cells) == 4
    assert len(list(run.evals.glob("*.json"))) == 4
    counted = []
    replace_scores(monkeypatch, lambda frame, subjects: counted.append(len(subjects)) or SCORES(frame, subjects))
    rest = studied()
    assert rest.code == 0, rest.err
    assert sum(counted) == 6
    assert sorted(rest.json["cells"], key=str) == sorted(whole.json["cells"], key=str)
    assert kept_of(run.evals) == expected


def test_one_method_that_fails_takes_no_other_with_it(studied, run, monkeypatch):
    def fail(frame, subjects):
        if frame.opened.task == "kl" and any(subject.recipe.name == "kivi" for subject in subjects):
            raise RuntimeError("CUDA out of memory.\nTried to allocate")
        return SCORES(frame, subjects)

    replace_scores(monkeypatch, fail)
    outcome = studied()
    assert outcome.code == 1
    missing = [cell for cell in outcome.json["cells"] if cell["reason"]]
    assert [(cell["row"], cell["task"], cell["file"]) for cell in missing] == [("kivi-2", "kl", None)]
    assert missing[0]["reason"] == "RuntimeError: CUDA out of memory."
    assert "9 of 10 cells are there" in outcome.err
    assert "1 missing: RuntimeError: CUDA out of memory." in outcome.err
    monkeypatch.undo()
    assert studied().code == 0


def test_what_fails_for_the_task_is_not_tried_with_every_method(aatc, tiny_llama, corpus, run, study_file, monkeypatch):
    study_file.write_text(STUDY.replace("length = 224", "length = 1024"), encoding="utf-8")
    tried, stage = [], columns.evaluate

    def counted(task, call, *rest):
        tried.append(len(call.subjects))
        return stage(task, call, *rest)

    monkeypatch.setattr(columns, "evaluate", counted)
    outcome = aatc("study", study_file, "--model", tiny_llama, "--run", run.root, "--text", corpus, "--json")
    assert outcome.code == 1
    assert tried == [5, 1, 1, 5]
    reasons = [cell["reason"] for cell in outcome.json["cells"] if cell["task"] == "kl"]
    assert reasons == ["1024 tokens are more than the model's context of 512; use --length 512 or less"] * 5
    assert "5 of 10 cells are there" in outcome.err


def test_what_cannot_be_derived_says_why(tiny_llama, corpus, base_run, tmp_path, study_file, aatc):
    """Stats without gradients, a budget between widths, Stats that are not there: nothing else suffers."""
    shutil.copytree(base_run / "stats", tmp_path / "bare" / "stats")
    text = STUDY.replace('recipe = "kivi"\nbudgets = [2]', 'recipe = "kivi"\nbudgets = [2, 2.5]')
    text = text.replace(
        'recipe = "fp16"\n', 'recipe = "fp16"\n\n[[methods]]\nrecipe = "paper"\nbudgets = [3]\nstats = "few"\n'
    )
    study_file.write_text(text, encoding="utf-8")
    outcome = aatc("study", study_file, "--model", tiny_llama, "--run", tmp_path / "bare", "--text", corpus, "--json")
    assert outcome.code == 1
    reasons = {row["name"]: row["reason"] for row in outcome.json["rows"]}
    assert "no loss gradients" in reasons["palu-2.8"] or "transform holds none" in reasons["palu-2.8"]
    assert "--fisher" in reasons["palu-2.8"]
    assert "one width" in reasons["kivi-2.5"]
    assert "aatc collect --name few" in reasons["paper-3 (few)"]
    assert [name for name, reason in reasons.items() if reason is None] == ["fp16", "paper-3", "paper@3.5", "kivi-2"]
    assert str(tmp_path) not in json.dumps(reasons)
    assert "6 missing" not in outcome.err
    assert sum(cell["reason"] is not None for cell in outcome.json["cells"]) == 6


def test_named_stats_have_a_place_of_their_own(tiny_llama, corpus, run, study_file, aatc):
    settings = CollectSettings(samples=4, length=96, rows=384)
    mixture = TextMixture(sources=[str(corpus)], samples=4, length=96)
    collect(run, "few", find_model(str(tiny_llama)), mixture, settings, CollectOptions())
    study_file.write_text(
        'name = "calibration"\nsummary = "s"\n\n[[methods]]\nrecipe = "paper"\nbudgets = [3]\n\n[[methods]]\n'
        'recipe = "paper"\nbudgets = [3]\nstats = "few"\n\n[[tasks]]\ntask = "kl"\nlength = 224\nlimit = 1\n',
        "utf-8",
    )
    outcome = aatc("study", study_file, "--model", tiny_llama, "--run", run.root, "--text", corpus, "--json")
    assert outcome.code == 0, outcome.err
    files = [cell["file"] for cell in outcome.json["cells"]]
    assert [file.rpartition("/")[0] for file in files] == ["evals", "studies/few/evals"]
    figures = [read_evaluation(run.root / file).kl_mean for file in files]
    assert figures[0] != figures[1]
    inputs = open_artifact(run.root / "studies" / "few" / "transforms" / "whiten", "transform").manifest.inputs
    assert set(inputs.values()) == {open_artifact(run.stats("few"), "stats").manifest.digest}


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("paper", 3.9),
        ("uniform", 3.0),
        ("kvtc", 2.5),
        ("ratequant", 4.6),
        ("loss-aware-fused", 2.2),
        ("kvtc-global", 2.7),
    ],
)
def test_packed_bits_are_as_near_as_any_budget_comes(run, name, target):
    """Against every budget in thousandths, one after another, and bytes counted from the breakdown."""
    recipe = load_recipe(name)
    whiten(run, transform_stats=run.stats(), rate_stats=run.stats(), wanted=Wanted.by(recipe))
    transform = Transform.open(run.transform(recipe.transform_name))
    energies = transform.energies()

    def bits_at(budget: float) -> float | None:
        try:
            layout = derive(transform, energies, recipe, Budget(unit="bits", value=budget))[1]
        except AatcError:
            return None
        return _packed_bits(layout)

    found = bits_at(Matcher.of(transform, recipe).budget(target).value)
    scanned = [
        bits
        for step in range(int(1000 * target) - 1200, int(1000 * target) + 300, 4)
        if (bits := bits_at(step / 1000)) is not None
    ]
    nearest = min(abs(bits - target) for bits in scanned)
    # a budget within half a thousandth of a bit ends the search
    assert abs(found - target) <= max(nearest, 0.0005)


def _packed_bits(layout: CacheLayout) -> float:
    """The slope of the byte law: bytes that a thousand more flush blocks take, per number."""
    window = layout.window
    few, many = (window.sinks + window.recent + n * window.flush for n in (1000, 2000))
    numbers = 1000 * window.flush * 2 * layout.geometry.layers * layout.geometry.channels
    return 8 * (layout.bytes(many) - layout.bytes(few)) / numbers


def test_packed_bits_are_the_slope_of_the_byte_law(run):
    study = Study.model_validate(
        {
            "name": "s",
            "summary": "s",
            "tasks": [{"task": "kl"}],
            "methods": [
                {"recipe": "paper", "budgets": [3.0, 3.3]},
                {"recipe": "kivi", "budgets": [2.0, 4.0]},
                {"recipe": "kvquant", "budgets": [2.0]},
                {"recipe": "oscar", "budgets": [2.0]},
            ],
        }
    )
    for entrant in Methods(run).entrants(study):
        assert entrant.subject is not None, entrant.row.reason
        layout = entrant.subject.plan.layout
        # codes and padding of one block are rounded to whole bytes
        assert layout.bits_packed == pytest.approx(_packed_bits(layout), rel=1e-3)


def test_what_no_budget_mends_says_why(base_run, tmp_path):
    """Stats without gradients: whatever the budget, Palu has no ranks."""
    shutil.copytree(base_run / "stats", tmp_path / "run" / "stats")
    study = Study.model_validate(
        {"name": "s", "summary": "s", "methods": [{"recipe": "palu", "packed": [2.0]}], "tasks": [{"task": "kl"}]}
    )
    [entrant] = Methods(Run(tmp_path / "run")).entrants(study)
    assert entrant.subject is None
    assert "ranks by loss gradients" in entrant.row.reason


def test_one_width_takes_the_nearest_of_its_widths(run):
    study = Study.model_validate(
        {
            "name": "s",
            "summary": "s",
            "methods": [{"recipe": "kivi", "packed": [2.4, 2.6, 3.2]}],
            "tasks": [{"task": "kl"}],
        }
    )
    rows = [entrant.row for entrant in Methods(run).entrants(study)]
    # 2.6 and 3.2 come to the same plan, which is one row
    assert [(row.name, row.budget, row.bits_packed) for row in rows] == [("kivi@2.4", "1", 2.0), ("kivi@2.6", "2", 3.0)]


def test_presses_of_prompts_are_asked_behind_one(tiny_llama, corpus, run):
    """Tasks with a prompt and without are columns of their own, and a press that needs one is not missing elsewhere."""
    task = {"task": "kl", "length": 224, "first": 200, "limit": 1}
    study = Study.model_validate(
        {
            "name": "prompts",
            "summary": "x",
            "methods": [{"recipe": "kivi", "budgets": [2]}, {"recipe": "snapkv", "budgets": [4]}],
            "tasks": [task, task | {"prompt": 200}],
        }
    )
    result = run_study(run, find_model(str(tiny_llama)), study, StudyChoices(text=(str(corpus),)), EvalOptions(batch=2))
    assert result.missing == {}
    name = corpus.name
    assert [(cell.row, cell.column) for cell in result.cells] == [
        ("kivi-2", f"kl {name} 224"),
        ("kivi-2", f"kl {name} 224 behind 200"),
        ("snapkv-4", f"kl {name} 224 behind 200"),
    ]


def test_only_plans_that_the_chosen_rows_and_tasks_need_are_made(tiny_llama, corpus, base_run, tmp_path):
    run = Run(tmp_path / "run")
    shutil.copytree(base_run / "stats", run.root / "stats")
    task = {"task": "kl", "length": 224, "first": 200, "limit": 1}
    study = Study.model_validate(
        {
            "name": "few",
            "summary": "x",
            "methods": [{"recipe": "kivi", "budgets": [2, 3]}, {"recipe": "paper", "budgets": [2, 3, 4]}],
            "tasks": [task | {"only": ["paper-[34]"]}, task | {"task": "perplexity", "only": ["kivi-*"]}],
        }
    )

    def rows(**chosen) -> tuple[list[str], int]:
        asked = StudyChoices(text=(str(corpus),), **chosen)
        result = run_study(run, find_model(str(tiny_llama)), study, asked, EvalOptions())
        return [row.name for row in result.rows], len(result.cells)

    assert rows(task=("kl",), row=("paper-3",)) == (["paper-3"], 1)
    assert rows(task=("perplexity",), plans=True) == (["kivi-2", "kivi-3", "paper-3"], 1)
    assert sorted(path.name for path in run.plans()) == ["kivi-2", "kivi-3", "paper-3"]
    with pytest.raises(UsageError, match="asks any row"):
        rows(row=("paper-2",))


def test_packaged_studies_name_recipes_and_budgets_that_are_there():
    for name in available("studies"):
        study = load_study(name)
        assert study.name == name
        for method in study.methods:
            recipe = load_recipe(method.recipe)
            assert bool(method.budgets or method.packed) == (recipe.allocator != "none")
            if recipe.allocator == "one-width" and not recipe.pressed:
                assert set(method.budgets) <= set(recipe.allowed_widths)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('name = "small"', 'name = "a b"', "name"),
        ("limit = 1", "limt = 1", "limt"),
        ("first = 160", "contexts = [512]", "contexts is not read by kl"),
        ('task = "perplexity"\nlength = 200', 'task = "ruler"', "ruler needs contexts"),
        ('recipe = "kivi"\nbudgets = [2]', 'recipe = "paper"\nbudgets = [2]', "paper is listed twice"),
        ("budgets = [2]", "budgets = [20]", "less than or equal to 16"),
        ('recipe = "kivi"', 'recipe = "kiwi"', "no recipe named 'kiwi'"),
    ],
)
def test_a_wrong_study_is_refused(refuses, tiny_llama, corpus, run, study_file, old, new, says):
    study_file.write_text(STUDY.replace(old, new, 1), encoding="utf-8")
    refuses(
        "study", study_file, "--model", tiny_llama, "--run", run.root, "--text", corpus, says=(says,), folder=run.root
    )


def test_options_that_a_study_has_itself_are_refused(refuses, tiny_llama, run, study_file):
    common = ("study", study_file, "--model", tiny_llama, "--run", run.root)
    refuses(*common, "--budget", 2, says=("--budget",), folder=run.root, code=2)
    refuses(*common, "--recipe", "hqq", says=("no recipe 'hqq'",), folder=run.root, code=2)
    refuses(*common, "--row", "hqq@2", says=("no row 'hqq@2'",), folder=run.root, code=2)
    refuses("study", "larger", "--model", tiny_llama, "--run", run.root, says=("no study named",), folder=run.root)


def test_a_study_of_another_model_or_a_torn_one_is_begun_anew_by_force_alone(tmp_path):
    """Else one wrong --model would take the table of all that was measured out of its file."""
    row = StudyRow(name="fp16", label="fp16", recipe="fp16", stats=None, asked=None, matched=False)
    mine = StudyResult(study="small", summary="few", model="mine", model_fingerprint="tensors:1", rows=(row,))
    other = mine.model_copy(update={"model": "other", "model_fingerprint": "tensors:2", "rows": ()})
    path = study_path(tmp_path, "small")
    assert update_study(tmp_path, mine, lambda result: result) == mine
    before = path.read_bytes()
    with pytest.raises(AatcError, match="is of the model mine"):
        update_study(tmp_path, other, lambda result: result)
    assert path.read_bytes() == before
    path.write_bytes(before[:100])
    with pytest.raises(AatcError, match="cannot be read"):
        update_study(tmp_path, mine, lambda result: result)
    assert update_study(tmp_path, mine, lambda result: result, anew=True) == mine
    assert update_study(tmp_path, other, lambda result: result, anew=True) == other


def test_models_are_kept_within_the_block_alone(tiny_llama):
    source = find_model(str(tiny_llama))
    with keeping_models():
        first = loading.load_model(source, device="cpu")
        assert loading.load_model(source, dtype="auto") is first
        assert loading.load_model(source, dtype="bfloat16") is not first
        assert loading.load_tokenizer(source) is loading.load_tokenizer(source)
    assert loading.load_model(source) is not first


ACCUMULATE = {"task": "accumulate", "prompt": 160, "ways": ["text"], "at_once": True}


def test_choices_replace_those_of_the_study(tiny_llama, corpus, run):
    study = Study.model_validate(
        {"name": "s", "summary": "s", "methods": [{"recipe": "fp16"}], "tasks": [{"task": "kl"}, ACCUMULATE]}
    )
    choices = StudyChoices(text=(str(corpus),), length=150, tokens=20, limit=2)
    result = run_study(run, find_model(str(tiny_llama)), study, choices, EvalOptions())
    found = read_evaluation(run.root / result.cells[0].file)
    assert (found.length, found.windows, found.first_position) == (150, 2, 75)
    decoded = read_measurement(run.root / result.cells[1].file, Accumulated)
    assert (decoded.prompt, decoded.decoded, decoded.windows, result.cells[1].length) == (160, 20, 2, 20)


def test_studies_and_their_fields_are_documented():
    page = (profiles_dir().parent / "docs" / "studies.md").read_text("utf-8")
    fields = {
        name for model in (StudyMethod, StudyTask, StudyRow, StudyCell, StudyResult) for name in model.model_fields
    }
    assert [name for name in sorted(fields) if f"`{name}`" not in page] == []
    assert [name for name in available("studies") if f"| `{name}` |" not in page] == []
    [example] = re.findall(r"```toml\n(.*?)```", page, re.S)
    assert Study.model_validate(tomllib.loads(example)).name == "mine"


def test_parts_of_a_study_add_up(studied, run, monkeypatch):
    """One process begins and ends while another is at work on the same study: neither loses the other's cells."""
    filled, fill = [], sheet.Sheet.fill

    def others_first(self, entrants):
        if not filled:
            filled.append(True)
            assert studied("--recipe", "kivi").code == 0
        return fill(self, entrants)

    monkeypatch.setattr(sheet.Sheet, "fill", others_first)
    outcome = studied("--recipe", "fp16")
    assert outcome.code == 0, outcome.err
    assert [row["name"] for row in outcome.json["rows"]] == ["fp16", "kivi-2"]
    assert sorted((cell["row"], cell["task"]) for cell in outcome.json["cells"]) == [
        ("fp16", "kl"),
        ("fp16", "perplexity"),
        ("kivi-2", "kl"),
        ("kivi-2", "perplexity"),
    ]


def test_a_column_is_measured_on_one_thing(studied, run, corpus, tmp_path):
    """Fewer windows, or another text of the same name, would stand beside what was measured before."""
    first = studied()
    assert first.code == 0, first.err
    assert all(cell["protocol"] for cell in first.json["cells"])
    before = kept_of(run.evals)
    other = tmp_path / "other" / corpus.name
    other.parent.mkdir()
    other.write_text(corpus.read_text().upper())
    study = run.root / "studies" / "small.json"
    stored = study.read_text()
    for changed in (("--limit", 2), ("--text", other), ("--dtype", "bfloat16")):
        outcome = studied(*changed, "--recipe", "paper")
        assert outcome.code == 1, changed
        assert "measured on something else" in outcome.err
        # and nothing is measured before that is said
        assert kept_of(run.evals) == before
        cells = [sorted(json.loads(text)["cells"], key=str) for text in (study.read_text(), stored)]
        assert cells[0] == cells[1]
    forced = studied("--limit", 2, "--force")
    assert forced.code == 0, forced.err


LONGER = """
name = "longer"
summary = "Tasks that only some are asked"

[[methods]]
recipe = "fp16"

[[methods]]
recipe = "paper"
budgets = [3, 4]

[[methods]]
recipe = "kivi"
budgets = [2]

[[tasks]]
task = "kl"
length = 224
limit = 1

[[tasks]]
task = "kl"
only = ["paper-*"]
length = 224
prompt = 180
limit = 1

[[tasks]]
task = "accumulate"
only = ["fp16", "paper-3"]
prompt = 150
tokens = 16
limit = 1
"""


def test_tasks_that_only_some_are_asked(tiny_llama, corpus, run, tmp_path, aatc):
    """Columns of one text behind prompts of different lengths stand apart, and each is asked of its own rows."""
    file = tmp_path / "longer.toml"
    file.write_text(LONGER, encoding="utf-8")
    where = ("--model", tiny_llama, "--run", run.root, "--text", corpus, "--json")
    first = aatc("study", file, *where, "--task", "kl behind*", "--task", "accumulate*")
    assert first.code == 0, first.err
    found = {(cell["row"], cell["task"], cell["prompt"]) for cell in first.json["cells"]}
    behind = {(name, "kl", 180) for name in ("paper-3", "paper-4")}
    assert found == behind | {(name, "accumulate", 150) for name in ("fp16", "paper-3")}
    whole = aatc("study", file, *where)
    assert whole.code == 0, whole.err
    assert whole.err.count("is there already") == 4
    cells = {(cell["row"], cell["task"], cell["prompt"]): cell["file"] for cell in whole.json["cells"]}
    assert set(cells) == found | {(name, "kl", None) for name in ("fp16", "paper-3", "paper-4", "kivi-2")}
    assert len(set(cells.values())) == len(cells)
    # made anew: these columns, and no others
    times = {name: (run.root / name).stat().st_mtime_ns for name in cells.values()}
    again = aatc("study", file, *where, "--task", "accumulate*", "--force")
    assert again.code == 0, again.err
    anew = {key for key, name in cells.items() if (run.root / name).stat().st_mtime_ns != times[name]}
    assert anew == {key for key in cells if key[1] == "accumulate"}
    report = aatc("report", "--run", run.root)
    assert report.code == 0, report.err
    page = (run.root / "report" / "report.md").read_text("utf-8")
    assert "16 tokens decoded behind 150 of corpus.txt: the text itself" in page
    wrong = aatc("study", file, *where, "--task", "ruler")
    assert wrong.code == 2
    assert "kl, kl behind 180, accumulate behind 150" in wrong.err
