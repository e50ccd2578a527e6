"""Studies in the report: what is bold, what is tied, what is missing and why, curves, published figures."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from scipy import stats

from aatc_cli.artifacts.evaluation import Evaluation, write_evaluation
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.study import StudyCell, StudyResult, StudyRow, write_study
from aatc_cli.config import Geometry, HeadGroups
from aatc_cli.core.compare import Figure, difference, interval, tied
from aatc_cli.evals.answers.result import BenchmarkResult, BenchmarkRow
from aatc_cli.profiles import load_model_profile, load_recipe, profiles_dir
from aatc_cli.report.data.published import published_for, read_published
from aatc_cli.report.data.study import StudyView
from aatc_cli.report.series import studies as series
from aatc_cli.report.series.plans import CAUSES, causes
from aatc_cli.report.tables.forced import forced_tables, mean_gap
from aatc_cli.report.tables.scores import marks_of, score_text
from aatc_cli.stages.report import make_report
from aatc_cli.stages.reporting.load import load_report

WINDOWS = 6
# mean KL of each method and budget on a window, to which the windows' own difficulty is added
KL = {("paper", 2): 0.040, ("loss-aware", 2): 0.021, ("kivi", 1): 0.022, ("paper", 3): 0.012, ("kivi", 2): 0.30}
PACKED = {("paper", 2): 2.1, ("loss-aware", 2): 2.04, ("kivi", 1): 2.0, ("paper", 3): 3.1, ("kivi", 2): 3.0}
SCORES = {("fp16", None): 0.9, ("paper", 2): 0.8, ("loss-aware", 2): 0.85, ("kivi", 1): 0.4}
VERSIONS = {"torch": "2.13.0"}


def samples(mean: float, count: int = 40) -> list[float]:
    """Scores of 0 and 1 with exactly this mean, so that the better of two has all the hits of the other."""
    hits = round(mean * count)
    return [1.0] * hits + [0.0] * (count - hits)


def benchmark_row(subtask: str, context: int | None, values: list[float]) -> BenchmarkRow:
    mean = sum(values) / len(values)
    stderr = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))
    return BenchmarkRow(
        subtask=subtask,
        context=context,
        metric="m",
        score=mean,
        stderr=stderr,
        samples=len(values),
        scores=values,
        prompts_sha256=f"{subtask}{context}",
        seconds=1.0,
    )


def common(recipe: str, budget: int | None) -> dict[str, object]:
    return {
        "recipe": recipe,
        "budget": None if budget is None else str(budget),
        "model": "Llama-3.1-8B-Instruct",
        "model_fingerprint": "f",
        "plan": None if budget is None else f"{recipe}{budget}",
        "bits": float(budget or 16),
        "seconds": 1.0,
        "device": "cpu",
        "dtype": "float32",
        "versions": VERSIONS,
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run with one study: KL on a text, RULER at two contexts, LongBench without records, GSM8K for some."""
    run = Run(tmp_path_factory.mktemp("studies") / "run")
    difficulty = np.random.default_rng(0).lognormal(0, 0.8, WINDOWS)
    rows, cells = [], []
    for recipe, budget in [("fp16", None), *KL]:
        kl = KL.get((recipe, budget), 0.0)
        windows = [float(kl * d) for d in difficulty / difficulty.mean()]
        name = recipe if budget is None else f"{recipe}-{budget}"
        rows.append(
            StudyRow(
                name=name,
                label=recipe,
                recipe=recipe,
                stats=None,
                asked=budget,
                matched=False,
                budget=None if budget is None else str(budget),
                plan=None if budget is None else f"{recipe}{budget}",
                bits=float(budget or 16),
                bits_packed=PACKED.get((recipe, budget), 16.0),
                ratio=5.0,
                simulated=recipe == "kivi",
            )
        )
        e = Evaluation(
            **common(recipe, budget),
            task="kl",
            bits_at_context=float(budget or 16),
            ratio=4.0,
            context=2048,
            text="t.txt",
            text_sha256="0" * 64,
            windows=WINDOWS,
            length=2048,
            stride=2048,
            first_position=512,
            tokens_scored=100,
            sinks=4,
            recent=128,
            flush=16,
            kl_mean=float(np.mean(windows)),
            kl_stderr=float(np.std(windows, ddof=1) / math.sqrt(WINDOWS)),
            kl_windows=windows,
            top1=0.9,
            nll=2.0 + kl,
            nll_reference=2.0,
        )
        path = write_evaluation(run.evals, e)
        cells.append(StudyCell(row=name, task="kl", text="t.txt", length=2048, file=f"evals/{path.name}"))
        if (recipe, budget) in SCORES:
            score = SCORES[recipe, budget]
            result = BenchmarkResult(
                **common(recipe, budget),
                benchmark="ruler",
                simulated=recipe == "kivi",
                rows=[
                    benchmark_row("vt", 4096, samples(score)),
                    benchmark_row("niah_single_1", 4096, samples(score)),
                    benchmark_row("vt", 8192, samples(score - 0.2)),
                ],
            )
            file = f"evals/{write_evaluation(run.evals, result).name}"
            cells += [StudyCell(row=name, task="ruler", context=c, file=file) for c in (4096, 8192)]
        else:
            cells += [StudyCell(row=name, task="ruler", context=c, reason="CUDA out of memory") for c in (4096, 8192)]
        cells.append(StudyCell(row=name, task="longbench", reason="the records are not there; give --data"))
    rows.append(
        StudyRow(
            name="hqq-2",
            label="hqq",
            recipe="hqq",
            stats=None,
            asked=2.0,
            matched=False,
            reason="the hqq cache needs the package hqq; pip install hqq",
        )
    )
    cells.append(StudyCell(row="hqq-2", task="kl", text="t.txt", length=2048, reason=rows[-1].reason))
    write_study(
        run.root,
        StudyResult(
            study="all",
            summary="Everything",
            model="Llama-3.1-8B-Instruct",
            model_fingerprint="f",
            rows=tuple(rows),
            cells=tuple(cells),
        ),
    )
    return run, make_report(run)


