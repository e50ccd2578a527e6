"""What a result of speed is made of, and our attention beside every other one at one size."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from aatc_cli.config import Geometry
from aatc_cli.errors import AatcError
from aatc_cli.evals.bench.attention import sdpa_timings
from aatc_cli.evals.bench.flash_attention import library_timing
from aatc_cli.evals.bench.float8_trials import BACKEND as FLOAT8
from aatc_cli.evals.bench.float8_trials import FLOAT8_BOUND, float8_timing
from aatc_cli.evals.bench.ours import Ours
from aatc_cli.evals.bench.peers import peer_timings
from aatc_cli.evals.bench.rows import Size, speed_rows
from aatc_cli.evals.speed.result import SpeedCheck, SpeedMemory, SpeedRow


@dataclass
class Findings:
    """What a result is made of."""

    rows: list[SpeedRow] = field(default_factory=list)
    checks: list[SpeedCheck] = field(default_factory=list)
    memory: list[SpeedMemory] = field(default_factory=list)
    configurations: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def compare_attention(
    found: Findings,
    ours: Ours,
    geometry: Geometry,
    size: Size,
    repeats: int,
    device: torch.device,
    library: Path | None = None,
) -> None:
    """Rows of one size: the references, the float8 baseline and ours; raises `AatcError` where ours is wrong.

    library: FlashAttention-3 that is among the references; raises `AatcError` where it does not work here.
    """
    context, batch = size
    name = ours.timing.backend
    if not ours.error <= ours.bound:
        raise AatcError(
            f"{name} attention at {context} tokens is {ours.error:.3g} from its twin, more than {ours.bound:g}; "
            "no time is reported",
            "report this with the device and the versions of torch and CuPy",
        )
    torch.cuda.empty_cache()
    checks = [(name, ours.error, ours.bound)]
    peers, missing = peer_timings(geometry, batch, context, repeats, device)
    references = [*sdpa_timings(geometry, batch, context, repeats, device), *peers]
    if library is not None:
        references.append(library_timing(library, geometry, batch, context, repeats, device))
    float8 = float8_timing(geometry, batch, context, repeats, device)
    others = []
    if isinstance(float8, str):
        missing[FLOAT8] = float8
    else:
        timing, error, launched = float8
        others.append(timing)
        checks.append((FLOAT8, error, FLOAT8_BOUND))
        found.configurations[place_of(FLOAT8, size)] = launched
    found.left_out |= {place_of(backend, size): reason for backend, reason in missing.items()}
    found.checks += [
        SpeedCheck(context=context, batch=batch, backend=backend, error=error, bound=bound)
        for backend, error, bound in checks
    ]
    found.rows += speed_rows("attention", size, references, [*others, ours.timing], ours.roof)


def place_of(backend: str, size: Size) -> str:
    """A backend at one (context, batch), for people."""
    return f"{backend} at {size[1]} x {size[0]}"
