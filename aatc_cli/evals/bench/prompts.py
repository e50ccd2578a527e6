"""What a prompt takes: packing of its tokens, and its prefill with a fused cache of tiles beside one without."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from aatc_cli.evals.bench.findings import Findings
from aatc_cli.evals.bench.ours import FUSED_WINDOW, THETA
from aatc_cli.evals.bench.packing import compare_packing
from aatc_cli.evals.bench.rows import Size
from aatc_cli.evals.bench.tile_steps import tile_spec
from aatc_cli.evals.bench.whole_model import start_over
from aatc_cli.evals.speed.result import REFERENCE
from aatc_cli.evals.speed.timing import alternate, speed_row
from aatc_cli.models.adapter import attention_layers
from aatc_cli.models.random import random_llama
from aatc_cli.profiles import ModelProfile
from aatc_cli.runtime.attach import plain
from aatc_cli.runtime.session import Session

BACKEND = "fused-tiles"


def compare_prompts(
    found: Findings,
    profile: ModelProfile,
    bits: float,
    sizes: list[Size],
    repeats: int,
    device: torch.device,
    *,
    prefill: bool,
) -> None:
    """Rows of packing, and where ``prefill`` is asked for of that with random weights, at every (context, batch).

    Raises `AatcError` where the kernel packs other codes than torch does, beyond what roundings decide.
    """
    for size in sizes:
        compare_packing(found, profile.geometry, bits, size, repeats, device)
    if not prefill:
        return
    model = random_llama(profile.geometry, profile.context, THETA, device, torch.bfloat16)
    spec = tile_spec(model, profile.geometry, FUSED_WINDOW, bits)
    sessions = plain(model, REFERENCE), Session.of("tiles", model, attention_layers(model), spec)
    for context, batch in sizes:
        start_over(device)
        ids = torch.randint(1000, (batch, context), generator=torch.Generator().manual_seed(0)).to(device)
        # the first pass of each warms up
        theirs, ours = (seconds[1:] for seconds in alternate([prefill_of(one, ids) for one in sessions], repeats + 1))
        found.rows += [
            speed_row("prefill", context, batch, name, seconds, theirs)
            for name, seconds in ((REFERENCE, theirs), (BACKEND, ours))
        ]


def prefill_of(session: Session, ids: torch.Tensor) -> Callable[[], float]:
    """What times a pass over the prompts ``ids`` [B, n] into an empty cache of ``session``, in seconds."""

    def run() -> float:
        cache: Any = session.new_cache()
        with torch.no_grad(), session.attached():
            torch.cuda.synchronize(ids.device)
            began = time.perf_counter()
            session.model(input_ids=ids, use_cache=True, logits_to_keep=1, **{session.keyword: cache})
            torch.cuda.synchronize(ids.device)
            return time.perf_counter() - began

    return run