def table(text: str, caption: str) -> tuple[dict[str, dict[str, str]], str]:
    """Cells of a Markdown table by row and column, and its notes."""
    part = text.split(f"### {caption}", 1)[1].split("\n##", 1)[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    columns, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines if "---" not in line)
    return {row[0]: dict(zip(columns, row, strict=True)) for row in rows}, part


def test_the_lowest_kl_of_a_rate_is_bold_and_ties_are_those_of_paired_windows(made):
    text = made[1].markdown.read_text("utf-8")
    found, notes = table(text, "kl on t.txt: 6 windows of 2048 tokens, scored from position 512, float32")
    kl = {name: row["KL (nats)"] for name, row in found.items()}
    assert kl["loss-aware 2"].startswith("**0.0210")
    assert kl["paper 3"].startswith("**0.0120")
    assert [name for name, value in kl.items() if value.startswith("**")] == ["paper 3", "loss-aware 2"]
    # errors of each are far wider than the gap of 0.001, but on every window loss-aware is ahead in proportion:
    # the gap's own error is that of 0.001 times the windows' difficulty, and 0.001 is more than two of them
    difficulty = np.random.default_rng(0).lognormal(0, 0.8, WINDOWS)
    error = 0.001 * np.std(difficulty / difficulty.mean(), ddof=1) / math.sqrt(WINDOWS)
    assert 2 * error < 0.001
    assert "≈" not in kl["kivi 1 (simulated)"]
    assert "≈" not in kl["paper 2"]
    assert "missing: hqq-2: the hqq cache needs the package hqq; pip install hqq" in notes
    assert found["kivi 2 (simulated)"]["packed bits"] == "3.00"
    assert found["paper 2"]["perplexity"] == f"{math.exp(2.04):.2f}"


