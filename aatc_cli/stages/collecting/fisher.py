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
from aatc_cli.evals.forced.teacher_forced import mixed_attention
from aatc_cli.models.adapter import AttentionSite, rebias
from aatc_cli.models.attention import LayerInputs, attention_override
from aatc_cli.models.recompute import recomputed

# called with (layer, side, gradients [B * T, C]); tokens that no query read packed have gradient zero
OnGradient = Callable[[int, Side, Tensor], None]
# called with what the attention of a layer gets, before the layer's gradients are known; twice where layers are
# recomputed
OnInputs = Callable[[LayerInputs], None]
# tokens whose probabilities are summed before any is looked at
_BLOCK = 256


def fisher_pass(
    model: Any,
    sites: list[AttentionSite],
    tokens: Tensor,
    window: Window,
    generators: Sequence[torch.Generator],
    on_gradient: OnGradient,
    *,
    recompute: bool = False,
    on_inputs: OnInputs | None = None,
) -> None:
    """One forward and one backward pass over windows ``tokens`` [B, T]; the model's parameters get no gradients.

    ``generators`` are of the CPU, one for every window, so that what a window samples does not depend on the batch it
    is in. The copies stay in the graph: the gradient at a layer's cache includes what its noise does to the caches of
    later layers. ``on_inputs`` sees the inputs of every attention first, outside of the graph.
    Memory is one graph of B sequences; with ``recompute`` the graph of one layer and the inputs of all, for one more
    forward pass.
    """
    frozen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)

    def attend(inputs: LayerInputs) -> Tensor:
        k_copy, v_copy = _watched(inputs, "k", on_gradient), _watched(inputs, "v", on_gradient)
        site, (heads, dim) = inputs.site, inputs.key.shape[1::2]
        if on_inputs is not None:
            with torch.no_grad():
                on_inputs(inputs)

        def by_head(x: Tensor, bias: Tensor | None) -> Tensor:
            return rebias(x, bias).reshape(*x.shape[:-1], heads, dim).transpose(1, 2)

        keys = inputs.rotate(by_head(k_copy, site.k_bias))
        return mixed_attention(inputs, keys, by_head(v_copy, site.v_bias), window)

    exact = window.sinks + window.recent
    readers = max(tokens.shape[1] - exact, 1)
    # drawn and moved before the passes: in between, the device would have to be waited for
    drawn = [torch.rand(readers, generator=generator, dtype=torch.float64) for generator in generators]
    uniform = torch.stack(drawn).to(tokens.device)
    try:
        with torch.enable_grad(), attention_override(model, sites, attend), recomputed(model, on=recompute):
            logits = model(input_ids=tokens, use_cache=False, logits_to_keep=readers).logits
            logits.backward(_scores(logits.detach(), uniform))
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)


def _watched(inputs: LayerInputs, side: Side, on_gradient: OnGradient) -> Tensor:
    """The cached vectors once more, as a tensor whose own gradient is reported as soon as it is known."""
    raw = inputs.k_raw if side == "k" else inputs.v_raw
    copy = raw.view_as(raw) if raw.requires_grad else raw.detach().requires_grad_()
    layer = inputs.site.layer
    copy.register_hook(lambda gradient: on_gradient(layer, side, gradient.flatten(0, 1)))  # type: ignore[no-untyped-call]
    return copy


def _scores(logits: Tensor, uniform: Tensor) -> Tensor:
    """Gradient of -log p(y) at every position for a sampled y: p less one at y. logits [B, P, V] -> the same shape.

    ``uniform`` [B, P] chooses the samples (`sample_labels`). Windows are taken one by one, since float32 probabilities
    of a large vocabulary are large.
    """
    scores = torch.empty_like(logits)
    for place, row in enumerate(logits):
        p = row.softmax(-1, dtype=torch.promote_types(row.dtype, torch.float32))
        labels = sample_labels(p, uniform[place])
        scores[place] = p.scatter_add_(-1, labels[:, None], -torch.ones_like(p[:, :1]))
    return scores


def sample_labels(p: Tensor, uniform: Tensor) -> Tensor:
    """One token for every position: the first whose cumulated probability exceeds a uniform number. -> [P].

    p [P, V] probabilities, uniform [P] in [0, 1). One number for a position, and not one for every token of the
    vocabulary, so that a draw is cheap and the same on every device. Blocks of tokens are cumulated first and then the
    tokens of one block, so that the probabilities are read once and no table of V sums is written.
    """
    vocabulary = p.shape[1]
    whole = vocabulary // _BLOCK * _BLOCK
    blocks = torch.cat((torch.unflatten(p[:, :whole], 1, (-1, _BLOCK)).sum(-1), p[:, whole:].sum(-1, keepdim=True)), 1)
    ends = blocks.cumsum(-1)
    drawn = uniform.to(p)[:, None] * ends[:, -1:]
    block, rest = _first_above(ends, drawn)
    tokens = block * _BLOCK + torch.arange(_BLOCK, device=p.device)
    inside = p.gather(1, tokens.clamp_max(vocabulary - 1)).masked_fill(tokens >= vocabulary, 0).cumsum(-1)
    place, _ = _first_above(inside, rest)
    return (block * _BLOCK + place)[:, 0].clamp_max(vocabulary - 1)


def _first_above(ends: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
    """First place of rising ``ends`` [P, n] above ``drawn`` [P, 1], and what is left of that beyond the place before.

    Rounding must not carry a draw to the very end, behind which every token may have probability zero.
    """
    total = ends[:, -1:]
    drawn = torch.minimum(drawn, torch.nextafter(total, torch.zeros_like(total)))
    place = torch.searchsorted(ends, drawn, right=True).clamp_max(ends.shape[1] - 1)
    before = torch.where(place > 0, ends.gather(1, (place - 1).clamp_min(0)), torch.zeros_like(total))
    return place, drawn - before
