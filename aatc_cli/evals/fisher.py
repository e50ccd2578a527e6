"""Gradients of the loss at cached keys and values, for the loss metric of `core.transform.loss_metric`.

A query reads exact tokens inside its sinks and window and, beyond them, a copy of the cached vector; the gradient of
the log-likelihood of *sampled* tokens at that copy is g, and sum g g^T is the true Fisher matrix of the cache (labels
from the text would give the empirical one). Positions are sampled independently given the text, so their scores are
uncorrelated and one backward pass over their sum gives an unbiased estimate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aatc_cli.config import Window
from aatc_cli.core import Side
from aatc_cli.evals.teacher_forced import mixed_attention
from aatc_cli.models.adapter import AttentionSite, rebias
from aatc_cli.models.attention import LayerInputs, attention_override

# called with (layer, side, gradients [B * T, C]); tokens that no query read packed have gradient zero
OnGradient = Callable[[int, Side, Tensor], None]


def fisher_pass(
    model: Any, sites: list[AttentionSite], tokens: Tensor, window: Window, generator: torch.Generator,
    on_gradient: OnGradient,
) -> None:  # fmt: skip
    """One forward and one backward pass over windows ``tokens`` [B, T]; the model's parameters get no gradients.

    The copies stay in the graph, so the gradient at a layer's cache includes what its noise does to the caches of later
    layers. Memory is one graph of B sequences.
    """
    frozen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)

    def attend(inputs: LayerInputs) -> Tensor:
        k_copy, v_copy = _watched(inputs, "k", on_gradient), _watched(inputs, "v", on_gradient)
        site, (heads, dim) = inputs.site, inputs.key.shape[1::2]

        def by_head(x: Tensor, bias: Tensor | None) -> Tensor:
            return rebias(x, bias).reshape(*x.shape[:-1], heads, dim).transpose(1, 2)

        keys = inputs.rotate(by_head(k_copy, site.k_bias))
        return mixed_attention(inputs, keys, by_head(v_copy, site.v_bias), window)

    try:
        with torch.enable_grad(), attention_override(model, sites, attend):
            exact = window.sinks + window.recent
            logits = model(input_ids=tokens, use_cache=False, logits_to_keep=max(tokens.shape[1] - exact, 1)).logits
            flat = logits.flatten(0, 1).float()
            labels = torch.multinomial(flat.detach().softmax(-1), 1, generator=generator)[:, 0]
            F.cross_entropy(flat, labels, reduction="sum").backward()  # type: ignore[no-untyped-call]
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)


def _watched(inputs: LayerInputs, side: Side, on_gradient: OnGradient) -> Tensor:
    """A copy of the cached vectors whose gradient is reported as soon as it is known."""
    raw = inputs.k_raw if side == "k" else inputs.v_raw
    copy = raw.clone() if raw.requires_grad else raw.detach().clone().requires_grad_()
    layer = inputs.site.layer
    copy.register_hook(lambda gradient: on_gradient(layer, side, gradient.flatten(0, 1)))  # type: ignore[no-untyped-call]
    return copy
