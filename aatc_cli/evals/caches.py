"""The cache that a subject is generated and measured with: its plan's packed one, or another that was asked for."""

from __future__ import annotations

from typing import Any

from aatc_cli.errors import UsageError
from aatc_cli.evals.subjects import EvalOptions, Subject, subject_codecs
from aatc_cli.models.adapter import attention_layers
from aatc_cli.runtime.contenders import AnyContender, Packed, Plain, Simulated
from aatc_cli.runtime.session import cache_spec
from aatc_cli.runtime.simulated import simulated


def cache_kind(subject: Subject, options: EvalOptions) -> str | None:
    """Which cache --cache comes to; None for the reference, whose cache is the model's own. Raises `UsageError`."""
    if subject.plan is None:
        return None
    if options.cache == "auto":
        return "packed" if subject.recipe.packed else "simulated"
    if options.cache == "packed" and not subject.recipe.packed:
        problem = f"{subject.name} has no packed cache: its quantizer {subject.recipe.quantizer} is simulated"
        raise UsageError(problem, "give --cache simulated or auto")
    return options.cache


def cache_of(subject: Subject, model: Any, options: EvalOptions) -> AnyContender:
    """Makes caches of a subject for ``model``: its own without a plan, else the kind that `cache_kind` says."""
    kind = cache_kind(subject, options)
    if kind is None or subject.plan is None:
        return Plain(subject.name, model)
    if kind == "fused":
        raise UsageError(
            "the fused cache is timed of a profile alone", "give --profile without --model, or --cache packed"
        )
    if kind == "simulated":
        codecs = subject_codecs(subject, subject.plan.geometry.layers, options.device)
        # the caches outlive the block: what they share is all that is wanted of it
        with simulated(model, codecs, subject.recipe.window, subject.recipe.coordinates) as session:
            return Simulated(subject.name, model, session.spec)
    return packed_of(subject, model, options.device)


def packed_of(subject: Subject, model: Any, device: str) -> Packed:
    """Makes packed caches of a subject's plan."""
    assert subject.plan is not None
    codecs = subject.plan.codecs(device)
    return Packed(subject.name, model, cache_spec(model, attention_layers(model), codecs, subject.recipe.window))


def require_plans(subjects: tuple[Subject, ...] | list[Subject], why: str) -> None:
    """Raise `UsageError` for the reference among the subjects; ``why`` it needs none of its own."""
    for subject in subjects:
        if subject.plan is None:
            raise UsageError(f"{subject.name} {why}", "name a plan by --recipe and --budget, or by --plan")
