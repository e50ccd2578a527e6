"""Speed of a cache beside the model's own: alternating repeats, medians with their spread, and a check of the numbers.

No time is worth anything if the numbers are wrong, so the first decoded logits are compared with those of one pass over
all tokens in which the last query reads what the codecs give back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from aatc_cli.artifacts.evaluation import Measurement
from aatc_cli.config import Settings, Window
from aatc_cli.core import Side
from aatc_cli.core.attend import masked_attention
from aatc_cli.core.codec import Codec
from aatc_cli.core.layout import packed_tokens
from aatc_cli.evals.forced.teacher_forced import reconstruct
from aatc_cli.models.adapter import attention_sites
from aatc_cli.models.attention import LayerInputs, attention_override, exact_attention

# name of the cache that all others are compared with: the model's own
REFERENCE = "uncompressed"
# a code on a rounding tie may come out either way, and layers above follow: a fraction of what compression does
_TIES = 0.25
# attention in another order of sums, after some tens of layers, relative to the logits
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}
_ROUNDING_HALF = 5e-2


Part = Literal["prefill", "decode", "attention", "collect", "whiten"]


class SpeedRow(Settings):
    """One part at one size with one cache: medians over repeats, the smallest and the largest of them.

    ``ratio`` is time over the reference's in the same repeat, so that a machine that slows down for a while slows both.
    """

    part: Part
    context: int = Field(
        description="tokens in the cache, at the end of a prefill or the start of decoding; of a window that is "
        "collected; sampled rows of Stats that are whitened"
    )
    batch: int = Field(description="sequences; layers that are whitened")
    backend: str = Field(description='how it is computed; "uncompressed" is the model with its own cache')
    milliseconds: float = Field(
        description="of a whole prefill, of one decoded token per sequence, of one pass of collect, of all layers"
    )
    milliseconds_low: float
    milliseconds_high: float
    ratio: float
    ratio_low: float
    ratio_high: float
    bytes_moved: int | None = Field(None, description="cache bytes that one decoded token reads, of all sequences")
    gigabytes_per_second: float | None = Field(None, description="bytes_moved over the median time; of attention alone")
    bound_milliseconds: float | None = Field(None, description="bytes_moved at the rate the reference reads")
    roof_bytes_milliseconds: float | None = Field(
        None, description="bytes_moved at the rate the device reads; this and the next two of fused attention alone"
    )
    roof_unpack_milliseconds: float | None = Field(
        None, description="a mask for every four codes of a plane, at the device's rate of integer instructions"
    )
    roof_keys_milliseconds: float | None = Field(
        None, description="multiply-adds with the key matrix, fast pairs only, at the device's rate for 8-bit floats"
    )


class SpeedCheck(Settings):
    """First decoded logits against their expectation: root mean square of the difference, and what it may be."""

    context: int
    batch: int
    backend: str
    error: float = Field(description="RMS of the difference to the expected logits")
    bound: float = Field(description="a quarter of what compression does to them, or rounding of the dtype if more")


class SpeedRates(Settings):
    """Rates of the device, measured in the process that timed: per second."""

    read_bytes: float = Field(description="bytes read, or read and written by a copy, whichever is more")
    integer_instructions: float = Field(description="shifts and masks of single threads")
    float8_multiply_adds: float = Field(description="of one large product of e4m3 matrices")


class SpeedMemory(Settings):
    """Device memory of decoding with a whole model, and what it is made of. All but the ratio in bytes."""

    context: int
    batch: int
    backend: str
    peak_bytes: int = Field(description="most allocated from before the cache was made until the last step")
    weight_bytes: int = Field(description="parameters and buffers of the model")
    law_bytes: int = Field(description="the byte law at the cache's capacity; uncompressed: two vectors per token")
    live_bytes: int = Field(description="tensors that hold tokens")
    static_bytes: int = Field(description="matrices and tables of all layers, which no token changes")
    buffer_bytes: int = Field(description="what else the cache allocates: partial sums, angles, counters")
    ratio: float = Field(description="peak_bytes over weight_bytes and law_bytes together")


class SpeedResult(Measurement):
    """Times of one plan's cache. On a CPU only ratios mean something beyond this machine.

    ``synthetic``: of a geometry alone, with random weights, codes and widths of the given mean.
    """

    task: Literal["speed"] = "speed"
    synthetic: bool = False
    absolute: bool = Field(description="whether milliseconds are worth reading: on a GPU")
    threads: int
    repeats: int
    steps: int = Field(description="tokens decoded in each repeat: one flush block, so that packing is in every one")
    rows: list[SpeedRow]
    checks: list[SpeedCheck]
    groups: int | None = Field(None, description="head groups of a synthetic packed cache; null for any other")
    rates: SpeedRates | None = Field(None, description="of the device, where rows have roofs")
    memory: list[SpeedMemory] = Field([], description="of whole decode steps of a geometry")
    configurations: dict[str, str] = Field({}, description="launch that was chosen, by backend and size")
    left_out: dict[str, str] = Field({}, description="why a backend at a size has no row")


def alternate(timed: Sequence[Callable[[], float]], repeats: int) -> list[list[float]]:
    """Seconds of every function, ``repeats`` times, in turns; the order is reversed every other time."""
    seconds: list[list[float]] = [[] for _ in timed]
    for repeat in range(repeats):
        order = range(len(timed))
        for index in order if repeat % 2 == 0 else reversed(order):
            seconds[index].append(timed[index]())
    return seconds


def speed_row(
    part: Part,
    context: int,
    batch: int,
    backend: str,
    seconds: Sequence[float],
    reference: Sequence[float],
    bytes_moved: int | None = None,
) -> SpeedRow:
    """The row of one backend from its seconds and the reference's in the same repeats."""
    ratios = [ours / theirs for ours, theirs in zip(seconds, reference, strict=True)]
    return SpeedRow(
        part=part,
        context=context,
        batch=batch,
        backend=backend,
        milliseconds=1e3 * median(seconds),
        milliseconds_low=1e3 * min(seconds),
        milliseconds_high=1e3 * max(seconds),
        ratio=median(ratios),
        ratio_low=min(ratios),
        ratio_high=max(ratios),
        bytes_moved=bytes_moved,
    )


