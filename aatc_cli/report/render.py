"""A report as text: Markdown, one self-contained HTML page, CSV and JSON. The same data give the same bytes."""

from __future__ import annotations

import csv
import json
import re
from importlib.resources import files
from io import StringIO
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from aatc_cli.artifacts.evaluation import Evaluation
from aatc_cli.core import SIDES
from aatc_cli.profiles import dump
from aatc_cli.report.data import PlanView, ReportData
from aatc_cli.report.document import Document
from aatc_cli.report.sections import Section
from aatc_cli.report.svg import standalone
from aatc_cli.report.tables import Cell, Table

_NESTED = ("distortion", "versions", "kl_windows")


def render_markdown(document: Document) -> str:
    """The report as Markdown. Figures are left to the HTML page; what they show is in the tables where it fits."""
    parts = [f"# {_escape(document.title)}", "\n".join(f"- {_escape(k)}: {_escape(v)}" for k, v in document.facts)]
    for section in document.sections:
        parts += _markdown_section(section)
    return "\n\n".join(parts) + "\n"


def render_html(document: Document) -> str:
    """The report as one HTML page with inline style and SVG: no script, nothing fetched from anywhere."""
    source = files("aatc_cli.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return environment.from_string(source).render(document=document, trusted=Markup)


def render_figures(document: Document) -> dict[str, str]:
    """SVG files by name, of the figures that have one."""
    blocks = [figure for section in document.sections for figure in section.figures]
    return {f"{figure.name}.svg": standalone(figure.svgs[0]) for figure in blocks if figure.name is not None}


def render_csv(evaluations: tuple[Evaluation, ...]) -> str:
    """One line per evaluation with every flat field; versions become ``versions.NAME``, distortion rows are in JSON."""
    packages = sorted({name for e in evaluations for name in e.versions})
    flat = [name for name in Evaluation.model_fields if name not in _NESTED]
    buffer = StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([*flat, *(f"versions.{name}" for name in packages)])
    for e in evaluations:
        writer.writerow([*(getattr(e, name) for name in flat), *(e.versions.get(name) for name in packages)])
    return buffer.getvalue()


def render_json(data: ReportData) -> str:
    """Everything a report knows: model, texts, evaluations whole, and a summary of every plan."""
    document: dict[str, Any] = {
        "schema_version": 5,
        "title": data.title,
        "version": data.version,
        "model": None if data.model is None else dump(data.model),
        "texts": {use.artifact: [dump(text) for text in use.texts] for use in data.texts},
        "evaluations": [dump(e) for e in data.evaluations],
        "studies": [dump(view.result) for view in data.studies],
        "stability": [dump(result) for result in data.stability],
        "speed": [dump(result) for result in data.speed],
        "plans": [_plan(plan, data.contexts) for plan in data.plans],
    }
    return json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def _plan(plan: PlanView, contexts: list[int]) -> dict[str, Any]:
    return {
        "name": plan.name,
        "recipe": plan.recipe,
        "budget": plan.budget,
        "digest": plan.digest,
        "head_groups": dump(plan.groups),
        "protected_layers": plan.protected,
        "bits_mean": plan.bits_mean,
        "predicted": dict(plan.predicted),
        "water_level": dict(plan.water_level),
        "bits_per_layer": {side: plan.layer_means(side) for side in SIDES},
        "channels_per_width": dict(plan.histogram()),
        "layout": [plan.layout.summary(context) for context in contexts],
    }


def _markdown_section(section: Section) -> list[str]:
    parts = [f"## {_escape(section.title)}", *(_escape(paragraph) for paragraph in section.text)]
    for figure in section.figures:
        parts.append(f"{_escape(figure.caption)} (Drawn in [report.html](report.html#{section.slug}).)")
    for table in section.tables:
        parts += [f"### {_escape(table.caption)}", _markdown_table(table)]
        if table.notes:
            parts.append("\n".join(f"- {_escape(note)}" for note in table.notes))
    return parts


def _markdown_table(table: Table) -> str:
    lines = [
        "| " + " | ".join(_escape(column) for column in table.columns) + " |",
        "|" + "|".join(["---"] + ["---:"] * (len(table.columns) - 1)) + "|",
    ]
    lines += ["| " + " | ".join(_markdown_cell(cell) for cell in row) + " |" for row in table.rows]
    return "\n".join(lines)


def _markdown_cell(cell: Cell) -> str:
    return f"**{_escape(cell.text)}**" if cell.strong else _escape(cell.text)


def _escape(text: str) -> str:
    """Markdown's own signs as literal text, line ends as spaces: a name cannot open a tag, a cell or a heading."""
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", " ".join(text.split())).replace("&", "&amp;")
