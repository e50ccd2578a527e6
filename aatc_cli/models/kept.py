"""Models and tokenizers that outlive one stage: a study runs many stages on the same model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

_KEPT: ContextVar[dict[str, Any] | None] = ContextVar("kept", default=None)


@contextmanager
def keeping_models() -> Iterator[None]:
    """Within the block each model and tokenizer is loaded once; all of them are let go after it.

    What is handed out is shared: nobody may change it beyond a block of his own.
    """
    token = _KEPT.set({})
    try:
        yield
    finally:
        _KEPT.reset(token)


def kept(load: Callable[P, T]) -> Callable[P, T]:
    """A loader that `keeping_models` keeps the results of, by its arguments."""

    parameters = signature(load)

    @wraps(load)
    def loaded(*args: P.args, **keywords: P.kwargs) -> T:
        shelf = _KEPT.get()
        if shelf is None:
            return load(*args, **keywords)
        call = parameters.bind(*args, **keywords)
        call.apply_defaults()
        key = repr((load.__name__, call.arguments))
        if key not in shelf:
            shelf[key] = load(*args, **keywords)
        found: T = shelf[key]
        return found

    return loaded
