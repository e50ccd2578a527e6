"""Needles found by context and depth, a map per cache; maps of one protocol together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aatc_cli.artifacts.manifest import digest_of
from aatc_cli.evals.needles.result import Result
from aatc_cli.report.data.run import paper_first


@dataclass(frozen=True)
class NeedleMap:
    """Shares found by depth and context, ``heat[depth][context]``; None where a cell is missing."""

    name: str
    contexts: tuple[int, ...]
    depths: tuple[int, ...]
    heat: tuple[tuple[float | None, ...], ...]
    samples: int


@dataclass(frozen=True)
class NeedleGroup:
    """Maps of the same prompts, asked of the same model in the same way."""

    title: str
    maps: tuple[NeedleMap, ...]
    results: tuple[Result, ...]


def needle_groups(results: Sequence[Result]) -> list[NeedleGroup]:
    """One group per protocol; the model's own cache first, then by falling bits."""
    found: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        key = result.model, result.dtype, digest_of(result.protocol or [result.model_fingerprint, result.versions])
        found.setdefault(key, []).append(result)
    groups = []
    for key in sorted(found):
        ordered = sorted(found[key], key=lambda r: (r.plan is not None, -r.bits, paper_first(r.recipe)))
        title = f"{ordered[0].model}, {ordered[0].dtype} on {ordered[0].device}"
        groups.append(NeedleGroup(title, tuple(_map(result) for result in ordered), tuple(ordered)))
    return groups


def _map(result: Result) -> NeedleMap:
    name = result.method + (" (simulated)" if result.simulated else ", forced" if result.forced else "")
    heat = tuple(tuple(row) for row in result.heat)
    samples = max((cell.samples for cell in result.cells), default=0)
    return NeedleMap(name, tuple(result.contexts), tuple(result.depths), heat, samples)