def test_two_standard_errors_decide_paired_or_not():
    rng = np.random.default_rng(1)
    base = rng.normal(0, 1, 50)
    apart, noise = base + 0.1, base + 0.1 + rng.normal(0, 1, 50)

    def figure(values, *, kept=True):
        error = float(np.std(values, ddof=1) / math.sqrt(len(values)))
        return Figure(float(np.mean(values)), error, {"t": list(values)} if kept else {})

    assert tied(figure(base), figure(apart)) is False
    assert tied(figure(base, kept=False), figure(apart)) is True
    for other in (apart, noise):
        d = np.asarray(other) - base
        assert tied(figure(base), figure(other)) is bool(abs(d.mean()) <= 2 * max(d.std(ddof=1) / math.sqrt(50), 1e-12))
    # other samples cannot be paired, and one sample has no error
    assert tied(figure(base), figure(apart[:20])) is True
    assert tied(Figure(0.1, None, {}), figure(base)) is None
    assert tied(Figure(0.5, 0.1, {}), Figure(0.7, 0.0, {})) is True
    assert tied(Figure(0.5, 0.1, {}), Figure(0.71, 0.0, {})) is False


def test_errors_of_several_parts_add_up_in_pairs():
    """Against every way to draw one difference per part, weighed alike: variances of the parts' means add."""
    a = {"x": [1.0, 0.0, 0.5, 1.0], "y": [0.0, 0.25, 1.0]}
    b = {"x": [0.0, 0.0, 1.0, 0.0], "y": [1.0, 0.0, 0.0]}
    squares = [np.var(np.subtract(a[k], b[k]), ddof=1) / len(a[k]) for k in "xy"]
    error = math.sqrt(sum(squares)) / 2
    # the degrees of freedom that Welch and Satterthwaite give to a sum of variances of 4 and 3 samples
    freedom = sum(squares) ** 2 / (squares[0] ** 2 / 3 + squares[1] ** 2 / 2)
    reach = float(stats.t.ppf(0.975, freedom) * error)
    at = Figure(0.0, None, a)
    assert tied(at, Figure(reach - 1e-9, None, b)) is True
    assert tied(at, Figure(reach + 1e-9, None, b)) is False
    assert difference(Figure(1.0, None, a), at).stderr == pytest.approx(0.0)
    found = difference(Figure(reach, None, a), Figure(0.0, None, b))
    assert (found.mean, found.stderr, found.paired) == (reach, pytest.approx(error), True)


def test_the_error_of_a_difference_is_that_of_its_windows():
    """4.9 standard errors apart window by window, and half of one by the errors of both."""
    difficulty = np.array([0.2, 1.0, 3.0, 8.0])
    gap = np.array([0.0009, 0.0011, 0.0015, 0.0009])
    a, b = difficulty * 0.01, difficulty * 0.01 + gap

    def figure(values):
        return Figure(float(values.mean()), float(values.std(ddof=1) / 2), {"": values.tolist()})

    found = difference(figure(b), figure(a))
    assert found.stderr == pytest.approx(gap.std(ddof=1) / 2)
    assert found.mean / found.stderr > 4.9
    assert found.apart
    alone = [replace(figure(x), parts={}) for x in (b, a)]
    assert difference(*alone).apart is False
    # two windows leave one degree of freedom, whose quantile is 12.7
    two = [Figure(float(x[:2].mean()), None, {"": x[:2].tolist()}) for x in (b, a)]
    assert difference(*two).mean / difference(*two).stderr == pytest.approx(10.0)
    assert difference(*two).apart is False


@pytest.mark.parametrize(("better", "worse"), [(5, 0), (6, 0), (9, 1), (9, 2), (0, 0), (2, 0)])
def test_hits_and_misses_are_judged_by_those_that_differ(better, worse):
    """McNemar's exact test: how often a fair coin is at least as uneven."""
    a = [1.0] * better + [0.0] * worse + [1.0] * 20
    b = [0.0] * better + [1.0] * worse + [1.0] * 20
    count, least = better + worse, min(better, worse)
    chance = min(1.0, 2 * sum(math.comb(count, k) for k in range(least + 1)) / 2**count)
    figures = [Figure(float(np.mean(x)), 0.0, {"": x}) for x in (a, b)]
    assert tied(*figures) is (chance >= 0.05)


