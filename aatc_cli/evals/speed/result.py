"""What a file of speed holds: medians over repeats with their spread, and the check without which there is no time."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from aatc_cli.artifacts.evaluation import Measurement
from aatc_cli.config import Settings

# name of the cache that all others are compared with: the model's own
REFERENCE = "uncompressed"

Part = Literal["prefill", "decode", "attention", "ragged", "packing", "collect", "whiten"]


class SpeedRow(Settings):
    """One part at one size with one cache: medians over repeats, the smallest and the largest of them.

    ``ratio`` is time over the reference's in the same repeat, so that a machine that slows down for a while slows both.
    """

    part: Part
    context: int = Field(
        description="tokens in the cache, at the end of a prefill or the start of decoding; of the longest of ragged "
        "sequences, the shortest of which has a 64th; packed of each sequence; of a window that is "
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
    bytes_moved: int | None = Field(
        None, description="cache bytes that one decoded token reads, of all sequences; bfloat16 bytes that are packed"
    )
    gigabytes_per_second: float | None = Field(
        None, description="bytes_moved over the median time; of attention or packing alone"
    )
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


class Result(Measurement):
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


def draft_of_profile(recipe: str, budget: str | None, protocol: dict[str, Any], cache: str | None) -> Result:
    """The result of a profile alone before anything is timed: enough to find one that is there of the same."""
    return Result(
        recipe=recipe,
        budget=budget,
        model=str(protocol["profile"]),
        cache=cache,
        protocol=protocol,
        bits=0.0,
        seconds=0.0,
        device=str(protocol["device"]),
        dtype="",
        versions={},
        absolute=True,
        threads=0,
        repeats=0,
        steps=0,
        rows=[],
        checks=[],
    )
