"""Less memory in a backward pass: decoder layers keep their inputs alone and are computed again when needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from aatc_cli.models.adapter import attention_layers


@contextmanager
def recomputed(model: nn.Module, *, on: bool = True) -> Iterator[None]:
    """While the block lasts, every decoder layer is a checkpoint (`torch.utils.checkpoint`); without ``on``, nothing.

    Forward and backward pass must both lie in the block. The layers are as before when it ends.
    """
    layers: list[Any] = [_layer_of(model, attention.name) for attention in attention_layers(model)] if on else []
    before = [layer.__dict__.get("forward") for layer in layers]
    try:
        for layer in layers:
            # nothing in a layer draws random numbers: the model is in evaluation mode
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward


def _layer_of(model: nn.Module, attention: str) -> nn.Module:
    """The decoder layer around an attention module, by the module's name."""
    return model.get_submodule(attention.rpartition(".")[0])
