"""Whether tensors can be those of one layer's cache: shapes that the window rule allows, dtypes, finite numbers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aatc_cli.core.layout import exact_slots, packed_tokens
from aatc_cli.runtime.sliding import SlidingStore
from aatc_cli.runtime.store import LayerStore


def fits(store: LayerStore | SlidingStore, held: Mapping[str, Tensor | None]) -> bool:
    """Whether ``held`` can be the tensors of ``store``, which is empty but knows its ``tokens``.

    Of a compressed layer the sinks and the ring have the sizes of the window rule, and the packed tokens are whole
    blocks, at least those of the rule (a crop leaves more) and at most all but the sinks. Scales are not negative.
    """
    tensors = {name: tensor for name, tensor in held.items() if tensor is not None}
    empty = store.tensors()
    if tensors.keys() != empty.keys():
        return False
    if any((given.dtype, given.dim()) != (empty[name].dtype, empty[name].dim()) for name, given in tensors.items()):
        return False
    sizes = _sizes(store, tensors)
    if sizes is None:
        return False
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


def _sizes(store: LayerStore | SlidingStore, tensors: Mapping[str, Tensor]) -> dict[str, int] | None:
    """Size of the growing axis of every tensor, or None when no number of packed tokens makes sense."""
    if isinstance(store, SlidingStore):
        count = int(tensors["keys"].shape[1])
        return dict.fromkeys(store.NAMES, count) if count <= min(store.tokens, store.window) else None
    sinks, slots = exact_slots(store.tokens, store.window)
    packed, flush = int(tensors["streams.0.keys"].shape[1]), store.window.flush
    most = store.tokens - sinks
    if packed % flush or not packed_tokens(store.tokens, store.window) <= packed <= most:
        return None
    return {
        "sink_keys": sinks,
        "sink_values": sinks,
        "ring_keys": slots,
        "ring_values": slots,
        "streams.0.keys": packed,
        "streams.0.values": packed // flush,
        "streams.0.key_scales": packed,
        "streams.0.value_scales": packed,
    }
