"""Dry runs of whiten and allocate: what they would read, write and take on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import Stats
from aatc_cli.config import Budget
from aatc_cli.core import SIDES
from aatc_cli.errors import AatcError
from aatc_cli.methods.recipe import Recipe
from aatc_cli.stages.allocate import derive, transform_for
from aatc_cli.stages.inspecting.forecast import Forecast, Piece, on_disk, state_of
from aatc_cli.stages.inspecting.preflight import measure_machine
from aatc_cli.stages.whiten import Wanted

# bytes a second of a modest disk
_DISK = 3e8


def forecast_whiten(run: Run, transform_stats: Path, rate_stats: Path, wanted: Wanted) -> Forecast:
    """Of the Transform ``wanted``: its bytes without tables of quantizers, and the time of its eigenproblems."""
    places = dict.fromkeys((transform_stats, rate_stats))
    stats = [Stats.open(place) for place in places]
    geometry = stats[-1].geometry
    groups = wanted.settings(geometry.kv_heads, stats[-1].settings.head_groups).head_groups
    # two matrices of float32 for every head group; scale in float32, variance and two weights in float64
    sizes = [geometry.channels // groups.of(side) for side in SIDES]
    written = geometry.layers * sum(8 * geometry.channels * size + 28 * geometry.channels for size in sizes)
    solving = geometry.layers * sum(geometry.channels // size * _eigenproblem(size) for size in sizes)
    read = sum(on_disk(place) or 0 for place in places)
    target = run.transform(wanted.name)
    return Forecast(
        "whiten",
        reads=[Piece(str(place), on_disk(place)) for place in places],
        writes=[Piece(str(target), written, state_of(target))],
        seconds=solving + (read + written) / _DISK,
        memory=max(2 * read // geometry.layers, 1),
        free=measure_machine("cpu").free,
    )


def _eigenproblem(size: int) -> float:
    """Seconds of one symmetric eigenproblem of this size, and of the products around it."""
    matrix = torch.eye(size, dtype=torch.float64)
    matrix += torch.arange(size, dtype=torch.float64).outer(torch.ones(size, dtype=torch.float64)) / size
    began = time.perf_counter()
    torch.linalg.eigh(matrix + matrix.T)
    return 1.5 * (time.perf_counter() - began)


def forecast_allocate(
    run: Run, recipes: Sequence[Recipe], budgets: Sequence[Budget], transform: Path | None, context: int
) -> Forecast:
    """Of one plan per recipe and budget. They are derived, which takes seconds, and not written."""
    reads: dict[Path, Piece] = {}
    writes, notes = [], []
    for recipe in recipes:
        made_from = transform_for(recipe, transform or run.transform(recipe.transform_name))
        reads[made_from.path] = Piece(str(made_from.path), on_disk(made_from.path))
        energies = made_from.energies()
        for budget in budgets:
            target = run.plan(recipe.name, budget)
            try:
                _, layout, _ = derive(made_from, energies, recipe, budget)
            except AatcError as error:
                notes.append(f"{recipe.name} {budget.label} cannot be met: {error.message}")
                continue
            channels = 2 * layout.geometry.layers * layout.geometry.channels
            writes.append(Piece(str(target), channels, state_of(target)))
            tokens = budget.context or context
            notes.append(
                f"{recipe.name} {budget.label}: cache of {layout.bytes(tokens):,} bytes at {tokens:,} tokens, "
                f"{layout.ratio(tokens):.2f} times smaller"
            )
    return Forecast("allocate", list(reads.values()), writes, notes=notes)
