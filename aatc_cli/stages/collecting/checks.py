"""Whether a calibration can determine the moments: before it is run by its numbers, after it by what it found."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch

from aatc_cli.artifacts.stats import CollectSettings
from aatc_cli.config import Geometry
from aatc_cli.console import say
from aatc_cli.core.stats import LayerStats
from aatc_cli.errors import AatcError, UsageError

# of English text the values of a model fill a tenth of their channels or more, of one repeated sentence a thirtieth
_FEW = 24


def check_rank(settings: CollectSettings, geometry: Geometry) -> None:
    """Raise `AatcError` when the calibration cannot determine the moments: no tokens, or fewer than channels."""
    if settings.length <= settings.skip_first:
        raise AatcError(
            f"windows of {settings.length} tokens have nothing left after the first {settings.skip_first}",
            "raise --length",
        )
    if settings.fisher > settings.samples:
        raise UsageError(
            f"--fisher {settings.fisher} asks for more windows than the {settings.samples} that are drawn",
            "raise --samples, or lower --fisher",
        )
    if settings.windows > settings.samples:
        raise UsageError(
            f"--first {settings.first} asks for more windows than the {settings.samples} that are drawn",
            "raise --samples, or leave --first out",
        )
    exact = settings.window.sinks + settings.window.recent
    if settings.fisher and settings.length <= exact + 1:
        raise AatcError(
            f"windows of {settings.length} tokens fit into the {exact} that a query reads exactly: "
            "nothing would be compressed and every gradient would be zero",
            "raise --length well above that, to 1024 say",
        )
    tokens = settings.windows * (settings.length - settings.skip_first)
    if tokens < geometry.channels:
        raise AatcError(
            f"{tokens} calibration tokens are fewer than the {geometry.channels} channels of a site: "
            "their second moment would be rank-deficient",
            f"raise --samples or --length; ten times the channels ({10 * geometry.channels} tokens) is a sound minimum",
        )


def check_gradients(settings: CollectSettings, dtype: torch.dtype) -> None:
    """Raise `UsageError` for gradients of a model whose dtype cannot hold them."""
    if settings.fisher and dtype == torch.float16:
        raise UsageError("gradients of a float16 model vanish below 6e-8", "run with --dtype bfloat16 or float32")


def check_spread(processes: int, *, spread: bool) -> None:
    """Raise `UsageError` for a model that accelerate is to spread in more than one process."""
    if spread and processes > 1:
        raise UsageError("--device-map auto uses all GPUs in one process", "start it without torchrun")


def value_rank(layers: Sequence[LayerStats]) -> float:
    """Effective rank of the values' second moments M: (tr M)^2 / tr M^2, the median over layers, to a tenth; 1 to C.

    It is the number of directions that would hold as much if all held the same. Of values, because the moment of keys
    is hardly more than their mean, whatever the text.
    """
    ranks = []
    for layer in layers:
        total = float(layer.v_outer.square().sum())
        ranks.append(float(layer.v_outer.trace().square()) / total if total > 0 else 0.0)
    return round(median(ranks), 1)


def warn_of_rank(rank: float, distinct: int, channels: int) -> None:
    """Say on stderr that calibration tokens were so alike that the moments hold next to no directions."""
    if rank < channels / _FEW:
        say(
            f"warning: the calibration text hardly varies: effective rank {rank:.1f} of {channels} channels (median of "
            f"the values over layers), {distinct} distinct tokens; plans made of it do not fit other text"
        )
