"""The two kinds of passes of collect over windows of text: forward for statistics, and there and back for gradients."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from aatc_cli.core import Side
from aatc_cli.core.stats import sample_rows
from aatc_cli.errors import AatcError
from aatc_cli.models.adapter import non_finite
from aatc_cli.models.attention import LayerInputs
from aatc_cli.models.capture import capture
from aatc_cli.models.placement import input_device
from aatc_cli.stages.collecting.fisher import fisher_pass
from aatc_cli.stages.collecting.job import CollectJob
from aatc_cli.stages.collecting.received import received_in
from aatc_cli.stages.collecting.settings import CollectOptions
from aatc_cli.stages.collecting.stopwatch import Stopwatch, clock


@dataclass
class Timer:
    """Seconds in the whole forward pass and, inside it, in the statistics; seconds in gradient passes."""

    total: float = 0.0
    statistics: float = 0.0
    fisher: float = 0.0


class Advances(Protocol):
    """What is told of windows that are done."""

    def advance(self, steps: int = 1) -> None:
        """``steps`` more windows are done."""


@torch.no_grad()
def run_forward(
    job: CollectJob,
    model: Any,
    windows: Tensor,
    start: int,
    options: CollectOptions,
    timer: Timer,
    partial: Path,
    ticker: Advances,
) -> None:
    """Statistics of the ``windows`` [W, T] from number ``start`` on into ``job``, with checkpoints at ``partial``.

    Raises `AatcError` for queries, keys or values that are not finite.
    """
    body = model.get_decoder() if hasattr(model, "get_decoder") else model
    saved_at = time.monotonic()
    for first in range(start, windows.shape[0], options.batch):
        batch = windows[first : first + options.batch].to(input_device(model))
        began = clock(options.device)
        statistics = _BatchStatistics(job, first, batch.shape[0], batch.shape[1])
        with capture(job.sites, statistics.add):
            body(input_ids=batch, use_cache=False)
        timer.total += clock(options.device) - began
        timer.statistics += statistics.watch.seconds()
        if not statistics.finite():
            _name_non_finite(job, body, batch, first)
        ticker.advance(batch.shape[0])
        job.windows = done = first + batch.shape[0]
        if done < windows.shape[0] and time.monotonic() - saved_at >= options.checkpoint_seconds:
            job.write(partial, done, job.gradients)
            saved_at = time.monotonic()


class _BatchStatistics:
    """What is taken of one batch layer by layer, without making the host wait for the device."""

    def __init__(self, job: CollectJob, first: int, count: int, length: int) -> None:
        self.job, self.skip, self.watch = job, job.settings.skip_first, Stopwatch()
        kept = length - self.skip
        drawn = [
            sample_rows(job.settings.seed, window, kept, job.quota(window)) + place * kept
            for place, window in enumerate(range(first, first + count))
        ]
        self._samples = {torch.device("cpu"): torch.cat(drawn)}
        self._sums: list[Tensor] = []
        self._rows: deque[Tensor] = deque(maxlen=job.settings.below + 1)

    def add(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Take the queries [B, T, heads * D], keys and values [B, T, C] of one layer."""
        geometry = self.job.identity.geometry
        with self.watch.running(k.device):
            # one sum tells whether anything is NaN or infinite; which token it is matters only then
            self._sums.append(torch.stack([x.sum(dtype=torch.float32) for x in (q, k, v)]))
            by_head = torch.unflatten(q, -1, (geometry.heads, geometry.head_dim))
            self.job.layers[layer].update(
                by_head[:, self.skip :], k[:, self.skip :], v[:, self.skip :], self._sample(k.device)
            )
            if self.job.settings.below:
                both = torch.cat((k[:, self.skip :], v[:, self.skip :]), -1).flatten(0, 1)
                self._rows.appendleft(both.to(torch.float64))
                self.job.layers[layer].add_cross(list(self._rows))

    def finite(self) -> bool:
        """Whether all numbers were; waits for the device."""
        return bool(torch.isfinite(torch.stack([total.to(self._sums[0].device) for total in self._sums])).all())

    def _sample(self, device: torch.device) -> Tensor:
        if device not in self._samples:
            self._samples[device] = self._samples[torch.device("cpu")].to(device)
        return self._samples[device]


