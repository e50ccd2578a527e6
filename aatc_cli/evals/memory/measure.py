"""Memory of a cache that is filled with random tokens, beside the model's own: live bytes, predicted ones, peaks."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aatc_cli.console import progress
from aatc_cli.evals.caches import cache_kind, require_stored, session_of
from aatc_cli.evals.call import Call
from aatc_cli.evals.keeping import kept
from aatc_cli.evals.memory.geometry import measure_geometry
from aatc_cli.evals.memory.peak import Peak, storage_bytes
from aatc_cli.evals.memory.result import MemoryRow, Result
from aatc_cli.evals.memory.settings import Settings
from aatc_cli.evals.opened import Opened
from aatc_cli.evals.subjects import Subject
from aatc_cli.models.compressed import cache_keyword
from aatc_cli.runtime.attach import plain
from aatc_cli.runtime.session import Session


def measure(opened: Opened, settings: Settings) -> list[Result]:
    """Fill every plan's cache, and the model's own, with random tokens at every size, and write one file per plan.

    Raises `UsageError` for a subject without a plan, `AatcError` for a context that the model does not have.
    """
    require_stored(opened.subjects, opened.options, "stands beside every plan already")
    opened.check_length(max(settings.context), "--context")
    references: dict[tuple[int, int], _Use] = {}
    return [_result(opened, settings, subject, references) for subject in opened.subjects]


def measure_profile(call: Call, settings: Settings) -> list[Result]:
    """The same of a profile's geometry alone; raises as `measure_geometry` does."""
    return measure_geometry(call, settings)


def _result(opened: Opened, settings: Settings, subject: Subject, references: dict[tuple[int, int], _Use]) -> Result:
    options = opened.options
    draft = Result(
        **opened.origin(subject),
        cache=cache_kind(subject, options),
        protocol=opened.protocol(context=list(settings.context), batch=list(settings.batch)),
        seconds=0.0,
        synthetic=False,
        rows=[],
    )

    def measured() -> Result:
        model, began, rows = opened.model(), time.perf_counter(), []
        for size in settings.sizes:
            if size not in references:
                references[size] = _reference(model, size, options.device)
        session = session_of(subject, model, options)
        with progress(f"eval memory of {subject.name}", len(settings.sizes)) as ticker:
            for size in settings.sizes:
                rows.append(_row(session, size, options.device, references[size]))
                ticker.advance()
        return draft.model_copy(update={"seconds": time.perf_counter() - began, "rows": rows})

    return kept(opened.run.evals, draft, f"memory of {subject.name}", force=options.force, measured=measured)


@dataclass(frozen=True)
class _Use:
    """Memory of a run of the model: in use before, the most in use over all of it, the most over the last token."""

    base: int | None
    peak: int | None
    peak_decode: int | None


@torch.no_grad()
def _filled(session: Session, size: tuple[int, int], device: str) -> tuple[Any, _Use]:
    """A cache with ``size`` (context, batch) random tokens, the last of them decoded, and what that took."""
    context, batch = size
    model: Any = session.model
    vocabulary = int(model.config.get_text_config().vocab_size)
    ids = torch.randint(vocabulary, (batch, context), generator=torch.Generator().manual_seed(0)).to(device)
    peak = Peak(device)
    base = peak.restart()
    # of a fused cache no more than these tokens need, where it would grow with room to spare
    cache = session.new_cache(context if session.kind == "fused" else None)

    def forward(tokens: Tensor) -> int | None:
        keyword = {cache_keyword(model): cache}
        with session.attached():
            model(input_ids=tokens, use_cache=True, logits_to_keep=1, **keyword)
        return peak.read()

    prefill = forward(ids[:, :-1]) if context > 1 else base
    peak.restart()
    decode = forward(ids[:, -1:])
    known = [value for value in (prefill, decode) if value is not None]
    return cache, _Use(base, max(known, default=None), decode)


def _reference(model: Any, size: tuple[int, int], device: str) -> _Use:
    _, use = _filled(plain(model), size, device)
    return use


def _row(session: Session, size: tuple[int, int], device: str, reference: _Use) -> MemoryRow:
    cache, use = _filled(session, size, device)
    state = cache.state
    # the contents of a fused cache are less than what is allocated for it
    live = session.bytes_live(cache) if session.kind == "fused" else storage_bytes(state.tensors().values())
    assert session.layout is not None
    half = session.layout.reference_bytes(*size)
    return MemoryRow(
        context=size[0],
        batch=size[1],
        bytes_live=live,
        bytes_predicted=state.bytes_predicted(),
        bytes_fp16=half,
        ratio=half / live,
        base_bytes=use.base,
        peak_bytes=use.peak,
        peak_decode_bytes=use.peak_decode,
        base_bytes_reference=reference.base,
        peak_bytes_reference=reference.peak,
        peak_decode_bytes_reference=reference.peak_decode,
    )
