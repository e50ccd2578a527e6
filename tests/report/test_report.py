"""The report of a small synthetic run: numbers, marks, escaping, self-containment and determinism."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch

from aatc_cli.artifacts.artifact import ArtifactWriter
from aatc_cli.artifacts.evaluation import DistortionRow, Evaluation, write_evaluation
from aatc_cli.artifacts.manifest import ModelIdentity, TextRecord
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import CollectSettings
from aatc_cli.artifacts.transform import Transform, WhitenSettings, write_site
from aatc_cli.config import Budget, Geometry, HeadGroups
from aatc_cli.core import SIDES
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.layout import CacheLayout
from aatc_cli.errors import AatcError, ArtifactError
from aatc_cli.methods.fields import Protection
from aatc_cli.methods.recipe import Recipe
from aatc_cli.profiles import dump, load_recipe
from aatc_cli.report.data.run import ReportData
from aatc_cli.report.figures.distortion import distortion_figure
from aatc_cli.report.figures.plans import widths_figure
from aatc_cli.report.figures.quality import quality_figure
from aatc_cli.report.figures.spectrum import spectrum_figure
from aatc_cli.report.figures.style import draw
from aatc_cli.report.series.distortion import distortion_groups, scatter_series
from aatc_cli.report.series.plans import bytes_series, widths_series
from aatc_cli.report.series.quality import quality_groups, quality_series
from aatc_cli.report.series.spectrum import spectrum_series
from aatc_cli.report.tables.distortion import distortion_table
from aatc_cli.report.tables.plans import bytes_table
from aatc_cli.report.tables.quality import quality_table
from aatc_cli.report.text import number, signed, size
from aatc_cli.stages.report import ReportFiles, make_report
from aatc_cli.stages.reporting.load import load_report

GEOMETRY = Geometry(layers=4, heads=4, kv_heads=2, head_dim=8, hidden_size=32)
TEXT = "wiki <b>&|*test*"
KL = {("paper", 4.0): 0.00123, ("var-only", 4.0): 0.00125, ("paper", 2.0): 0.0456, ("var-only", 2.0): 0.0322}
VOID = {"meta", "link", "br", "img", "input", "hr"}


def identity(geometry: Geometry = GEOMETRY, fingerprint: str = "a") -> ModelIdentity:
    return ModelIdentity(
        name="tiny/model",
        revision="r1",
        architecture="LlamaForCausalLM",
        config_hash="c",
        weights_fingerprint=fingerprint,
        tokenizer_hash="t",
        geometry=geometry,
    )


def recipe(name: str, protected: int = 1) -> Recipe:
    return load_recipe(name).model_copy(update={"protect": Protection(layers=protected, key_extra=1.0)})


def add_transform(run: Run, model: ModelIdentity, seed: int = 0) -> str:
    rng = np.random.default_rng(seed)
    channels = model.geometry.channels
    texts = [TextRecord(name="calibration", weight=1.0, sha256="0" * 64, tokens=4096, windows=8)]
    with ArtifactWriter(run.transform("whiten"), "transform") as writer:
        for layer in range(model.geometry.layers):
            for side in SIDES:
                decay = (
                    np.exp(-np.linspace(0, 9, channels)) * rng.lognormal(0, 0.3, channels) * (1 + 0.3 * rng.random())
                )
                eye = torch.eye(channels)[None]
                codec = TransformCodec(
                    eye,
                    eye.clone(),
                    torch.ones(channels),
                    torch.zeros(channels, dtype=torch.uint8),
                    torch.tensor(decay),
                )
                weight = torch.tensor(rng.lognormal(0, 0.5, channels))
                write_site(writer, layer, side, codec, weight, torch.zeros_like(weight))
        results = {"tokens": 4096, "fisher_windows": 0}
        return writer.commit(settings=dump(WhitenSettings()), model=model, texts=texts, results=results).digest


def add_plan(run: Run, model: ModelIdentity, chosen: Recipe, bits: float, transform: str) -> str:
    energies = Transform.open(run.transform("whiten")).energies()
    result = chosen.choices.allocate(energies, bits)
    budget = Budget(unit="bits", value=bits)
    with ArtifactWriter(run.plan(chosen.name, budget), "plan") as writer:
        for layer, sites in enumerate(result.bits):
            for side in SIDES:
                writer.add(f"layers.{layer}.{side}.bits", torch.tensor(sites[side], dtype=torch.uint8))
        widths = [{side: sites[side].tolist() for side in SIDES} for sites in result.bits]
        layout = CacheLayout.of_bits(model.geometry, chosen.window, HeadGroups.both(1), widths)
        mean = float(np.mean([sites[side].mean() for sites in result.bits for side in SIDES]))
        return writer.commit(
            settings={"recipe": chosen.model_dump(mode="json"), "budget": budget.model_dump(mode="json")},
            model=model,
            inputs={"transform": transform},
            results={
                "bits_mean": mean,
                "bits_budget": bits,
                "predicted": result.predicted,
                "water_level": result.water_level,
                "head_groups": {"k": 1, "v": 1},
                "layout": layout.summary(8192),
            },
        ).digest


def evaluation(name: str, bits: float | None, kl: float, plan: str | None = None, **changes: object) -> Evaluation:
    values: dict[str, object] = {
        "task": "kl",
        "recipe": name,
        "budget": None if bits is None else f"{bits:g}",
        "model": "tiny/model",
        "plan": plan,
        "bits": bits or 16.0,
        "bits_packed": 16.0 if bits is None else bits + 0.12,
        "bits_at_context": 16.0 if bits is None else bits + 0.87,
        "ratio": 1.0 if bits is None else 16 / (bits + 0.87),
        "context": 1024,
        "text": TEXT,
        "text_sha256": "f" * 64,
        "windows": 6,
        "length": 1024,
        "stride": 1024,
        "first_position": 256,
        "tokens_scored": 4608,
        "sinks": 4,
        "recent": 128,
        "flush": 16,
        "kl_mean": kl,
        "kl_stderr": kl / 20,
        "kl_p99": kl * 11,
        "top1": 1 - kl,
        "nll": 3.21 + kl,
        "nll_stderr": 0.0707,
        "nll_reference": 3.21,
        "seconds": 1.5,
        "device": "cpu",
        "dtype": "float32",
        "versions": {"torch": "2.13.0", "transformers": "5.24.0"},
    }
    return Evaluation.model_validate(values | changes)


def add_evaluations(run: Run, digests: dict[tuple[str, float], str]) -> list[Evaluation]:
    found = [evaluation("fp16", None, 3.4e-8, top1=1.0)]
    for (name, bits), kl in KL.items():
        found.append(evaluation(name, bits, kl, digests.get((name, bits))))
    perplexity = {"kl_mean": None, "kl_stderr": None, "kl_p99": None, "top1": None}
    found.append(
        evaluation(
            "paper",
            2.0,
            0.0456,
            digests.get(("paper", 2.0)),
            task="perplexity",
            perplexity=25.94,
            perplexity_stderr=1.83,
            perplexity_reference=24.78,
            **perplexity,
        )
    )
    found.append(evaluation("paper", 2.0, 0.5, digests.get(("paper", 2.0)), first_position=512))
    rows = [
        DistortionRow(
            layer=layer, side=side, bits=bits, predicted=p, predicted_diagonal=p / 2, measured=p * (1 + 0.1 * layer)
        )
        for layer in range(4)
        for side in SIDES
        for bits in (2.0, 4.0)
        for p in (4.0**-bits * (1.0 if side == "k" else 0.3),)
    ]
    for bits in (2.0, 4.0):
        planned = [
            row.model_copy(update={"plan": True, "predicted": row.predicted / 4}) for row in rows if row.bits == bits
        ]
        found.append(evaluation("paper", bits, 0.1, task="distortion", distortion=rows + planned))
    for e in found:
        write_evaluation(run.evals, e)
    return found


def full_run(root: Path) -> tuple[Run, list[Evaluation]]:
    run, model = Run(root), identity()
    texts = [TextRecord(name="topics", weight=1.0, sha256="1" * 64, tokens=2048, windows=1)]
    with ArtifactWriter(run.stats(), "stats") as writer:
        writer.add("layers.0.k_sum", torch.zeros(16))
        settings = dump(CollectSettings(samples=1, length=1026))
        results = {"windows": 1, "tokens": 1022, "fisher_windows": 0}
        writer.commit(settings=settings, model=model, texts=texts, results=results)
    transform = add_transform(run, model)
    digests = {(name, bits): add_plan(run, model, recipe(name), bits, transform) for name, bits in KL}
    return run, add_evaluations(run, digests)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[Evaluation], ReportFiles]:
    run, evaluations = full_run(tmp_path_factory.mktemp("run"))
    return run, evaluations, make_report(run, title="Report <i>&")


@pytest.fixture(scope="module")
def data(made: tuple[Run, list[Evaluation], ReportFiles]) -> ReportData:
    return load_report(made[0])


def markdown_tables(text: str) -> dict[str, list[dict[str, str]]]:
    """Tables under their ### captions, rows as {column: raw cell}."""
    found: dict[str, list[dict[str, str]]] = {}
    for caption, body in re.findall(r"^### (.*)\n\n((?:\|.*\n)+)", text, re.MULTILINE):
        lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in body.strip().splitlines()]
        head = [cell.strip() for cell in lines[0]]
        rows = [dict(zip(head, (cell.strip() for cell in line), strict=True)) for line in lines[2:]]
        found[caption.replace("\\", "").replace("&amp;", "&")] = rows
    return found


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.faults: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(tag)


