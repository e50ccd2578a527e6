"""Dry runs of collect and eval, which run the model: what they would read, write and take on this machine."""

from __future__ import annotations

from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import CollectSettings
from aatc_cli.config import Geometry
from aatc_cli.evals.call import Call
from aatc_cli.evals.windows.settings import WindowSettings
from aatc_cli.models.adapter import geometry_of
from aatc_cli.models.loading import ModelSource, empty_model, load_config
from aatc_cli.models.profile_check import check_profile
from aatc_cli.profiles import ModelProfile
from aatc_cli.stages.inspecting.forecast import Forecast, Piece, on_disk, state_of
from aatc_cli.stages.inspecting.preflight import collect_work, measure_machine, seconds
from aatc_cli.stages.inspecting.stats_size import ranked_bytes, stats_bytes

# forward passes that a gradient pass comes to, as measured (docs/results.md)
_GRADIENT = 4.0
# forward passes that reading one window through a compressed cache comes to, measured with SmolLM2 on a CPU
_CODED = 1.2
# windows of a text that the time is of when all were asked for
_WINDOWS = 4


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
    work = collect_work(
        model, geometry, settings.windows, settings.length, settings.rows, itemsize=itemsize, below=settings.below
    )
    taken = seconds(work, machine)
    taken += _GRADIENT * 2.0 * work.forward / machine.forward * settings.gradients / settings.windows
    target = run.stats(name)
    size = _stats_file(geometry, settings)
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


def _stats_file(geometry: Geometry, settings: CollectSettings) -> int:
    """Bytes of the tensors of Stats; what is by rank is written with gradients alone."""
    rows = min(settings.rows, settings.tokens(settings.samples)) * settings.windows // settings.samples
    return stats_bytes(geometry, rows, settings.below) - (0 if settings.fisher else ranked_bytes(geometry))


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
