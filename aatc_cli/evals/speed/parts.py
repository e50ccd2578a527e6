"""The parts of a decode that are timed, with a plan's cache and with the model's own, and the check before them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from aatc_cli.config import Window
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.layout import HALF_BYTES
from aatc_cli.errors import AatcError
from aatc_cli.evals.bench.model_steps import InPlaceState, decode_timing
from aatc_cli.evals.speed.expected import check_logits, expected_logits
from aatc_cli.evals.speed.result import REFERENCE, SpeedCheck, SpeedRow
from aatc_cli.evals.speed.timing import alternate, speed_row
from aatc_cli.models.adapter import geometry_of
from aatc_cli.models.compressed import cache_keyword
from aatc_cli.runtime.fused_tiles.ragged import RaggedDecoder, has_shared_step
from aatc_cli.runtime.session import Session

# names of the caches that are measured, by what computes their attention
_BACKENDS = {"packed": "torch", "fused": "fused"}
# steps that are captured once, as a service decodes: of a fused cache of tiles, and of the model's own tensors in place
CAPTURED, OWN_CAPTURED = "fused, captured", "uncompressed, captured"


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
    def backend(self) -> str:
        """What computes the attention of the plan's cache."""
        return _BACKENDS[self.packed.kind]

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
            self.wait()
            began = time.perf_counter()
            work()
            self.wait()
            return time.perf_counter() - began

    def filled(self, session: Session) -> Any:
        """A cache of the session that holds the prompt."""
        cache = session.new_cache()
        with session.attached():
            self.forward(cache, self.ids[:, : self.context])
        return cache

    def wait(self) -> None:
        """Until the device has done what it was given."""
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
        for name, seconds in ((REFERENCE, theirs), (bench.backend, ours))
    ]


def decode_part(bench: Bench) -> list[SpeedRow]:
    """One token after another behind the prompt, a flush block in each repeat; times are per token."""
    steps, tokens = bench.steps, bench.ids[:, bench.context + 1 :]

    caches = {session.name: bench.filled(session) for session in (bench.plain, bench.packed)}
    layout, size = bench.packed.layout, bench.packed.watch.dtype.itemsize
    assert layout is not None
    moved = {
        REFERENCE: layout.reference_bytes(bench.context, bench.batch) * size // HALF_BYTES,
        bench.backend: bench.packed.bytes_live(caches[bench.packed.name]),
    }

    def once(session: Session) -> Callable[[], float]:
        cache = caches[session.name]

        def work() -> None:
            for place in range(steps):
                bench.forward(cache, tokens[:, place : place + 1])

        return lambda: bench.timed(session, work) / steps

    # the first repeat warms up
    theirs, ours = (found[1:] for found in alternate([once(bench.plain), once(bench.packed)], bench.repeats + 1))
    timed = [(REFERENCE, theirs), (bench.backend, ours)]
    if has_shared_step(bench.packed):
        moved |= {CAPTURED: moved[bench.backend], OWN_CAPTURED: moved[REFERENCE]}
        timed += [(OWN_CAPTURED, own) for own in own_captured_seconds(bench)]
        timed.append((CAPTURED, captured_seconds(bench)))
    return [
        speed_row("decode", bench.context, bench.batch, name, seconds, theirs, moved[name]) for name, seconds in timed
    ]


def captured_seconds(bench: Bench) -> list[float]:
    """Seconds a token of every repeat by the step that is captured once, packing of tiles between steps included."""
    cache, found = bench.filled(bench.packed), []
    with bench.packed.attached():
        decoder = RaggedDecoder(bench.packed, bench.batch, bench.context + bench.steps * (bench.repeats + 1))
        decoder.start(cache, bench.ids[:, bench.context])
        for _ in range(bench.repeats + 1):
            bench.wait()
            began = time.perf_counter()
            for _ in range(bench.steps):
                decoder.step()
            bench.wait()
            found.append((time.perf_counter() - began) / bench.steps)
    return found[1:]


def own_captured_seconds(bench: Bench) -> list[list[float]]:
    """The same of an uncompressed cache in place that stays as long as it is, by the faster of flash and cuDNN.

    Its contents are random. None where torch has neither for the model: in 32 bits, or with sliding windows.
    """
    geometry, like = geometry_of(bench.model.config), torch.empty(0, dtype=bench.model.dtype, device=bench.ids.device)
    if geometry.sliding_layers or like.dtype.itemsize > HALF_BYTES:
        return []
    state = InPlaceState(geometry, bench.batch, bench.context + 1, SDPBackend.FLASH_ATTENTION, like)
    found = []
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        state.backend = backend
        try:
            found.append(decode_timing(bench.model, state, bench.batch, bench.repeats).seconds)
        except RuntimeError:
            continue  # this build of torch has no such kernel for these heads
    return [min(found, key=median)] if found else []


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
    return SpeedCheck(context=bench.context, batch=bench.batch, backend=bench.backend, error=error, bound=bound)