def parse(html: str) -> Page:
    page = Page()
    page.feed(html)
    page.close()
    return page


def test_number_has_three_digits() -> None:
    values = [None, 0.0, 0.000123456, 0.0000999999, 1.0, 9.996, 123.456, 1234.5, 999_999.0, -0.04567, 3.4e-8]
    texts = ["-", "0", "0.000123", "0.000100", "1.00", "10.0", "123", "1230", "1.00e6", "-0.0457", "3.40e-8"]
    assert [number(value) for value in values] == texts
    assert [signed(0.012), signed(-0.012)] == ["+0.0120", "-0.0120"]
    assert [size(n) for n in (12, 999, 1000, 184_000_000, 999_960_000, 1_073_741_824)] == [
        "12 B",
        "999 B",
        "1.00 kB",
        "184 MB",
        "1.00 GB",
        "1.07 GB",
    ]


def test_csv_and_json_hold_every_evaluation(made: tuple[Run, list[Evaluation], ReportFiles]) -> None:
    _, written, files = made
    document = json.loads(files.json.read_text("utf-8"))
    back = [Evaluation.model_validate(raw) for raw in document["evaluations"]]
    assert sorted(back, key=lambda e: e.file_name) == sorted(written, key=lambda e: e.file_name)
    rows = list(csv.DictReader(io.StringIO(files.csv.read_text("utf-8"))))
    assert len(rows) == len(back)
    for row, e in zip(rows, back, strict=True):
        assert row["versions.torch"] == e.versions["torch"]
        for field in set(Evaluation.model_fields) - {
            "distortion",
            "versions",
            "kl_windows",
            "nll_windows",
            "nll_reference_windows",
            "traces",
        }:
            value = getattr(e, field)
            read = row[field]
            assert (
                (read == "")
                if value is None
                else (float(read) == value if isinstance(value, float) else read == str(value))
            )


