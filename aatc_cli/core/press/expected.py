"""Attention that a prompt's tokens may expect from queries to come, taken for normal with the prompt's own moments.

Queries before RoPE have mean m and covariance S over the prompt; turned by the mean rotation R of the next positions
they have R m and R S R^T, and the mean of exp(q k / sqrt(D)) over a normal q is

    exp(k R m / sqrt(D) + k R S R^T k / (2 D))

whose share among the tokens is what one of them may expect. Source: Expected Attention (2510.00636).
"""

from __future__ import annotations

import torch
from torch import Tensor

from aatc_cli.core.press.seen import Prompt
from aatc_cli.core.rope import apply_rope, unapply_rope


def expected_attention(prompt: Prompt, skipped: int, ahead: int) -> Tensor:
    """Expected weights [B, Hq, P] of a prompt's tokens but the first ``skipped``, which get none and give no query.

    ahead: positions to come over which rotations are averaged.
    """
    length, wide = int(prompt.query.shape[2]), torch.promote_types(prompt.query.dtype, torch.float32)
    cos, sin = _tables(prompt.angles, torch.arange(length, device=prompt.query.device), wide)
    query = unapply_rope(prompt.query.to(wide), cos[None], sin[None], prompt.facts.rope)[:, :, skipped:]
    mean = query.mean(2, keepdim=True)
    centred = query - mean
    covariance = centred.mT @ centred / centred.shape[2]
    places = torch.arange(length, length + ahead, device=prompt.query.device)
    turn = [table.mean(0, keepdim=True)[None] for table in _tables(prompt.angles, places, wide)]

    def turned(x: Tensor) -> Tensor:
        cos, sin = (table.expand(x.shape[0], x.shape[2], -1) for table in turn)
        return apply_rope(x, cos, sin, prompt.facts.rope)

    mean, covariance = turned(mean), turned(turned(covariance).mT)
    keys = prompt.keys.to(wide)[:, :, skipped:].repeat_interleave(prompt.group, 1)
    scaling = prompt.facts.scaling
    scores = (keys @ mean.mT).squeeze(-1) * scaling + ((keys @ covariance) * keys).sum(-1) * scaling**2 / 2
    return torch.nn.functional.pad(scores.softmax(-1), (skipped, 0))


def _tables(angles: Tensor, places: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cos and sin [n, R] of ``places``, counted from the prompt's first token."""
    turned = places.to(angles)[:, None] * angles
    return turned.cos().to(dtype), turned.sin().to(dtype)
