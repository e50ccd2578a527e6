"""Pages of a model's own cache: taken out of it as an engine keeps them, and put into it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from aatc_cli.models.adapter import AttentionSite
from aatc_cli.runtime.stored.pages import Pages


def pages_of(cache: Any, sites: Sequence[AttentionSite], first: int, count: int, dtype: torch.dtype) -> Pages:
    """Pages of ``count`` tokens from ``first`` on, of the layers that are compressed; a cache of one sequence."""
    span = slice(first, first + count)
    keys, values = (
        torch.stack([getattr(cache.layers[site.place], name)[0, :, span] for site in sites])
        for name in ("keys", "values")
    )
    return Pages(keys.transpose(1, 2).to(dtype), values.transpose(1, 2).to(dtype))


def replace_pages(cache: Any, sites: Sequence[AttentionSite], first: int, pages: Pages) -> None:
    """Put pages in the place of the tokens from ``first`` on, which the cache holds already."""
    span = slice(first, first + pages.shape[1])
    for index, site in enumerate(sites):
        layer = cache.layers[site.place]
        layer.keys[0, :, span] = pages.keys[index].transpose(0, 1).to(layer.keys)
        layer.values[0, :, span] = pages.values[index].transpose(0, 1).to(layer.values)


def fill(cache: Any, sites: Sequence[AttentionSite], pages: Pages, dtype: torch.dtype) -> None:
    """Put pages into an empty cache of a model all of whose layers are compressed."""
    for index, site in enumerate(sites):
        both = (part[index].transpose(0, 1)[None].to(dtype) for part in (pages.keys, pages.values))
        cache.update(*both, site.place)