def test_json_summarises_plans(made: tuple[Run, list[Evaluation], ReportFiles], data: ReportData) -> None:
    document = json.loads(made[2].json.read_text("utf-8"))
    assert [plan["name"] for plan in document["plans"]] == ["paper-4", "paper-2", "var-only-4", "var-only-2"]
    assert ModelIdentity.model_validate(document["model"]) == identity()
    for plan, view in zip(document["plans"], data.plans, strict=True):
        assert [layout["context"] for layout in plan["layout"]] == [1024, 8192]
        assert plan["layout"][1]["bytes_total"] == view.layout.bytes(8192)
        assert sum(plan["channels_per_width"]["k"]) == GEOMETRY.layers * GEOMETRY.channels


def test_markdown_numbers_are_the_evaluations(made: tuple[Run, list[Evaluation], ReportFiles]) -> None:
    found = markdown_tables(made[2].markdown.read_text("utf-8"))
    rows = found[f"{TEXT}: 6 windows of 1024 tokens, scored from position 256, float32"]
    assert [(row["recipe"], row["bits"]) for row in rows] == [
        ("fp16", "16.0"),
        ("paper", "4.00"),
        ("var-only", "4.00"),
        ("paper", "2.00"),
        ("var-only", "2.00"),
    ]
    paper = rows[3]
    assert paper["KL (nats)"] == "0.0456 ± 0.00228"
    assert paper["KL p99"] == "0.502"
    assert paper["top-1"] == "95.4 %"
    assert paper["packed bits"] == "2.12"
    assert paper["bits at 1024 tokens"] == "2.87"
    assert paper["ratio at 1024 tokens"] == "5.57x"
    assert paper["NLL (nats)"] == "3.26 ± 0.0707"
    assert paper["ΔNLL"] == "+0.0456"
    assert paper["perplexity"] == "25.9 ± 1.83"
    assert rows[0]["perplexity"] == "-"


