"""The cache that a subject is generated and measured with: its plan's own kind, or another that was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aatc_cli.errors import UsageError
from aatc_cli.evals.subjects import EvalOptions, Subject
from aatc_cli.runtime.attach import plain, prepare
from aatc_cli.runtime.forms import chosen
from aatc_cli.runtime.session import Session
from aatc_cli.runtime.store import Kind


def cache_kind(subject: Subject, options: EvalOptions) -> Kind | None:
    """Which cache --cache comes to; None for the reference, whose cache is the model's own."""
    if subject.plan is None:
        return None
    return chosen(subject.plan, options.device) if options.cache == "auto" else options.cache


def session_of(subject: Subject, model: Any, options: EvalOptions) -> Session:
    """The session of a subject: of the model's own cache without a plan, else of the kind that `cache_kind` says.

    Raises `AatcError` for a plan that this kind of cache does not hold: no other kind stands in for it.
    """
    kind = cache_kind(subject, options)
    if kind is None or subject.plan is None:
        return plain(model, subject.name)
    return prepare(model, subject.plan, kind)


def require_stored(subjects: Sequence[Subject], options: EvalOptions, why: str) -> None:
    """Raise for subjects whose bytes and times say nothing: the reference, ``why``, and simulated caches."""
    for subject in subjects:
        if subject.plan is None:
            raise UsageError(f"{subject.name} {why}", "name a plan by --recipe and --budget, or by --plan")
        if cache_kind(subject, options) == "simulated":
            # a plan without a packed form says why it has none
            subject.plan.codecs("cpu")
            problem = f"the simulated cache of {subject.name} holds full vectors, whose bytes and times are not its own"
            raise UsageError(problem, "give --cache packed or fused, or leave it out")
