"""Gradients of the loss at cached keys and values, for the loss metric of `core.transform.loss_metric`.

A query reads exact tokens inside its sinks and window and, beyond them, a copy of the cached vector; the gradient of
the log-likelihood of *sampled* tokens at that copy is g, and sum g g^T is the true Fisher matrix of the cache (labels
from the text would give the empirical one). Positions are sampled independently given the text, so their scores are
uncorrelated and one backward pass over their sum gives an unbiased estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from aatc_cli.config import Window
from aatc_cli.core import Side
from aatc_cli.core.received import received_attention
from aatc_cli.evals.teacher_forced import mixed_attention
from aatc_cli.models.adapter import AttentionSite, rebias
from aatc_cli.models.attention import LayerInputs, attention_override
from aatc_cli.models.recompute import recomputed

# called with (layer, side, gradients [B * T, C]); tokens that no query read packed have gradient zero
OnGradient = Callable[[int, Side, Tensor], None]
# called with (layer, r [B, T]) before the layer's gradients are known; twice where layers are recomputed
OnReceived = Callable[[int, Tensor], None]


def fisher_pass(
    model: Any, sites: list[AttentionSite], tokens: Tensor, window: Window, generators: Sequence[torch.Generator],
    on_gradient: OnGradient, *, recompute: bool = False, on_received: OnReceived | None = None,
) -> None:  # fmt: skip
    """One forward and one backward pass over windows ``tokens`` [B, T]; the model's parameters get no gradients.

    ``generators`` are of the CPU, one for every window, so that what a window samples does not depend on the batch it
    is in. The copies stay in the graph: the gradient at a layer's cache includes what its noise does to the caches of
    later layers. ``on_received`` is told first what attention every token received while exact (`core.received`).
    Memory is one graph of B sequences; with ``recompute`` the graph of one layer and the inputs of all, for one more
    forward pass.
    """
    frozen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)

    def attend(inputs: LayerInputs) -> Tensor:
        k_copy, v_copy = _watched(inputs, "k", on_gradient), _watched(inputs, "v", on_gradient)
        site, (heads, dim) = inputs.site, inputs.key.shape[1::2]
        if on_received is not None:
            on_received(site.layer, _received(inputs, window))

        def by_head(x: Tensor, bias: Tensor | None) -> Tensor:
            return rebias(x, bias).reshape(*x.shape[:-1], heads, dim).transpose(1, 2)

        keys = inputs.rotate(by_head(k_copy, site.k_bias))
        return mixed_attention(inputs, keys, by_head(v_copy, site.v_bias), window)

    exact = window.sinks + window.recent
    readers = max(tokens.shape[1] - exact, 1)
    try:
        with torch.enable_grad(), attention_override(model, sites, attend), recomputed(model, on=recompute):
            logits = model(input_ids=tokens, use_cache=False, logits_to_keep=readers).logits
            logits.backward(_scores(logits.detach(), generators))
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)


@torch.no_grad()
def _received(inputs: LayerInputs, window: Window) -> Tensor:
    site = inputs.site
    return received_attention(
        inputs.query, inputs.key, inputs.scaling, window, sliding=inputs.sliding_window, sinks=site.sinks,
        softcap=site.softcap,
    )  # fmt: skip


def _watched(inputs: LayerInputs, side: Side, on_gradient: OnGradient) -> Tensor:
    """The cached vectors once more, as a tensor whose own gradient is reported as soon as it is known."""
    raw = inputs.k_raw if side == "k" else inputs.v_raw
    copy = raw.view_as(raw) if raw.requires_grad else raw.detach().requires_grad_()
    layer = inputs.site.layer
    copy.register_hook(lambda gradient: on_gradient(layer, side, gradient.flatten(0, 1)))  # type: ignore[no-untyped-call]
    return copy


def _scores(logits: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """Gradient of -log p(y) at every position for a sampled y: p less one at y. logits [B, P, V] -> the same shape."""
    scores = torch.empty_like(logits)
    for row, generator in enumerate(generators):
        p = logits[row].to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
        labels = sample_labels(p, torch.rand(p.shape[0], generator=generator, dtype=torch.float64))
        scores[row] = p.scatter_add_(-1, labels[:, None], -torch.ones_like(p[:, :1]))
    return scores


def sample_labels(p: Tensor, uniform: Tensor) -> Tensor:
    """One token for every position: the first whose cumulated probability exceeds a uniform number. -> [P].

    p [P, V] probabilities, uniform [P] in [0, 1). One number for a position, and not one for every token of the
    vocabulary, so that a draw is cheap and the same on every device.
    """
    cumulated = p.cumsum(-1)
    total = cumulated[:, -1]
    # rounding must not carry a draw to the very end, where every token may have probability zero
    drawn = torch.minimum(uniform.to(p) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulated, drawn[:, None], right=True)[:, 0].clamp_max(p.shape[1] - 1)