def test_bold_is_the_lowest_kl_of_its_budget(made: tuple[Run, list[Evaluation], ReportFiles]) -> None:
    text = made[2].markdown.read_text("utf-8")
    bold = [
        (row["recipe"], row["bits"])
        for rows in markdown_tables(text).values()
        for row in rows
        if any(cell.startswith("**") for cell in row.values())
    ]
    best = {bits: min((kl, name) for (name, b), kl in KL.items() if b == bits)[1] for bits in (4.0, 2.0)}
    assert bold == [(best[4.0], "4.00"), (best[2.0], "2.00")]
    strong = re.findall(r"<strong>(.*?)</strong>", made[2].html.read_text("utf-8"))
    assert strong == ["0.00123 ± 6.15e-5", "0.0322 ± 0.00161"]


def test_protocols_are_never_mixed(data: ReportData) -> None:
    groups = quality_groups(data.evaluations)
    assert [(g.protocol.first_position, len(g.rows)) for g in groups] == [(256, 5), (512, 1)]
    more = [
        *data.evaluations,
        evaluation("paper", 2.0, 0.1, dtype="bfloat16"),
        evaluation("paper", 2.0, 0.1, windows=3),
    ]
    assert len(quality_groups(more)) == 4
    # another plan under the same name is another row, and the table says that it is not the run's own
    stale = evaluation("paper", 2.0, 0.2, plan="gone", task="perplexity", perplexity=9.0)
    group = quality_groups([*data.evaluations, stale])[0]
    assert len(group.rows) == 6
    table = quality_table(group, {plan.digest for plan in data.plans})
    assert [row[0].text for row in table.rows].count("paper †") == 1
    assert any("no longer in this run" in note for note in table.notes)


@pytest.mark.parametrize(("gap", "close"), [(1.9, True), (2.1, False)])
def test_indistinct_recipes_are_named(gap: float, close: bool) -> None:
    error = 0.01 / 2**0.5
    pair = [
        evaluation("paper", 2.0, 0.5, kl_stderr=error),
        evaluation("var-only", 2.0, 0.5 + gap * 0.01, kl_stderr=error),
    ]
    notes = quality_groups(pair)[0].indistinct()
    assert notes == (["n.s. (differences of KL within chance at 95 %): at 2 bits paper and var-only."] if close else [])
    alone = [e.model_copy(update={"kl_stderr": None}) for e in pair]
    assert quality_groups(alone)[0].indistinct() == []


def test_html_is_self_contained_and_balanced(made: tuple[Run, list[Evaluation], ReportFiles]) -> None:
    html = made[2].html.read_text("utf-8")
    page = parse(html)
    assert page.faults == []
    assert page.open == []
    assert not {"link", "img", "iframe", "object", "embed"} & set(page.tags)
    # a script of the page's own sorts tables; nothing in it fetches
    assert page.tags.count("script") == 1
    assert "<script>" in html
    assert not re.search(r"fetch|XMLHttp|import\b|src=", html[html.index("<script>") :])
    links = [value for _, name, value in page.attributes if name in ("href", "src", "xlink:href", "data")]
    assert links
    assert all(value.startswith("#") for value in links)
    assert "url(" not in re.sub(r"url\(#[^)]*\)", "", html)
    assert "http://" not in html
    assert "https://" not in html
    assert "@import" not in html
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    targets = {value[1:] for value in links} | set(re.findall(r"url\(#([^)]*)\)", html))
    assert targets <= set(ids)
    assert page.tags.count("svg") == 1 + 4 + 4 + 1 + 1 + 1 + 1
    # what does not see a figure is told what it is
    assert page.tags.count("desc") == page.tags.count("svg")
    named = [value.split() for tag, name, value in page.attributes if tag == "svg" and name == "aria-labelledby"]
    assert len(named) == page.tags.count("svg")
    assert {part for parts in named for part in parts} <= set(ids)


