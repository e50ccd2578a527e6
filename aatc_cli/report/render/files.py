"""The report for programs: evaluations as CSV, and everything as JSON."""

from __future__ import annotations

import csv
import json
from io import StringIO
from typing import Any

from aatc_cli.artifacts.evaluation import Evaluation
from aatc_cli.core import SIDES
from aatc_cli.profiles import dump
from aatc_cli.report.data.run import PlanView, ReportData

_NESTED = ("distortion", "versions", "kl_windows", "nll_windows", "nll_reference_windows", "traces")


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
        "schema_version": 6,
        "title": data.title,
        "version": data.version,
        "model": None if data.model is None else dump(data.model),
        "texts": {use.artifact: [dump(text) for text in use.texts] for use in data.texts},
        "calibration_tokens": {use.artifact: use.used for use in data.texts},
        "evaluations": [dump(e) for e in data.evaluations],
        "studies": [dump(view.result) for view in data.studies],
        "stability": [dump(result) for result in data.stability],
        "speed": [dump(result) for result in data.speed],
        "memory": [dump(result) for result in data.memory],
        "benchmarks": [dump(result) for result in data.answers],
        "needles": [dump(result) for result in data.needles],
        "recall": [dump(result) | {"tokens": None} for result in data.recall],
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
        "bits_packed": plan.layout.bits_packed,
        "predicted": dict(plan.predicted),
        "water_level": dict(plan.water_level),
        "bits_per_layer": {side: plan.layer_means(side) for side in SIDES},
        "channels_per_width": dict(plan.histogram()),
        "layout": [plan.layout.summary(context) for context in contexts],
    }
