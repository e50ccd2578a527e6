"""Times of whiten: the command, and some layers on the device and on the CPU."""

from __future__ import annotations

import time

import torch

from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import Stats
from aatc_cli.artifacts.transform import WhitenSettings
from aatc_cli.console import say
from aatc_cli.core.stats import LayerStats
from aatc_cli.evals.speed.result import SpeedRow
from aatc_cli.evals.speed.timing import speed_row
from aatc_cli.stages.whiten import Wanted, whiten
from aatc_cli.stages.whitening import whiten_layer
from aatc_cli.studies.offline_model import PASSES, OfflineBench, Size

_KINDS: tuple[str, ...] = ("whiten", "metric")
# layers whose transforms are made on the CPU too, for comparison
_COMPARED = 2


def whiten_rows(bench: OfflineBench, size: Size, place: Run) -> list[SpeedRow]:
    """whiten of real Stats, and of some of their layers on the device and on the CPU."""
    windows = bench.windows(size)
    job = bench.job(windows)
    bench.statistics(windows, size[1], job)
    bench.gradients(windows, size[1], job)
    job.write(place.stats(), windows.shape[0], windows.shape[0])
    samples, device = job.layers[0].filled, bench.device

    def command(kind: str) -> float:
        began = time.perf_counter()
        whiten(
            place,
            transform_stats=place.stats(),
            rate_stats=place.stats(),
            wanted=Wanted(kind),
            device=str(device),
            force=True,
        )
        return time.perf_counter() - began

    def some(kind: str, where: torch.device, layers: list[LayerStats]) -> float:
        began = time.perf_counter()
        for stats in layers:
            whiten_layer(stats, stats, WhitenSettings(transform=kind), where)
        return time.perf_counter() - began

    rows = []
    for kind in _KINDS:
        seconds = [command(kind) for _ in range(PASSES)]
        rows.append(speed_row("whiten", samples, len(job.layers), f"{kind}, command", seconds, seconds))
        say(f"eval: aatc whiten --transform {kind} of {len(job.layers)} layers: {min(seconds):.2f} s at best")
    stats = Stats.open(place.stats())
    layers = [stats.layer(layer) for layer in range(min(_COMPARED, len(job.layers)))]
    for kind in _KINDS:
        host = torch.device("cpu")
        times = {str(where): [some(kind, where, layers) for _ in range(PASSES)] for where in (host, device)}
        for name, seconds in times.items():
            rows.append(speed_row("whiten", samples, len(layers), f"{kind}, {name}", seconds, times[str(host)]))
            say(f"eval: {kind} of {len(layers)} layers on {name}, without files: {min(seconds):.2f} s at best")
    return rows
