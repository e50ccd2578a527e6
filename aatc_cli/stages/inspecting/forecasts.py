"""What collect, whiten, allocate and eval would read, write and take on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import CollectSettings, Stats
from aatc_cli.config import Budget, Geometry
from aatc_cli.core import SIDES
from aatc_cli.core.received_bins import BINS, PROBES
from aatc_cli.errors import AatcError
from aatc_cli.evals.call import Call
from aatc_cli.evals.windows.settings import WindowSettings
from aatc_cli.methods.recipe import Recipe
from aatc_cli.models.adapter import geometry_of
from aatc_cli.models.loading import ModelSource, empty_model, load_config
from aatc_cli.models.profile_check import check_profile
from aatc_cli.profiles import ModelProfile
from aatc_cli.stages.allocate import derive, transform_for
from aatc_cli.stages.inspecting.forecast import Forecast, Piece, on_disk, state_of
from aatc_cli.stages.inspecting.preflight import collect_work, measure_machine, seconds
from aatc_cli.stages.inspecting.stats_size import stats_bytes
from aatc_cli.stages.whiten import Wanted

# forward passes that a gradient pass comes to, as measured (docs/results.md)
_GRADIENT = 4.0
# forward passes that reading one window through a compressed cache comes to, measured with SmolLM2 on a CPU
_CODED = 1.2
# windows of a text that the time is of when all were asked for
_WINDOWS = 4
# bytes a second of a modest disk
_DISK = 3e8


def forecast_collect(
    run: Run,
    name: str,
    source: ModelSource,
    settings: CollectSettings,
    device: str,
    profile: ModelProfile | None = None,
) -> Forecast:
    """Of the Stats called ``name``; from the configuration of the model alone. Texts are not looked at."""
    config = load_config(source)
    geometry = geometry_of(config)
    check_profile(profile, geometry)
    model, machine = empty_model(source, config), measure_machine(device)
    itemsize = 2 if device.startswith("cuda") else 4
    work = collect_work(model, geometry, settings.samples, settings.length, settings.rows, itemsize=itemsize)
    taken = seconds(work, machine)
    taken += _GRADIENT * 2.0 * work.forward / machine.forward * settings.fisher / settings.samples
    target = run.stats(name)
    size = _stats_file(geometry, min(settings.rows, settings.tokens(settings.samples)), fisher=settings.fisher > 0)
    notes = [f"checkpoints of the same size beside it ({run.checkpoint(name)}), until it is done"]
    return Forecast(
        "collect",
        reads=[Piece(source.reference, work.model_bytes, "weights, in the dtype they are used in")],
        writes=[Piece(str(target), size, state_of(target))],
        seconds=taken,
        memory=work.memory,
        free=machine.free,
        notes=notes,
    )


def _stats_file(geometry: Geometry, rows: int, *, fisher: bool) -> int:
    """Bytes of the tensors of Stats; what tokens received is written with gradients alone."""
    received = 8 * BINS + 16 * BINS * PROBES * geometry.channels
    return stats_bytes(geometry, rows) - (0 if fisher else geometry.layers * received)


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


def forecast_eval(call: Call, settings: WindowSettings) -> Forecast:
    """Of windows of text through the model and through every cache; what is measured already is not left out."""
    assert call.source is not None
    config = load_config(call.source)
    geometry, device = geometry_of(config), call.options.device
    model, machine = empty_model(call.source, config), measure_machine(device)
    windows = (settings.limit or _WINDOWS) * len(settings.text)
    itemsize = 2 if device.startswith("cuda") else 4
    work = collect_work(model, geometry, windows, settings.length, 1, itemsize=itemsize)
    reads = [Piece(call.source.reference, work.model_bytes, "weights, in the dtype they are used in")]
    plans = [subject.plan for subject in call.subjects if subject.plan is not None]
    reads += [Piece(str(plan.path), on_disk(plan.path)) for plan in plans]
    notes = [f"{windows} windows of {settings.length} tokens, {1 + len(call.subjects)} passes each"]
    notes += [] if settings.limit else [f"all windows of a text were asked for: the time is that of {_WINDOWS} of each"]
    # logits of a window, twice, in float32
    logits = 8 * settings.length * int(getattr(config.get_text_config(), "vocab_size", 0))
    return Forecast(
        "eval",
        reads,
        seconds=2.0 * work.forward / machine.forward * (1 + _CODED * len(call.subjects)),
        memory=work.model_bytes + 2 * work.activation_bytes + logits,
        free=machine.free,
        notes=notes,
    )
