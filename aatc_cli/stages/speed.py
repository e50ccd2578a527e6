"""eval --task speed: prefill and decode with the packed cache and with the model's own, side by side in one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aatc_cli.artifacts.evaluation import write_evaluation
from aatc_cli.artifacts.plan import Plan
from aatc_cli.artifacts.run import Run
from aatc_cli.config import Window
from aatc_cli.console import progress, say, working
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.layout import HALF_BYTES
from aatc_cli.errors import AatcError, UsageError
from aatc_cli.evals.speed import (
    REFERENCE,
    SpeedCheck,
    SpeedResult,
    SpeedRow,
    alternate,
    check_logits,
    expected_logits,
    speed_row,
)
from aatc_cli.evals.subjects import EvalOptions, Subject, origin_of, require_subjects
from aatc_cli.models.compressed import cache_keyword
from aatc_cli.models.limits import check_length
from aatc_cli.models.loading import ModelSource, identify, load_config, load_model, load_tokenizer
from aatc_cli.runtime.attach import plain, prepare
from aatc_cli.runtime.session import Session

# name of the cache that is measured, by what computes its attention
BACKEND = "torch"


@dataclass(frozen=True)
class SpeedSettings:
    """Sizes that are measured, and how often each."""

    contexts: tuple[int, ...] = (2048,)
    batches: tuple[int, ...] = (1,)
    repeats: int = 5


def measure_speed(
    run: Run, source: ModelSource, subjects: Sequence[Subject], settings: SpeedSettings, options: EvalOptions
) -> list[SpeedResult]:
    """Time every plan against the model's own cache at every context and batch, and write one file each.

    Raises `UsageError` for a subject without a plan, `AatcError` for a context the model does not have or when the
    first decoded logits are not those expected: then nothing is written of that plan.
    """
    for subject in subjects:
        if subject.plan is None:
            raise UsageError(f"{subject.name} is what every plan is timed against", "name a plan by --recipe, --budget")
    with working(f"opening {source.name}"):
        config, tokenizer = load_config(source), load_tokenizer(source)
    identity = identify(source, config, tokenizer)
    require_subjects(identity, subjects)
    for subject in subjects:
        room = 1 + (settings.repeats + 1) * subject.recipe.window.flush
        check_length(max(settings.contexts) + room, config, "--context")
    with working(f"loading {source.name}"):
        model = load_model(source, device=options.device, dtype=options.dtype)
    results = []
    for subject in subjects:
        assert subject.plan is not None
        began = time.perf_counter()
        rows, checks = _measure(model, subject, subject.plan, settings, options.device)
        result = SpeedResult(
            **origin_of(subject, identity, options),
            seconds=time.perf_counter() - began,
            absolute=options.device.startswith("cuda"),
            threads=torch.get_num_threads(),
            repeats=settings.repeats,
            steps=subject.recipe.window.flush,
            rows=rows,
            checks=checks,
        )
        say(f"eval: speed of {subject.name} -> {write_evaluation(run.evals, result)}")
        results.append(result)
    return results


@dataclass
class Bench:
    """One plan's cache and the model's own at one context and batch. ids [B, context + 1 + steps] are random tokens."""

    model: Any
    plain: Session
    packed: Session
    codecs: list[dict[Any, TransformCodec]]
    ids: Tensor
    context: int
    repeats: int

    @property
    def steps(self) -> int:
        """Tokens decoded in one repeat."""
        return self.window.flush

    @property
    def window(self) -> Window:
        """The plan's window."""
        assert self.packed.spec is not None
        return self.packed.spec.window

    @property
    def batch(self) -> int:
        """Sequences."""
        return int(self.ids.shape[0])

    @torch.no_grad()
    def forward(self, cache: Any, tokens: Tensor) -> Tensor:
        """Logits [B, V] behind ``tokens`` [B, n], which enter the cache."""
        keyword = {cache_keyword(self.model): cache}
        found: Tensor = self.model(input_ids=tokens, use_cache=True, logits_to_keep=1, **keyword).logits[:, -1]
        return found

    def timed(self, session: Session, work: Callable[[], object]) -> float:
        """Seconds of ``work`` with the model attached to the session's caches."""
        with session.attached():
            self._wait()
            began = time.perf_counter()
            work()
            self._wait()
            return time.perf_counter() - began

    def filled(self, session: Session) -> Any:
        """A cache of the session that holds the prompt."""
        cache = session.new_cache()
        with session.attached():
            self.forward(cache, self.ids[:, : self.context])
        return cache

    def _wait(self) -> None:
        if self.ids.device.type == "cuda":
            torch.cuda.synchronize(self.ids.device)


