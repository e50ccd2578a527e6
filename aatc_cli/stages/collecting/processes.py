"""Several processes over one calibration: who takes which windows, and the sum of what they found.

Started by ``torchrun --nproc-per-node N -m aatc_cli collect ...``, which tells every process its rank by environment
variables. Without them there is one process and nothing here does anything.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from aatc_cli.console import log
from aatc_cli.core.stats import LayerStats
from aatc_cli.errors import AatcError

# how long a process waits for the others, at the start and wherever they meet: shares differ by a window at most
PATIENCE = timedelta(minutes=30)


@dataclass(frozen=True)
class Processes:
    """This process among ``count``; the one of rank 0 reads and writes artifacts and is the only one heard."""

    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this process answers for the run."""
        return self.rank == 0

    def share(self, windows: int) -> tuple[int, int]:
        """The windows [start, stop) of this process: consecutive, shares that differ by one at most."""
        return windows * self.rank // self.count, windows * (self.rank + 1) // self.count

    def device(self, asked: str) -> str:
        """The device of this process: with ``cuda``, a GPU of its own."""
        return f"cuda:{os.environ['LOCAL_RANK']}" if self.count > 1 and asked == "cuda" else asked

    def agree(self, decided: bool) -> bool:
        """What the first process decided, in all of them."""
        if self.count == 1:
            return decided
        found = [decided]
        dist.broadcast_object_list(found, src=0)
        return found[0]

    def add_up(self, layers: Sequence[LayerStats]) -> None:
        """Replace every process's sums by those of all. Rows of windows that a process did not see must be zero.

        Layers follow one another, so that nothing beyond one tensor is held twice.
        """
        if self.count == 1:
            return
        for layer in layers:
            for name in LayerStats.TENSORS:
                if name != "o_gram":
                    dist.all_reduce(getattr(layer, name))
            count = torch.tensor(layer.count, device=layer.k_sum.device)
            dist.all_reduce(count)
            layer.count, layer.filled = int(count), layer.k_rows.shape[0]


@contextmanager
def joined(device: str) -> Iterator[Processes]:
    """The processes that torchrun started, connected by NCCL on GPUs and by gloo otherwise, while the block lasts.

    All but the first are silent. Raises `AatcError` when more processes than GPUs of this host ask for one each, and
    when the others do not come within `PATIENCE`.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Processes()
        return
    local = int(os.environ["LOCAL_RANK"])
    on_gpus = device.startswith("cuda")
    if on_gpus and (device != "cuda" or local >= torch.cuda.device_count()):
        raise AatcError(
            f"process {local} has no GPU of its own: {torch.cuda.device_count()} are seen, and --device is {device}",
            "use --device cuda and as many processes per node as GPUs",
        )
    if on_gpus:
        torch.cuda.set_device(local)
    try:
        dist.init_process_group("nccl" if on_gpus else "gloo", timeout=PATIENCE)
    except dist.DistStoreError as error:
        problem = f"process {os.environ['RANK']} of {count} waited for the others for {PATIENCE}"
        raise AatcError(problem, "see what ended them, and start all of them again") from error
    quiet = log.quiet
    try:
        log.quiet = quiet or dist.get_rank() > 0
        yield Processes(dist.get_rank(), count)
    finally:
        log.quiet = quiet
        dist.destroy_process_group()