@torch.no_grad()
def expected_logits(
    model: torch.nn.Module, codecs: Sequence[Mapping[Side, Codec]], window: Window, tokens: Tensor
) -> Tensor:
    """Logits [B, V] behind ``tokens`` [B, T + 1] when the first T are a prompt and the last one is decoded.

    The prompt attends to itself exactly; the last query reads packed tokens as the codecs reconstruct them.
    """

    def attend(inputs: LayerInputs) -> Tensor:
        site, query = inputs.site, inputs.query
        prompt = exact_attention(site, query, inputs.key, inputs.value, inputs.scaling)
        span = slice(window.sinks, window.sinks + packed_tokens(query.shape[2], window))
        k_hat, v_hat = reconstruct(inputs, codecs[site.layer], 0, "pre-rope")
        keys, values = inputs.key.clone(), inputs.value.clone()
        keys[:, :, span], values[:, :, span] = k_hat[:, :, span], v_hat[:, :, span]
        seen = None
        if site.sliding_window is not None:
            distance = query.shape[2] - 1 - torch.arange(query.shape[2], device=query.device)
            seen = (distance < site.sliding_window)[None]
        last = masked_attention(
            query[:, :, -1:], keys, values, seen, inputs.scaling, sinks=site.sinks, softcap=site.softcap
        )
        return torch.cat((prompt[:, :, :-1], last), 2)

    with attention_override(model, attention_sites(model), attend):
        found: Tensor = model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits[:, -1]
        return found


def check_logits(got: Tensor, expected: Tensor, plain: Tensor) -> tuple[float, float]:
    """RMS difference of ``got`` to ``expected`` and its bound; infinite where anything is not finite. All [B, V].

    plain: logits with the uncompressed cache, which say how much compression changes.
    """
    dtype, (got, expected, plain) = got.dtype, (x.to(torch.float64) for x in (got, expected, plain))
    error, effect, size = (float(x.square().mean().sqrt()) for x in (got - expected, plain - expected, expected))
    bound = max(_TIES * effect, _ROUNDING.get(dtype, _ROUNDING_HALF) * size)
    finite = bool(torch.isfinite(got).all())
    return (error if finite else float("inf")), bound
