"""Decode attention over sequences of different lengths: ours beside what there is for a bfloat16 cache of the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from aatc_cli.config import Geometry
from aatc_cli.errors import AatcError
from aatc_cli.evals.bench.attention import CHECK_BOUND, Timing, graph_seconds
from aatc_cli.evals.bench.findings import Findings, place_of
from aatc_cli.evals.bench.flash_attention import BACKEND, attention_of, loaded
from aatc_cli.evals.bench.ours import FUSED_WINDOW, THETA
from aatc_cli.evals.bench.peers import PEER_BOUND
from aatc_cli.evals.bench.rows import Size, speed_rows
from aatc_cli.evals.bench.tile_attention import TileBench
from aatc_cli.evals.speed.result import SpeedCheck

# the shortest sequence is this part of the longest
_SHORTEST = 64
# single calls that run side by side
_STREAMS = 8


def ragged_lengths(context: int, batch: int) -> list[int]:
    """Tokens of ``batch`` sequences, evenly from a 64th of ``context`` up to all of it."""
    least = max(context // _SHORTEST, 1)
    return [least + (context - least) * place // max(batch - 1, 1) for place in range(batch)]


@dataclass(frozen=True)
class RaggedCache:
    """A bfloat16 cache of sequences of ``lengths`` tokens, n the longest.

    keys, values [B, n, H, D]; query [B, Hq, D].
    """

    keys: Tensor
    values: Tensor
    query: Tensor
    lengths: list[int]

    @classmethod
    def of(cls, geometry: Geometry, lengths: list[int], device: torch.device) -> RaggedCache:
        """Normal numbers from seed 0."""
        generator = torch.Generator(device).manual_seed(0)
        batch, shape = len(lengths), (len(lengths), max(lengths), geometry.kv_heads, geometry.head_dim)
        keys, values, query = (
            torch.randn(one, device=device, dtype=torch.bfloat16, generator=generator)
            for one in (shape, shape, (batch, geometry.heads, geometry.head_dim))
        )
        return cls(keys, values, query, lengths)

    @property
    def nbytes(self) -> int:
        """Bytes that a call has to read."""
        return sum(self.lengths) * 2 * self.keys[0, 0].numel() * self.keys.element_size()

    def error(self, out: Tensor) -> float:
        """Relative error of the first and the last sequence's output to attention in float64."""
        found = []
        for row in {0, len(self.lengths) - 1}:
            count = self.lengths[row]
            one, other = (side[row : row + 1, :count].transpose(1, 2).double() for side in (self.keys, self.values))
            query = self.query[row][None, :, None].double()
            expected = F.scaled_dot_product_attention(query, one, other, enable_gqa=True)[0, :, 0]
            found.append(float((out[row] - expected).square().mean().sqrt() / expected.square().mean().sqrt()))
        return max(found)


# output [B, Hq, D]
Attend = Callable[[], Tensor]


def each_by_itself(cache: RaggedCache) -> Attend:
    """FlashAttention-2 of torch, a call for every sequence, several of them side by side."""
    keys, values = (
        [side[row : row + 1, :count].transpose(1, 2).contiguous() for row, count in enumerate(cache.lengths)]
        for side in (cache.keys, cache.values)
    )
    batch, heads = len(keys), cache.keys.shape[2]
    rows = cache.query.view(batch, heads, -1, cache.query.shape[-1])
    out = torch.empty_like(rows)
    side_streams: list[Any] = [torch.cuda.Stream(out.device) for _ in range(_STREAMS)]  # type: ignore[no-untyped-call]

    def attend() -> Tensor:
        main = torch.cuda.current_stream(out.device)
        for stream in side_streams:
            stream.wait_stream(main)
        # the longest first
        for row in reversed(range(batch)):
            with torch.cuda.stream(side_streams[row % _STREAMS]), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                out[row : row + 1] = F.scaled_dot_product_attention(rows[row : row + 1], keys[row], values[row])
        for stream in side_streams:
            main.wait_stream(stream)
        return out.view(cache.query.shape)

    return attend


def by_library(path: Path, cache: RaggedCache) -> Attend:
    """FlashAttention-3 out of a library, with lengths of its own for every sequence."""
    lengths = torch.tensor(cache.lengths, dtype=torch.int32, device=cache.query.device)
    run = attention_of(loaded(path), lengths)
    keys, values = cache.keys.transpose(1, 2), cache.values.transpose(1, 2)
    return lambda: run(cache.query, keys, values)


def compare_ragged(
    found: Findings,
    geometry: Geometry,
    bits: float,
    size: Size,
    repeats: int,
    device: torch.device,
    library: Path | None,
) -> None:
    """Rows of one batch whose longest sequence has the context; raises `AatcError` where ours is wrong."""
    lengths = ragged_lengths(*size)
    timing, error = TileBench.of(geometry, FUSED_WINDOW, bits, THETA, lengths, device).measure(repeats)
    if not error <= CHECK_BOUND:
        raise AatcError(
            f"ragged attention is {error:.3g} from its twin, more than {CHECK_BOUND:g}; no time is reported",
            "report this with the device and the versions of torch and CuPy",
        )
    checks, references = [("fused-tiles", error, CHECK_BOUND)], []
    cache = RaggedCache.of(geometry, lengths, device)
    made: dict[str, Callable[[], Attend]] = {"sdpa-flash-each": lambda: each_by_itself(cache)}
    if library is not None:
        made[BACKEND] = lambda: by_library(library, cache)
    for name, make in made.items():
        attend = make()
        off = cache.error(attend())
        if off <= PEER_BOUND:
            checks.append((name, off, PEER_BOUND))
            references.append(Timing(name, graph_seconds(partial(_once, attend), repeats), cache.nbytes))
        else:
            found.left_out[place_of(name, size)] = f"its error is {off:.3g}, more than {PEER_BOUND:g}"
    found.checks += [
        SpeedCheck(context=size[0], batch=size[1], backend=name, error=off, bound=bound) for name, off, bound in checks
    ]
    found.rows += speed_rows("ragged", size, references, [timing])


def _once(attend: Attend) -> int:
    attend()
    return 1
