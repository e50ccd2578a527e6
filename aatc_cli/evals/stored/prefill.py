"""A prefix as an engine would have computed it: its pages in whole chunks, and what attention its tokens received."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aatc_cli.config import Window
from aatc_cli.core.received import received_by_head
from aatc_cli.core.tile_rule import tile_lags
from aatc_cli.models.adapter import AttentionSite
from aatc_cli.models.attention import LayerInputs, attention_override, exact_attention
from aatc_cli.models.compressed import cache_keyword
from aatc_cli.runtime.stored.live import pages_of, replace_pages
from aatc_cli.runtime.stored.pages import Pages


@dataclass(frozen=True)
class Prefill:
    """A prefix [1, T] in the model's own cache. received [L, H, T], where it was asked for."""

    cache: Any
    sites: list[AttentionSite]
    received: Tensor | None

    def pages(self, first: int, count: int, dtype: torch.dtype) -> Pages:
        """Pages of ``count`` tokens from ``first`` on, of the layers that are compressed."""
        return pages_of(self.cache, self.sites, first, count, dtype)

    def with_pages(self, first: int, pages: Pages) -> None:
        """Put pages in the place of the tokens from ``first`` on."""
        replace_pages(self.cache, self.sites, first, pages)

    def copy(self) -> Prefill:
        """One that can be changed."""
        return Prefill(copy.deepcopy(self.cache), self.sites, self.received)


@torch.no_grad()
def prefill(model: Any, sites: list[AttentionSite], tokens: Tensor, window: Window | None) -> Prefill:
    """Read a prefix [1, T]; with the ``window`` of a plan also what its tokens received, as it ranks them."""
    from aatc_cli.models.generation import plain_cache

    cache = plain_cache(model)
    model(tokens, use_cache=True, **{cache_keyword(model): cache})
    if window is None:
        return Prefill(cache, sites, None)
    found: list[Tensor] = []
    with attention_override(model, sites, _watching(found, tile_lags(window.recent))):
        model(tokens, use_cache=False)
    return Prefill(cache, sites, torch.stack(found))


def _watching(found: list[Tensor], lags: tuple[int, int]) -> Callable[[LayerInputs], Tensor]:
    def attend(inputs: LayerInputs) -> Tensor:
        site = inputs.site
        received = received_by_head(
            inputs.query,
            inputs.key,
            inputs.scaling,
            lags,
            sliding=site.sliding_window,
            sinks=site.sinks,
            softcap=site.softcap,
        )
        found.append(received[0])
        return exact_attention(site, inputs.query, inputs.key, inputs.value, inputs.scaling)

    return attend