def _name_non_finite(job: CollectJob, body: Any, batch: Tensor, first: int) -> None:
    """Go through the batch again and raise `AatcError` naming the first layer and token whose numbers are not finite.

    Finite numbers whose sum is not are no error.
    """

    def look(layer: int, *tensors: Tensor) -> None:
        for what, tensor in zip(("queries", "keys", "values"), tensors, strict=True):
            bad = non_finite(tensor)
            if bad is not None:
                raise AatcError(
                    f"the {what} of layer {layer} are not finite at token {bad[1]} of window {first + bad[0]}",
                    "run with --dtype float32 or bfloat16; float16 overflows in some models",
                )

    with capture(job.sites, look):
        body(input_ids=batch, use_cache=False)


def run_gradients(
    job: CollectJob,
    model: Any,
    windows: Tensor,
    start: int,
    options: CollectOptions,
    timer: Timer,
    partial: Path,
    ticker: Advances,
) -> None:
    """Loss gradients of the ``windows`` [W, T] from number ``start`` on into ``job``, with checkpoints at ``partial``.

    Raises `AatcError` for gradients that are not finite, or that do not fit into memory.
    """
    sums: dict[tuple[int, Side], Tensor] = {}
    received: dict[int, Tensor] = {}
    window = job.settings.window

    def watch(inputs: LayerInputs) -> None:
        received[inputs.site.layer] = received_in(inputs, window)

    def add(layer: int, side: Side, gradients: Tensor) -> None:
        sums[layer, side] = gradients.sum(-1, dtype=torch.float32)
        job.layers[layer].add_gradients(side, gradients)
        seen = received[layer]
        by_window = gradients.view(seen.shape[0], seen.shape[2], -1)
        job.layers[layer].add_ranked(side, seen, by_window, window)

    saved_at = time.monotonic()
    batch = options.fisher_batch or options.batch
    stop = min(job.settings.fisher, windows.shape[0])
    for first in range(start, stop, batch):
        began = clock(options.device)
        tokens = windows[first : min(first + batch, stop)].to(input_device(model))
        job.gradients = done = first + tokens.shape[0]
        # functions of seed and window alone: neither resuming nor the batch changes which tokens are sampled
        seeds = [job.settings.seed * 1_000_003 + window for window in range(first, done)]
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        try:
            fisher_pass(model, job.sites, tokens, window, generators, add, recompute=options.recompute, on_inputs=watch)
        except torch.OutOfMemoryError as error:
            problem = f"the gradients of {tokens.shape[0]} windows do not fit into the memory of {options.device}"
            raise AatcError(problem, "lower --fisher-batch, or add --recompute") from error
        _check_gradients(sums, first, tokens)
        timer.fisher += clock(options.device) - began
        ticker.advance(tokens.shape[0])
        if done < stop and time.monotonic() - saved_at >= options.checkpoint_seconds:
            job.write(partial, job.windows, done)
            saved_at = time.monotonic()


def _check_gradients(sums: dict[tuple[int, Side], Tensor], first: int, tokens: Tensor) -> None:
    """Raise `AatcError` when a site's gradients are not finite; one look at the device for all of them."""
    rows = list(sums.values())
    table = torch.stack([row.to(rows[0].device) for row in rows]).view(len(sums), *tokens.shape).sum(-1)
    bad = (~torch.isfinite(table)).nonzero().tolist()
    if bad:
        layer, side = list(sums)[bad[0][0]]
        raise AatcError(
            f"the {side} gradients of layer {layer} are not finite in window {first + bad[0][1]}",
            "run with --dtype float32 or bfloat16",
        )
