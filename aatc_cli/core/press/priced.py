"""One allocation over tokens and channels: every token takes the class whose loss and bytes together cost least.

The widths of a plan give a token of kv head h in class k a loss of E_hk nats, were it as important as the head's
average token, and b_hk bytes. Eviction is one class more, without bytes: its token leaves the softmax, so nothing of
its key is missed and all of its value is. A token of importance r takes

    argmin_k  r E_hk + lambda b_hk

and one price lambda for all heads of all layers brings the bytes of a prompt to those that the plan allows. So no share
of the tokens is said beforehand. Nobody does better in as many bytes, losses being as they are taken to be here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aatc_cli.core.press.reading import Reading

# halvings of the logarithm of the price: more than float64 tells apart
_HALVINGS = 64
_PRICES = (-80.0, 20.0)
# of a token's importance, what its first reading says unless a press says another share
OWN = 0.5


@dataclass(frozen=True)
class Levels:
    """What a token of a class takes and loses: bytes [L, H, n] and losses [L, H, n + 1], the last of eviction.

    losses: nats of a token as important as its head's average. room: bytes of a packed token of all layers, on average.
    """

    bytes: Tensor
    losses: Tensor
    room: float


def importance(reading: Reading, among: Tensor, own: float = OWN) -> Tensor:
    """How important each token ``among`` [P] those of a prompt is to its kv head, 1 on average: [B, H, n].

    A share ``own`` of it by the squared weights of the prompt's own later tokens, the rest by the second reading's.
    """
    parts = []
    for squares in (reading.again, reading.before):
        found = squares[..., among].to(torch.float64)
        parts.append(found / found.mean(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny))
    return (1 - own) * parts[0] + own * parts[1]


def priced_classes(readings: Sequence[Reading], among: Tensor, levels: Levels, own: float = OWN) -> list[Tensor]:
    """The class of every token of a prompt by layer, [1, H, P]: -1 where it is evicted, and where not ``among`` [P]."""
    weights = torch.stack([importance(reading, among, own)[0] for reading in readings])
    taken = levels.bytes.to(weights.device), levels.losses.to(weights.device)
    room = levels.room * int(among.sum())
    low, high = _PRICES
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _spent(_chosen(weights, *taken, middle), taken[0]) > room:
            low = middle
        else:
            high = middle
    chosen = _chosen(weights, *taken, high)
    chosen = torch.where(chosen == levels.bytes.shape[2], -1, chosen)
    found = []
    for layer in chosen:
        whole = torch.full((1, layer.shape[0], among.numel()), -1, dtype=torch.int64, device=layer.device)
        whole[..., among] = layer
        found.append(whole)
    return found


def _chosen(weights: Tensor, paid: Tensor, losses: Tensor, price: float) -> Tensor:
    """The cheapest class of tokens of ``weights`` [L, H, n] at the logarithm of a price; the last is eviction."""
    cost = torch.nn.functional.pad(paid, (0, 1)) * torch.tensor(price, dtype=torch.float64).exp().to(paid.device)
    # classes one after another: their products are too many to hold together
    best, found = weights.new_full(weights.shape, torch.inf), torch.zeros_like(weights, dtype=torch.int64)
    for k in range(losses.shape[2]):
        each = weights * losses[:, :, k, None] + cost[:, :, k, None]
        better = each < best
        best, found = torch.where(better, each, best), torch.where(better, k, found)
    return found


def _spent(chosen: Tensor, paid: Tensor) -> float:
    """Bytes of tokens [L, H, n] in their classes."""
    whole = torch.nn.functional.pad(paid, (0, 1))
    counts = torch.nn.functional.one_hot(chosen, whole.shape[2]).sum(2)
    return float((counts * whole).sum())