Part = Callable[[Bench], list[SpeedRow]]


def prefill_part(bench: Bench) -> list[SpeedRow]:
    """A whole prompt in one forward pass, into an empty cache."""

    def once(session: Session) -> Callable[[], float]:
        return lambda: bench.timed(session, lambda: bench.forward(session.new_cache(), bench.ids[:, : bench.context]))

    theirs, ours = alternate([once(bench.plain), once(bench.packed)], bench.repeats)
    return [
        speed_row("prefill", bench.context, bench.batch, name, seconds, theirs)
        for name, seconds in ((REFERENCE, theirs), (BACKEND, ours))
    ]


def decode_part(bench: Bench) -> list[SpeedRow]:
    """One token after another behind the prompt, a flush block in each repeat; times are per token."""
    steps, tokens = bench.steps, bench.ids[:, bench.context + 1 :]

    caches = {session.name: bench.filled(session) for session in (bench.plain, bench.packed)}
    layout, size = bench.packed.layout, bench.packed.watch.dtype.itemsize
    assert layout is not None
    moved = {
        REFERENCE: layout.reference_bytes(bench.context, bench.batch) * size // HALF_BYTES,
        BACKEND: bench.packed.bytes_live(caches[bench.packed.name]),
    }

    def once(session: Session) -> Callable[[], float]:
        cache = caches[session.name]

        def work() -> None:
            for place in range(steps):
                bench.forward(cache, tokens[:, place : place + 1])

        return lambda: bench.timed(session, work) / steps

    # the first repeat warms up
    theirs, ours = (found[1:] for found in alternate([once(bench.plain), once(bench.packed)], bench.repeats + 1))
    return [
        speed_row("decode", bench.context, bench.batch, name, seconds, theirs, moved[name])
        for name, seconds in ((REFERENCE, theirs), (BACKEND, ours))
    ]


PARTS: tuple[Part, ...] = (prefill_part, decode_part)


def check_part(bench: Bench) -> SpeedCheck:
    """The first decoded logits against one pass over reconstructed tokens; raises `AatcError`."""
    tokens, caches = bench.ids[:, : bench.context + 1], []
    for session in (bench.plain, bench.packed):
        cache = bench.filled(session)
        with session.attached():
            caches.append(bench.forward(cache, tokens[:, -1:]))
    exact, got = caches
    expected = expected_logits(bench.model, bench.codecs, bench.window, tokens)
    error, bound = check_logits(got, expected, exact)
    if not error <= bound:
        raise AatcError(
            f"{bench.packed.name}: the first decoded logits at {bench.context} tokens are {error:.3g} from those "
            f"expected, more than {bound:.3g}; no time is reported",
            "run with --dtype float32 to see whether it is rounding",
        )
    return SpeedCheck(context=bench.context, batch=bench.batch, backend=BACKEND, error=error, bound=bound)


def _measure(
    model: Any, subject: Subject, plan: Plan, settings: SpeedSettings, device: str
) -> tuple[list[SpeedRow], list[SpeedCheck]]:
    codecs = plan.codecs(device)
    session, flush = prepare(model, plan, "packed"), subject.recipe.window.flush
    vocabulary = int(model.config.get_text_config().vocab_size)
    rows: list[SpeedRow] = []
    checks: list[SpeedCheck] = []
    sizes = [(context, batch) for context in settings.contexts for batch in settings.batches]
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
