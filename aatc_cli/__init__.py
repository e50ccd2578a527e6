"""Attention-aware transform coding of key-value caches: a staged, file-based command-line pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aatc_cli.version import __version__ as __version__

if TYPE_CHECKING:
    from aatc_cli.api import AatcError, CollectOptions, Plan, Session, allocate, collect, open_plan, whiten

__all__ = ["AatcError", "CollectOptions", "Plan", "Session", "allocate", "collect", "open_plan", "whiten"]


def __getattr__(name: str) -> Any:
    """The Python interface (`aatc_cli.api`), imported when it is asked for: the command line must start at once."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from aatc_cli import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