def test_two_hits_of_two_are_not_certainty():
    low, high = interval([[1.0, 1.0]])
    # Wilson: (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n) at p = 1
    assert (low, high) == (pytest.approx(1 / (1 + stats.norm.ppf(0.975) ** 2 / 2)), 1.0)
    assert interval([[0.0, 0.0]])[0] == 0.0
    assert interval([[0.5, 1.0]]) is None
    assert interval([]) is None
    one, both = interval([[1.0, 0.0] * 20]), interval([[1.0, 0.0] * 20, [1.0, 0.0] * 20])
    # two parts alike: the same mean, the distance to the ends over the square root of two
    assert 0.5 - both[0] == pytest.approx((0.5 - one[0]) / math.sqrt(2))
    figure = Figure(1.0, 0.0, {"": [1.0, 1.0]})
    assert score_text(figure) == "100 (34.2 to 100)"
    assert score_text(Figure(0.5, 0.1, {})) == "50.0 ± 10.0"


def test_main_table_has_scores_marks_and_the_papers_figures(made):
    text = made[1].markdown.read_text("utf-8")
    found, notes = table(text, "Benchmarks: score in %")
    at_4k = {name: row["RULER 4096"] for name, row in found.items()}
    # the better of two is ahead in 2 of 80 samples, all the others being equal
    assert at_4k["loss-aware 2"].startswith("**85.0 (")
    assert at_4k["paper 2"].startswith("80.0 (")
    assert not at_4k["fp16"].startswith("**")
    assert at_4k["fp16"].endswith(r"\[85.9\]")
    assert at_4k["paper 2"].endswith(r"\[85.1\]")
    assert "[" not in at_4k["loss-aware 2"]
    assert found["fp16"]["RULER 8192"].startswith("70.0")
    number = re.fullmatch(r"missing \((\d)\)(?: .*)?", found["fp16"]["LongBench avg."])[1]
    assert f"({number}) the records are not there; give --data" in notes
    number = re.fullmatch(r"missing \((\d)\)", at_4k["paper 3"].split(r" \[")[0])[1]
    assert f"({number}) CUDA out of memory" in notes
    assert "In brackets: the paper's tables of results" in notes
    assert found["paper 2"]["ratio at 8192 tokens"] == "5.00"


def test_ties_of_scores_are_paired(made):
    """paper and loss-aware differ in 2 of 40 questions of each part, always to one side: a coin does that often."""
    rows, _ = table(made[1].markdown.read_text("utf-8"), "Benchmarks: score in %")
    assert "≈" in rows["paper 2"]["RULER 4096"]
    assert "≈" in rows["paper 2"]["RULER 8192"]
    # in 18 of 40 there is no doubt, nor in 36 of 80
    assert "≈" not in rows["kivi 1 (simulated)"]["RULER 4096"]


def test_subtasks_have_tables_of_their_own(made):
    found, _ = table(made[1].markdown.read_text("utf-8"), "RULER at 4096 tokens by subtask: score in %")
    assert list(found["fp16"])[3:] == ["vt", "niah\\_single\\_1"]
    assert found["kivi 1 (simulated)"]["vt"].startswith("40.0")


def test_curves_are_the_evaluations(made):
    [view] = load_report(made[0]).studies
    [panel] = series.kl_panels(view)
    assert {line.recipe: line.x for line in panel.lines} == {
        "paper": (2.1, 3.1),
        "loss-aware": (2.04,),
        "kivi": (2.0, 3.0),
    }
    assert next(line for line in panel.lines if line.recipe == "kivi").y == pytest.approx((0.022, 0.30))
    assert panel.reference == 0.0
    [contexts] = series.context_panels(view)
    lines = {line.recipe: line for line in contexts.lines}
    assert lines["fp16"].x == (4096.0, 8192.0)
    assert lines["fp16"].y == pytest.approx((90.0, 70.0))
    page = made[1].html.read_text("utf-8")
    assert 'id="study-all"' in page
    assert page.count("<svg") >= 2
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert "study-all-kl" in page
    assert "study-all-context" in page
    assert [path.name for path in made[1].figures] == ["study-all-kl.svg", "study-all-context.svg"]
    for path in made[1].figures:
        root = ElementTree.parse(path).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert "kivi" in "".join(root.itertext())


