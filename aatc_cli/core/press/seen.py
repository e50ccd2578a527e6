"""What a press is shown of one layer: keys, values and queries, attention received, the output projection."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from aatc_cli.core.attend import attention_weights
from aatc_cli.core.rope import RopeStyle

# queries whose attention weights are held at once
_TILE = 128


@dataclass(frozen=True)
class LayerFacts:
    """What the attention of a layer is told beside its vectors, as in `core.attend.masked_attention`.

    output: weight [M, Hq * D] of the output projection, for presses that read it.
    """

    scaling: float
    rope: RopeStyle = "half"
    sliding: int | None = None
    sinks: Tensor | None = None
    softcap: float | None = None
    output: Tensor | None = field(default=None, repr=False)

    def output_by_head(self, heads: int) -> Tensor:
        """The output projection of every query head, [Hq, D, M] in float32."""
        assert self.output is not None
        rows: Tensor = torch.unflatten(self.output.detach().float().T, 0, (heads, -1))
        return rows


@dataclass(frozen=True)
class Prompt:
    """Queries [B, Hq, P, D] and keys [B, H, P, D] of a prompt, both rotated, as it attended to itself.

    angles [R]: what a step of one position turns, by rotary dimension, as tables of cos and sin have them.
    """

    query: Tensor
    keys: Tensor
    facts: LayerFacts
    angles: Tensor

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return int(self.query.shape[1] // self.keys.shape[1])

    def weights(self, start: int, end: int) -> Tensor:
        """Attention weights [B, Hq, n, end] of the queries ``start`` .. ``end`` - 1 over the keys they see."""
        facts, places = self.facts, torch.arange(end, device=self.query.device)
        lag = places[start:, None] - places
        allowed = (lag >= 0) if facts.sliding is None else (lag >= 0) & (lag < facts.sliding)
        return attention_weights(
            self.query[:, :, start:end],
            self.keys[:, :, :end],
            allowed,
            facts.scaling,
            sinks=facts.sinks,
            softcap=facts.softcap,
        )

    def received(self) -> Tensor:
        """Attention that every token received from all queries of the prompt, summed over a kv head's. [B, H, P]."""
        batch, heads, length = self.keys.shape[:3]
        dtype = torch.promote_types(self.query.dtype, torch.float32)
        total = torch.zeros(batch, heads, length, dtype=dtype, device=self.query.device)
        for start in range(0, length, _TILE):
            end = min(start + _TILE, length)
            total[..., :end] += by_kv_head(self.weights(start, end), heads)
        return total

    def recent(self, count: int) -> Tensor:
        """Mean attention weights [B, Hq, P] of the last ``count`` queries, or of all where there are fewer."""
        length = int(self.query.shape[2])
        return self.weights(max(length - count, 0), length).mean(2)


@dataclass(frozen=True)
class Seen:
    """The tokens of one layer, T of them, when it is chosen which of them stay.

    values [B, H, T, D]: as the cache holds them, at the end of a prompt exact. held [B, H, T]: not evicted before.
    candidates [B, H, T]: those among which is chosen. received [B, H, T]: attention from all queries so far, where a
    press asks for it. costs [H]: bytes of a token of every head over their mean, None where heads are alike.
    """

    facts: LayerFacts
    values: Tensor
    held: Tensor
    candidates: Tensor
    received: Tensor | None = None
    prompt: Prompt | None = None
    costs: Tensor | None = None

    @property
    def places(self) -> Tensor:
        """Places of the tokens, [T]."""
        return torch.arange(self.values.shape[2], device=self.values.device)


def by_kv_head(weights: Tensor, heads: int) -> Tensor:
    """Attention weights [B, Hq, n, S] summed over queries and the query heads of every kv head. -> [B, H, S]."""
    return torch.unflatten(weights, 1, (heads, -1)).sum((2, 3))


def step_angles(cos: Tensor, sin: Tensor) -> Tensor:
    """What a step of one position turns: [R] float64, from tables [>= 2, R] of neighbouring positions.

    No rotation turns by half a circle a step, so the angle between two rows is the whole of it.
    """
    wide = torch.complex(cos[:2].double(), sin[:2].double())
    return torch.angle(wide[1] * wide[0].conj())