def test_figures_follow_the_theme(made: tuple[Run, list[Evaluation], ReportFiles]) -> None:
    html = made[2].html.read_text("utf-8")
    styles = " ".join(value for tag, name, value in parse(html).attributes if name == "style")
    assert "var(--s1, " in styles
    # a colour outside the theme would be unreadable in one of the two modes
    assert re.findall(r"(?<!, )#[0-9a-f]{3,6}", styles) == []
    used = set(re.findall(r"var\(--(\w+)", styles))
    light, dark = re.findall(r":root \{(.*?)\}", html, re.DOTALL)
    assert used <= set(re.findall(r"--(\w+):", light))
    assert used - {"font"} <= set(re.findall(r"--(\w+):", dark))


def test_names_are_escaped(made: tuple[Run, list[Evaluation], ReportFiles]) -> None:
    html, markdown = made[2].html.read_text("utf-8"), made[2].markdown.read_text("utf-8")
    assert "<b>" not in html
    assert "wiki &lt;b&gt;&amp;|*test*" in html
    assert "<title>Report &lt;i&gt;&amp;</title>" in html
    assert r"wiki \<b\>&amp;\|\*test\*" in markdown
    assert "<b>" not in markdown.replace(r"\<b\>", "")


def test_dollar_signs_in_names_are_text() -> None:
    panels = quality_series(quality_groups([evaluation("paper", 2.0, 0.1, text="cost $x^$ 5$")]))
    assert "cost $x^$ 5$, 6 x 1024 tokens" in quality_figure(panels)


def test_two_runs_are_byte_identical(made: tuple[Run, list[Evaluation], ReportFiles], tmp_path: Path) -> None:
    run, _ = full_run(tmp_path / "elsewhere")
    again = make_report(run, title="Report <i>&")
    for name in ("markdown", "html", "csv", "json"):
        assert getattr(again, name).read_bytes() == getattr(made[2], name).read_bytes(), name


def test_headline_names_model_texts_and_versions(made: tuple[Run, list[Evaluation], ReportFiles]) -> None:
    facts = made[2].markdown.read_text("utf-8").split("\n## ")[0]
    assert "Model: tiny/model (LlamaForCausalLM) at revision r1" in facts
    # 2 sides x 4 layers x 16 channels x 2 bytes
    assert "4 layers, 4 query heads, 2 key-value heads of 8: 16 channels per site, 256 B per token" in facts
    assert "Calibration (stats): topics, 1 window: 1022 tokens used" in facts
    assert "Calibration (transform whiten): calibration, 8 windows\n" in facts
    assert "torch 2.13.0, transformers 5.24.0" in facts


def test_sections_come_in_order(made: tuple[Run, list[Evaluation], ReportFiles]) -> None:
    titles = re.findall(r"^## (.*)$", made[2].markdown.read_text("utf-8"), re.MULTILINE)
    assert titles == [
        "Quality",
        "Quality against memory",
        "Where the bits go",
        "Spectrum and water level",
        "Predicted against measured distortion",
        "Bytes by cause",
        "Memory against context",
        "How to read this report",
    ]


def test_evaluations_alone_say_what_is_missing(tmp_path: Path) -> None:
    run = Run(tmp_path)
    write_evaluation(run.evals, evaluation("fp16", None, 1e-8))
    text = make_report(run).markdown.read_text("utf-8")
    assert text.count("No plan in this run: aatc allocate --budget 2.5") == 4
    assert "No distortion evaluation in this run: aatc eval distortion" in text
    assert "No KL of a compressed cache in this run: aatc eval kl" in text


def test_plans_alone_say_what_is_missing(tmp_path: Path) -> None:
    run, model = Run(tmp_path), identity()
    add_plan(run, model, recipe("paper"), 2.0, add_transform(run, model))
    text = make_report(run).markdown.read_text("utf-8")
    assert "No evaluation of quality in this run: aatc eval kl" in text
    assert "No plan" not in text
    # a transform made anew is not the one the plan was made from
    add_transform(run, model, seed=1)
    assert "not made from this run's transform: aatc allocate --force" in make_report(run).markdown.read_text("utf-8")


def test_an_empty_run_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(AatcError, match="no plans and no evaluations") as caught:
        make_report(Run(tmp_path / "absent"))
    assert caught.value.hint is not None
    assert "aatc allocate" in caught.value.hint
    assert not (tmp_path / "absent").exists()


def test_two_models_are_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)
    transform = add_transform(run, identity())
    add_plan(run, identity(), recipe("paper"), 2.0, transform)
    add_plan(run, identity(fingerprint="b"), recipe("var-only"), 2.0, transform)
    with pytest.raises(ArtifactError, match="weights_fingerprint"):
        make_report(run)


