"""Whether tensors can be those of one layer's cache: shapes that the window rule allows, dtypes, finite numbers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aatc_cli.config import Window
from aatc_cli.core.layout import exact_slots, packed_tokens


def fits(empty: Mapping[str, Tensor], tensors: Mapping[str, Tensor], tokens: int, window: Window) -> bool:
    """Whether ``tensors`` can be those of a packed layer with ``tokens`` tokens, as ``empty`` are of one without.

    The sinks and the ring have the sizes of the window rule, and the packed tokens are whole blocks, at least those of
    the rule (a crop leaves more) and at most all but the sinks. Scales are not negative.
    """
    if not alike(empty, tensors):
        return False
    sinks, slots = exact_slots(tokens, window)
    packed, flush = int(tensors["streams.0.keys"].shape[1]), window.flush
    if packed % flush or not packed_tokens(tokens, window) <= packed <= tokens - sinks:
        return False
    sizes = {
        "sink_keys": sinks,
        "sink_values": sinks,
        "ring_keys": slots,
        "ring_values": slots,
        "streams.0.keys": packed,
        "streams.0.values": packed // flush,
        "streams.0.key_scales": packed,
        "streams.0.value_scales": packed,
    }
    return shaped(empty, tensors, sizes)


def fits_sliding(empty: Mapping[str, Tensor], tensors: Mapping[str, Tensor], tokens: int, window: int) -> bool:
    """The same of a sliding layer that sees ``window`` tokens."""
    if not alike(empty, tensors):
        return False
    count = int(tensors["keys"].shape[1])
    return count <= min(tokens, window) and shaped(empty, tensors, dict.fromkeys(empty, count))


def alike(empty: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> bool:
    """Whether names, dtypes and numbers of axes are equal."""
    return tensors.keys() == empty.keys() and all(
        (given.dtype, given.dim()) == (empty[name].dtype, empty[name].dim()) for name, given in tensors.items()
    )


def shaped(empty: Mapping[str, Tensor], tensors: Mapping[str, Tensor], sizes: Mapping[str, int]) -> bool:
    """Whether every tensor has the shape of the empty one, its growing axis of this size, and numbers to go on with."""
    for name, tensor in tensors.items():
        shape, scales = list(empty[name].shape), name.endswith("_scales")
        shape[2 if scales else 1] = sizes[name]
        if list(tensor.shape) != shape:
            return False
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return False
        if scales and bool((tensor < 0).any()):
            return False
    return True
