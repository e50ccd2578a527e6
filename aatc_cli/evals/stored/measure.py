"""KL of continuations behind prefixes that went through the codec of stored caches: bytes and back."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from aatc_cli.console import progress
from aatc_cli.core.metrics import mean_and_stderr
from aatc_cli.errors import UsageError
from aatc_cli.evals.keeping import kept
from aatc_cli.evals.opened import Opened
from aatc_cli.evals.stored.passes import Found, compare, through
from aatc_cli.evals.stored.prefill import prefill
from aatc_cli.evals.stored.result import Result
from aatc_cli.evals.stored.settings import Settings
from aatc_cli.evals.subjects import Subject
from aatc_cli.models.adapter import attention_sites
from aatc_cli.models.limits import check_tokens
from aatc_cli.runtime.stored.opening import codec_for, fastest
from aatc_cli.text.windows import Windows, consecutive_windows


def measure(opened: Opened, settings: Settings) -> list[Result]:
    """Every plan on every text, a file each. Raises `UsageError` for a prefix that is not whole chunks."""
    if settings.prefix % settings.chunk:
        raise UsageError(
            f"--prefix {settings.prefix} is not whole chunks of {settings.chunk}", "use a multiple of --chunk"
        )
    length = settings.prefix + settings.tail + settings.continuation
    opened.check_length(length, "--prefix, --tail and --continuation")
    for subject in opened.subjects:
        if subject.plan is None:
            raise UsageError(f"{subject.name} stores nothing in chunks", "name plans by --recipe and --budget")
    found = []
    for text in dict.fromkeys(settings.text):
        windows = consecutive_windows(
            text, opened.tokenizer.encode, length=length, limit=settings.limit or None, bos=opened.tokenizer.bos
        )
        check_tokens(windows.tokens, opened.config)
        for subject in opened.subjects:
            found.append(_kept(opened, settings, windows, subject))
    return found


def _kept(opened: Opened, settings: Settings, windows: Windows, subject: Subject) -> Result:
    draft = _draft(opened, settings, windows, subject)
    what = f"stored of {subject.name} on {draft.text}"
    return kept(
        opened.run.evals,
        draft,
        what,
        force=opened.options.force,
        measured=lambda: _measured(opened, settings, windows, subject, draft),
    )


def _draft(opened: Opened, settings: Settings, windows: Windows, subject: Subject) -> Result:
    record, geometry = windows.records[0], opened.identity.geometry
    asked = settings.model_dump(mode="json", exclude={"text", "limit"})
    return Result(
        **opened.origin(subject),
        protocol=opened.protocol(
            tokens=windows.digest, text=record.sha256, windows=windows.tokens.shape[0], stored=asked
        ),
        seconds=0.0,
        text=record.name,
        text_sha256=record.sha256,
        windows=windows.tokens.shape[0],
        prefix=settings.prefix,
        tail=settings.tail,
        continuation=settings.continuation,
        chunk=settings.chunk,
        ranked=settings.ranked,
        bytes_stored=0.0,
        bytes_raw=4 * geometry.layers * geometry.channels * settings.prefix,
    )


def _measured(opened: Opened, settings: Settings, windows: Windows, subject: Subject, draft: Result) -> Result:
    assert subject.plan is not None
    began, model = time.perf_counter(), opened.model()
    codec = fastest(codec_for(subject.plan, model, tokens=settings.chunk, device=opened.options.device))
    if settings.ranked != "received":
        codec = replace(codec, stand_in=settings.ranked)
    window = subject.recipe.window if settings.ranked == "received" and codec.code.orders else None
    sites, found = attention_sites(model), Found()
    with progress(f"eval stored: {subject.name}", windows.tokens.shape[0]) as ticker:
        for tokens in windows.tokens:
            ids = tokens[None].to(next(model.parameters()).device)
            exact = prefill(model, sites, ids[:, : settings.prefix], window)
            stored = exact.copy()
            through(codec, stored, settings.prefix, found)
            compare(model, ids[:, settings.prefix :], settings.tail, (exact, stored), found)
            ticker.advance()
    mean, stderr = mean_and_stderr([float(kl.mean()) for kl in found.kl])
    every = torch.cat(found.kl).to(torch.float64).sort().values
    size = sum(found.bytes) / len(found.bytes)
    return draft.model_copy(
        update={
            "seconds": time.perf_counter() - began,
            "bytes_stored": size,
            "ratio": draft.bytes_raw / size,
            "kl_mean": mean,
            "kl_stderr": stderr,
            "kl_windows": [float(kl.mean()) for kl in found.kl],
            "kl_p99": float(every[int(0.99 * (every.numel() - 1))]),
            "top1": float(torch.cat(found.agree).to(torch.float64).mean()),
            "encode_seconds": sum(found.encode) / len(found.encode),
            "decode_seconds": sum(found.decode) / len(found.decode),
        }
    )
