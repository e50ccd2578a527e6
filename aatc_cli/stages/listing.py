"""list: what this installation knows by name, read from the packaged files and registries alone."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from aatc_cli.profiles import available, profiles_dir

Kind = Literal["recipes", "profiles", "studies", "models", "tasks"]


@dataclass(frozen=True)
class Listing:
    """Entries of one kind: ``data`` in full for programs, ``rows`` under ``columns`` for people."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    data: list[dict[str, Any]]


def listing(kind: Kind) -> Listing:
    """What there is of one kind, in name order."""
    makers: dict[str, Callable[[], Listing]] = {
        "recipes": _recipes,
        "profiles": _profiles,
        "studies": _studies,
        "models": _models,
        "tasks": _tasks,
    }
    return makers[kind]()


def _read(kind: Literal["models", "recipes", "studies"]) -> list[dict[str, Any]]:
    return [
        tomllib.loads((profiles_dir() / kind / f"{name}.toml").read_text(encoding="utf-8")) for name in available(kind)
    ]


def _recipes() -> Listing:
    data = _read("recipes")
    rows = [[entry["name"], entry["summary"]] for entry in data]
    return Listing("recipes: for --recipe", ["recipe", "what it is"], rows, data)


def _profiles() -> Listing:
    data, rows = [], []
    for entry in _read("models"):
        geometry = entry["geometry"]
        # keys and values of every compressed layer, two bytes a number
        per_token = 4 * geometry["layers"] * geometry["kv_heads"] * geometry["head_dim"]
        data.append(entry | {"fp16_bytes_per_token": per_token})
        rows.append([entry["name"], entry["model"], f"{per_token / 1e3:.1f}"])
    title = "model profiles: for --profile; kB of the float16 cache"
    return Listing(title, ["profile", "model", "kB/token"], rows, data)


def _studies() -> Listing:
    data = _read("studies")
    rows = [[entry["name"], str(len(entry["methods"])), entry["summary"]] for entry in data]
    return Listing("studies", ["study", "methods", "what it is"], rows, data)


def _models() -> Listing:
    from aatc_cli.models.architectures import ARCHITECTURES

    data: list[dict[str, Any]] = [
        {
            "architecture": name,
            "projections": known.projections,
            "rotary_pairs": known.rope,
            "attention_sinks": bool(known.sinks),
            "softcap": bool(known.softcap),
        }
        for name, known in sorted(ARCHITECTURES.items())
    ]
    rows = [[str(value) if not isinstance(value, bool) else "yes" * value for value in e.values()] for e in data]
    title = "architectures: the model_type of what --model names; aatc inspect --model MODEL says more"
    return Listing(title, ["architecture", "projections", "rotary pairs", "sinks", "softcap"], rows, data)


def _tasks() -> Listing:
    from aatc_cli.evals import TASKS

    data: list[dict[str, Any]] = [{"task": task.name, "summary": task.summary} for task in TASKS]
    return Listing("tasks: aatc eval TASK", ["task", "what is measured"], [list(e.values()) for e in data], data)