@pytest.mark.parametrize("recipe", ["paper", "kivi", "kvquant", "kvtc", "turboquant", "fp8"])
def test_bytes_of_every_method_add_up_by_cause(recipe):
    geometry = Geometry(
        layers=3,
        heads=4,
        kv_heads=2,
        head_dim=64,
        hidden_size=256,
        sliding_layers=2,
        sliding_window=64,
        full_layers=(0, 2, 4),
    )
    bits = 8.0 if recipe == "fp8" else 2.0
    layout = load_recipe(recipe).choices.nominal_layout(geometry, HeadGroups.both(1), bits)
    found = causes(layout, 3000)
    assert list(found) == list(CAUSES)
    assert sum(found.values()) == layout.bytes(3000)
    assert found["codes_keys"] > 0


def test_where_all_are_alike_none_is_best():
    same = {name: Figure(0.5, 0.1, {}) for name in "abc"}
    assert marks_of(same, max) == {}
    assert marks_of({"a": same["a"]}, max) == {}
    assert marks_of(same | {"d": Figure(0.9, 0.1, {})}, max) == {"d": "best"}
    assert marks_of(same | {"d": Figure(0.4, 0.1, {})}, max) == {"a": "best", "b": "best", "c": "best", "d": "tie"}


def test_the_json_has_the_study_whole(made):
    [study] = json.loads(made[1].json.read_text("utf-8"))["studies"]
    assert StudyResult.model_validate(study) == load_report(made[0]).studies[0].result


def test_published_figures_are_of_the_papers_models():
    for path in (profiles_dir() / "published").glob("*.toml"):
        found = read_published(path)
        assert found.model == load_model_profile(path.stem).model
        assert all(0 < score < 1 for row in found.rows for score in row.scores.values())
    llama = published_for("meta-llama/Llama-3.1-8B-Instruct")
    # Table "main results", row AATC (ours), and Table "bit sweep", row KIVI 1-bit
    assert llama.score("paper", "2.5", "ruler 32768") == 0.778
    assert llama.score("kivi", "1", "longbench trec") == 0.368
    assert llama.score("paper", "2.5", "longbench lcc") == 0.623
    assert published_for("Qwen2.5-7B-Instruct").score("kivi", "2", "gsm8k") == 0.165
    assert published_for("Meta-Llama-3.1-8B-Instruct-GGUF") is None


def test_forced_answers_stand_beside_fp16_on_the_same_prompts() -> None:
    """Two subtasks by hand: pairs of what both were asked, of which one was cut off after two prompts."""

    def cell(name: str) -> StudyCell:
        return StudyCell(row=name, task="ruler", context=128, mode="forced", file=f"evals/{name}.json")

    def result(recipe: str, budget: int | None, one: list[float], nats: list[float]) -> BenchmarkResult:
        rows = [benchmark_row("a", 128, one).with_logprobs(nats), benchmark_row("b", 128, [1.0, 1.0, 0.0, 0.0])]
        return BenchmarkResult(**common(recipe, budget), benchmark="ruler-forced", rows=rows)

    rows = [
        StudyRow(name=name, label=name, recipe=name, stats=None, asked=bits, matched=False)
        for name, bits in (("fp16", None), ("paper-2", 2))
    ]
    rows = [
        rows[0].model_copy(update={"bits_packed": 16.0}),
        rows[1].model_copy(update={"budget": "2", "bits_packed": 2.1}),
    ]
    found = {
        "evals/fp16.json": result("fp16", None, [1.0, 1.0, 0.0, 1.0], [-1.0, -2.0, -3.0, -4.0]),
        "evals/paper-2.json": result("paper", 2, [1.0, 0.0], [-1.5, -2.5]),
    }
    study = StudyResult(
        study="s", summary="", model="m", model_fingerprint="f", rows=tuple(rows), cells=(cell("fp16"), cell("paper-2"))
    )
    scores, nats = forced_tables(StudyView(study, found))
    # "b" has no log-probabilities: it was not forced
    assert scores.columns == ("method", "packed bits", "a")
    assert "2 to 4 samples" in scores.caption
    texts = [[cell.text for cell in row] for row in scores.rows]
    assert texts[0][1:] == ["16", "75.0"]
    assert texts[1][1:] == ["2.10", "50.0 (-50.0 ± 50.0; 2)"]
    assert [cell.text for cell in nats.rows[0]][1:] == ["2.10", "+0.500 ± 0"]
    assert mean_gap([(1.0, 3.0), (3.0, 4.0)]) == (2.0, 2.5)
