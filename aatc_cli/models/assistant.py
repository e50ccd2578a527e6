"""Caches of an assistant model: ``generate`` of the main model calls it with none, and one is made for it here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

# the method of a model by which ``generate`` makes a cache that was not given
_PREPARE = "_prepare_cache_for_generation"


@contextmanager
def caches_of_assistant(model: nn.Module, keyword: str, new_cache: Callable[[], Any]) -> Iterator[None]:
    """While the block lasts, give ``model`` a cache of ``new_cache`` wherever it drafts for another model.

    transformers does not hand a cache through to an assistant. Calls of a person's own are left as they are: without a
    cache they are refused, as everywhere.
    """
    original: Any = getattr(model, _PREPARE, None)
    if original is None:
        yield
        return

    def prepare(generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if getattr(generation_config, "is_assistant", False) and model_kwargs.get(keyword) is None:
            model_kwargs[keyword] = new_cache()
        return original(generation_config, model_kwargs, *args, **kwargs)

    try:
        setattr(model, _PREPARE, prepare)
        yield
    finally:
        delattr(model, _PREPARE)
