"""Prefill and decode with a plan's cache and with the model's own, side by side in one run."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import torch

from aatc_cli.artifacts.versions import versions
from aatc_cli.console import progress
from aatc_cli.errors import UsageError
from aatc_cli.evals.bench.geometry import Form, measure_geometry, synthetic_name
from aatc_cli.evals.caches import cache_kind, require_stored, session_of
from aatc_cli.evals.call import Call, require_own_dtype
from aatc_cli.evals.keeping import kept
from aatc_cli.evals.opened import Opened
from aatc_cli.evals.speed.parts import PARTS, Bench, check_part
from aatc_cli.evals.speed.result import REFERENCE, Result, SpeedCheck, SpeedRow, draft_of_profile
from aatc_cli.evals.speed.settings import Settings
from aatc_cli.evals.subjects import EvalOptions, Subject, device_name
from aatc_cli.models.placement import find_device
from aatc_cli.runtime.attach import plain


def measure(opened: Opened, settings: Settings) -> list[Result]:
    """Time every plan against the model's own cache at every context and batch, and write one file each.

    Raises `UsageError` for a subject without a plan and for options of a profile alone, `AatcError` for a context the
    model does not have or when the first decoded logits are not those expected: then nothing is written of that plan.
    """
    of_profile = {
        "--whole-model": settings.whole_model,
        "--tiles": settings.tiles,
        "--ragged": settings.ragged,
        "--packing": settings.packing,
        "--prompts": settings.prompts,
        "--flash-attention": settings.flash_attention is not None,
        "--groups": settings.groups != "heads",
    }
    if option := next((name for name, given in of_profile.items() if given), None):
        raise UsageError(f"{option} is of a profile alone, and a model was named", "leave it out, or leave out --model")
    require_stored(opened.subjects, opened.options, "is what every plan is timed against")
    for subject in opened.subjects:
        room = 1 + (settings.repeats + 1) * subject.recipe.window.flush
        opened.check_length(max(settings.contexts) + room, "--context", room)
    return [_result(opened, settings, subject) for subject in opened.subjects]


def measure_profile(call: Call, settings: Settings) -> list[Result]:
    """The fused kernels, or with --groups the packed cache, in a profile's geometry with random contents.

    Raises `UsageError` without one budget, or for head groups that the profile cannot have.
    """
    assert call.profile is not None
    require_own_dtype(call.options, "bfloat16")
    if len(call.budgets) != 1:
        raise UsageError("speed of a profile needs one budget", "add --budget 2, or measure a plan with --model")
    if call.recipes:
        raise UsageError("speed of a profile is of random codes, whatever the recipe", "leave out --recipe")
    groups = head_groups_of(settings.groups, call.profile.geometry.kv_heads)
    if settings.whole_model and groups is not None:
        raise UsageError("whole decode steps are timed with the fused cache", "leave out --groups or --whole-model")
    if settings.tiles and groups is not None:
        raise UsageError("fused tiles have a head group for every head", "leave out --groups or --tiles")
    _check_alone(settings)
    kind = "fused" if groups is None else "packed"
    if call.options.cache not in ("auto", kind):
        raise UsageError(f"this is the speed of the {kind} cache, not of {call.options.cache}", "see --groups")
    protocol = {
        "task": "speed",
        "profile": call.profile.name,
        "geometry": call.profile.geometry.model_dump(mode="json"),
        "bits": call.budgets[0],
        "context": list(settings.geometry_contexts),
        "batch": list(settings.batch),
        "repeats": settings.repeats,
        "whole_model": settings.whole_model,
        "groups": groups,
        "tiles": settings.tiles,
        **({"ragged": True} if settings.ragged else {}),
        **({"packing": True} if settings.packing else {}),
        **({"prompts": True} if settings.prompts else {}),
        "flash_attention": _library(settings.flash_attention),
        **_place(call.options),
    }
    name = synthetic_name(groups, settings.tiles)
    draft = draft_of_profile(name, f"{call.budgets[0]:g}", protocol, kind)
    sizes = [(context, batch) for context in settings.geometry_contexts for batch in settings.batch]
    profile, options, repeats = call.profile, call.options, settings.repeats
    named = settings.model_dump(include={"tiles", "ragged", "packing", "prompts"})
    form = Form(whole=settings.whole_model, groups=groups, library=settings.flash_attention, **named)

    def measured() -> Result:
        timed = measure_geometry(profile, call.budgets[0], sizes, repeats, options, form)
        return timed.model_copy(update={"protocol": protocol, "cache": kind})

    return [kept(call.run.evals, draft, f"speed of {profile.name}", force=options.force, measured=measured)]


def _check_alone(settings: Settings) -> None:
    """Raise `UsageError` for ragged sequences or prompts beside what they are timed instead of."""
    given = [name for name in ("ragged", "packing", "prompts", "whole_model") if getattr(settings, name)]
    if settings.ragged or settings.packing or settings.prompts:
        if not settings.tiles:
            raise UsageError(f"--{given[0]} is of fused tiles", "add --tiles")
        if len(given) > 1:
            names = " and ".join(f"--{name.replace('_', '-')}" for name in given)
            raise UsageError(f"{names} are timed one at a time", "leave out all but one")
    if (settings.packing or settings.prompts) and settings.flash_attention is not None:
        raise UsageError("no FlashAttention-3 is timed beside a prompt", "leave out --flash-attention")


def _library(path: Path | None) -> str | None:
    """A library by its contents; raises `UsageError` where there is none."""
    if path is None:
        return None
    if not path.is_file():
        raise UsageError(f"--flash-attention: no file {path}", "name _vllm_fa3_C.abi3.so of a vLLM")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _place(options: EvalOptions) -> dict[str, Any]:
    """Where a time is measured: it belongs to this very device, and to this many threads; raises `AatcError`."""
    find_device(options.device)
    return {
        "device": device_name(options.device),
        "threads": torch.get_num_threads(),
        "versions": {name: versions()[name] for name in ("aatc", "torch", "transformers")},
    }


def _result(opened: Opened, settings: Settings, subject: Subject) -> Result:
    options, steps = opened.options, subject.recipe.window.flush
    draft = Result(
        **opened.origin(subject),
        cache=cache_kind(subject, options),
        protocol=opened.protocol(context=list(settings.contexts), batch=list(settings.batch), repeats=settings.repeats)
        | _place(options),
        seconds=0.0,
        absolute=options.device.startswith("cuda"),
        threads=torch.get_num_threads(),
        repeats=settings.repeats,
        steps=steps,
        rows=[],
        checks=[],
    )

    def measured() -> Result:
        began = time.perf_counter()
        rows, checks = _timed(opened, settings, subject)
        return draft.model_copy(update={"seconds": time.perf_counter() - began, "rows": rows, "checks": checks})

    return kept(opened.run.evals, draft, f"speed of {subject.name}", force=options.force, measured=measured)


def _timed(opened: Opened, settings: Settings, subject: Subject) -> tuple[list[SpeedRow], list[SpeedCheck]]:
    """Rows of every size and part, and the check that goes before them."""
    model, device = opened.model(), opened.options.device
    assert subject.plan is not None
    session, flush = session_of(subject, model, opened.options), subject.recipe.window.flush
    codecs = subject.plan.codecs(device)
    vocabulary = int(model.config.get_text_config().vocab_size)
    rows: list[SpeedRow] = []
    checks: list[SpeedCheck] = []
    sizes = [(context, batch) for context in settings.contexts for batch in settings.batch]
    with progress(f"eval speed of {subject.name}", len(sizes) * (1 + len(PARTS))) as ticker:
        for context, batch in sizes:
            shape = (batch, context + 1 + flush)
            ids = torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(0))
            bench = Bench(model, plain(model, REFERENCE), session, codecs, ids.to(device), context, settings.repeats)
            checks.append(check_part(bench))
            ticker.advance()
            for part in PARTS:
                rows += part(bench)
                ticker.advance()
    return rows, checks


def head_groups_of(groups: str, kv_heads: int) -> int | None:
    """--groups as a number of head groups: None for heads (fused kernels), 1 for all; raises `UsageError`."""
    if groups == "heads":
        return None
    count = 1 if groups == "all" else int(groups) if groups.isascii() and groups.isdigit() and len(groups) < 9 else 0
    if not count or kv_heads % count:
        raise UsageError(
            f"{kv_heads} kv heads do not make {groups} head groups", "give --groups heads, all, or a divisor"
        )
    return count