def test_quality_lines_are_the_evaluations(data: ReportData) -> None:
    panels = quality_series(quality_groups(data.evaluations))
    first = panels[0]
    assert [line.recipe for line in first.lines] == ["paper", "var-only"]
    assert first.lines[0].x == pytest.approx((2.12, 4.12))
    assert first.lines[0].y == (KL["paper", 2.0], KL["paper", 4.0])
    assert first.lines[0].error == pytest.approx((0.00228, 0.0000615))
    assert first.reference == 3.4e-8
    drawn = quality_figure(panels)
    # one bar per point in each panel, then one per recipe in the legend
    bars = re.findall(r'<g id="quality-LineCollection_\d+">(.*?)</g>', drawn, re.DOTALL)
    assert [part.count("<path") for part in bars] == [2, 2, 1, 1, 1]


def test_width_bars_are_the_plans(data: ReportData) -> None:
    for view, widths in zip(data.plans, widths_series(data.plans), strict=True):
        for side in SIDES:
            assert widths.layers[side] == [np.mean(layer[side]) for layer in view.bits]
            flat = [width for layer in view.bits for width in layer[side]]
            assert list(widths.histogram[side])[: max(flat) + 1] == np.bincount(flat).tolist()
        assert widths.protected == 1
        assert widths.layers["k"][0] == pytest.approx(float(view.budget) + 1)
        drawn = widths_figure(widths, 8.0, 8, "w", legend=False)
        bars = 2 * GEOMETRY.layers + 2 * len(widths.histogram["k"])
        assert bars < drawn.count("<path") < bars + 60
        assert drawn.count("var(--band") == 1
        assert "var(--band" not in widths_figure(replace(widths, protected=0), 8.0, 8, "w", legend=False)


def test_spectrum_is_sorted_energy_with_the_plans_levels(
    made: tuple[Run, list[Evaluation], ReportFiles], data: ReportData
) -> None:
    panels = spectrum_series(data.spectrum)  # type: ignore[arg-type]
    assert [(p.side, p.layer) for p in panels] == [("k", 1), ("k", 2), ("k", 3), ("v", 1), ("v", 2), ("v", 3)]
    energies = Transform.open(made[0].transform("whiten")).energies()
    for panel in panels:
        energy = recipe("paper").choices.energy(energies[panel.layer][panel.side], panel.side)
        assert panel.energy == tuple(sorted(energy.tolist(), reverse=True))
        assert dict(panel.levels) == {
            f"{plan.budget} bits": plan.water_level[panel.side] for plan in data.plans if plan.recipe == "paper"
        }
    assert 'id="spectrum-axes_6"' in spectrum_figure(panels)


def test_distortion_ratios(data: ReportData) -> None:
    group = distortion_groups(data.evaluations)[0]
    # 4 layers x 2 sides at 2 uniform widths, stated by both evaluations and kept once, and 2 plans
    assert len(group.points) == 16 + 16
    table = distortion_table(group)
    rows = {(row[1].text, row[2].text): [cell.text for cell in row] for row in table.rows}
    assert rows["K", "2"][3:] == ["4", "0.0719", "1.15", "1.00 to 1.30", "2.30"]
    assert rows["V", "plan 4"][5:7] == ["4.60", "4.00 to 5.20"]
    scatter = scatter_series([group])[0]
    drawn = distortion_figure([scatter])
    assert len(re.findall(r"<use ", drawn)) >= len(scatter.points)


def test_bytes_add_up(data: ReportData) -> None:
    assert data.contexts == [1024, 8192]
    for view, bar in zip(data.plans, bytes_series(data.plans, 8192), strict=True):
        assert sum(bar.shares.values()) == pytest.approx(100 / view.layout.ratio(8192))
        assert bar.label.endswith(f"{number(view.layout.ratio(8192))}x")
    row = bytes_table(data.plans, 8192).rows[0]
    assert row[7].text == size(data.plans[0].layout.bytes(8192))


def test_drawing_leaves_no_trace_in_matplotlib() -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    first = draw("empty", 2, 2, lambda figure: figure.subplots().plot([0, 1], [0, 1], color="#1f6fb4"), "t", "told")
    assert dict(matplotlib.rcParams) == before
    assert first.startswith("<svg")
    assert "metadata" not in first
