"""What a command of eval is given beside the settings of its task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aatc_cli.artifacts.run import Run
from aatc_cli.errors import UsageError
from aatc_cli.evals.subjects import EvalOptions, Subject
from aatc_cli.models.source import ModelSource
from aatc_cli.profiles import ModelProfile


@dataclass(frozen=True)
class Call:
    """Where, of which model and with what it is measured.

    Without ``source`` the ``profile`` alone is measured; ``recipes`` and ``budgets`` are those named, for tasks that
    make plans of their own.
    """

    run: Run
    options: EvalOptions
    source: ModelSource | None = None
    profile: ModelProfile | None = None
    subjects: Sequence[Subject] = ()
    recipes: tuple[str, ...] = ()
    budgets: tuple[float, ...] = ()


def require_own_dtype(options: EvalOptions, own: str) -> None:
    """Raise `UsageError` for a --dtype that a profile alone does not read: its cache is held in ``own``."""
    if options.dtype not in ("auto", own):
        raise UsageError(f"a profile alone is measured in {own}, not {options.dtype}", "leave out --dtype")
