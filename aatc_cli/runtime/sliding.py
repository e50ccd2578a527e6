"""The cache of a sliding layer that stays exact: the latest tokens, as many as the layer can see."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aatc_cli.core.attend import masked_attention
from aatc_cli.runtime.store import LayerView, StoreParts
from aatc_cli.runtime.store_check import fits_sliding


class SlidingStore(StoreParts):
    """Rotated keys and values [b, min(T, window), C] of b sequences of equal length, in the model's dtype."""

    NAMES = ("keys", "values")

    def __init__(self, window: int, channels: int, batch: int, dtype: torch.dtype, device: torch.device) -> None:
        self.window, self.tokens = window, 0
        self.keys = torch.empty(batch, 0, channels, dtype=dtype, device=device)
        self.values = self.keys.clone()

    @property
    def packed(self) -> int:
        """Packed tokens per sequence: none."""
        return 0

    @property
    def least(self) -> int:
        """Tokens that `drop` must leave: the next query needs window - 1 tokens, or all there are."""
        held = int(self.keys.shape[1])
        return 0 if held == self.tokens else self.tokens - max(held - self.window + 1, 0)

    @property
    def nbytes(self) -> int:
        """Bytes of the live tensors."""
        return self.keys.nbytes + self.values.nbytes

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Take in rows [b, n, C] of the next n tokens and forget what no later query sees."""
        self.tokens += keys.shape[1]
        self.keys = torch.cat((self.keys, keys), 1)[:, -self.window :].clone()
        self.values = torch.cat((self.values, values), 1)[:, -self.window :].clone()

    def tensors(self) -> dict[str, Tensor]:
        """Every live tensor by name; they hold all the bytes of this layer."""
        return {name: getattr(self, name) for name in self.NAMES}

    def snapshot(self) -> SlidingStore:
        """A store in the same state; tensors are only ever replaced, so they are shared."""
        batch, _, channels = self.keys.shape
        new = SlidingStore(self.window, channels, batch, self.keys.dtype, self.keys.device)
        new.load(self.tensors(), self.tokens)
        return new

    def load(self, tensors: Mapping[str, Tensor], tokens: int) -> None:
        """Put the contents of ``tokens`` tokens in place."""
        self.tokens = tokens
        for name in self.NAMES:
            setattr(self, name, tensors[name])

    def fits(self, tensors: Mapping[str, Tensor], tokens: int) -> bool:
        """Whether ``tensors`` can be the contents of such a store with ``tokens`` tokens."""
        return fits_sliding(self.tensors(), tensors, tokens, self.window)

    def attend(self, query: Tensor, view: LayerView, fresh: tuple[Tensor, Tensor] | None) -> Tensor:
        """Exact attention of new tokens over the store and, causally, over themselves. -> [b, Hq, q, D].

        A sliding layer sees every new token before it is stored: ``fresh`` has them, rotated.
        """
        assert fresh is not None
        return sliding_attention(query, *fresh, self, view)

    def drop(self, count: int) -> None:
        """Forget the ``count`` latest tokens, at least `least` of them staying."""
        assert self.tokens - count >= self.least
        self.tokens -= count
        held = int(self.keys.shape[1]) - count
        self.keys, self.values = self.keys[:, :held].clone(), self.values[:, :held].clone()


def sliding_attention(query: Tensor, key: Tensor, value: Tensor, store: SlidingStore, view: LayerView) -> Tensor:
    """Exact attention of new tokens over ``store`` and, causally, over themselves. -> [b, Hq, q, D].

    query [b, Hq, q, D], key and value [b, H, q, D] are rotated and not in the store yet.
    """
    heads, held, count = key.shape[1], store.keys.shape[1], query.shape[2]
    keys, values = (
        torch.cat((torch.unflatten(rows, -1, (heads, -1)).transpose(1, 2), new), 2)
        for rows, new in ((store.keys, key), (store.values, value))
    )
    allowed = None
    if count > 1 or held + 1 > store.window:
        device = query.device
        distance = held + torch.arange(count, device=device)[:, None] - torch.arange(held + count, device=device)
        allowed = (distance >= 0) & (distance < store.window)
    return masked_attention(query, keys, values, allowed, view.scaling, sinks=view.sinks, softcap=view.softcap)
