"""Accumulate: tokens decoded one by one with a live cache, beside the uncompressed model over the same tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from aatc_cli.artifacts.evaluation import write_evaluation
from aatc_cli.console import Ticker, progress, say
from aatc_cli.evals.accumulate.comparing import Compared
from aatc_cli.evals.accumulate.decoding import Choose, Draw, decoded
from aatc_cli.evals.accumulate.result import Result
from aatc_cli.evals.accumulate.settings import Settings, Way
from aatc_cli.evals.caches import cache_kind, session_of
from aatc_cli.evals.keeping import already
from aatc_cli.evals.opened import Opened
from aatc_cli.evals.subjects import Subject
from aatc_cli.evals.windows.frame import check_packed
from aatc_cli.evals.windows.seen import seen_share
from aatc_cli.models.limits import check_tokens
from aatc_cli.models.placement import input_device
from aatc_cli.runtime.attach import plain
from aatc_cli.runtime.session import Session
from aatc_cli.text.windows import Windows, consecutive_windows

# steps whose logits are held until the uncompressed model has read the same tokens
_STRETCH = 128


def measure(opened: Opened, settings: Settings) -> list[Result]:
    """Every subject on every text, each written when its text is done.

    Raises `AatcError` for more tokens than the model has positions, or for so few that a plan keeps them exact.
    """
    opened.check_length(settings.length, "--tokens")
    for subject in opened.subjects:
        check_packed(subject, settings.length, "--tokens")
    return [result for text in dict.fromkeys(settings.text) for result in _on_text(opened, settings, text)]


def _on_text(opened: Opened, settings: Settings, text: str) -> list[Result]:
    tokenizer, limit = opened.tokenizer, settings.limit or None
    windows = consecutive_windows(text, tokenizer.encode, length=settings.length, limit=limit, bos=tokenizer.bos)
    check_tokens(windows.tokens, opened.config)
    drafts = {subject.name: _draft(opened, settings, windows, subject) for subject in opened.subjects}
    force = opened.options.force
    found = {name: already(opened.run.evals, draft, force=force) for name, draft in drafts.items()}
    missing = [subject for subject in opened.subjects if found[subject.name] is None]
    for subject in opened.subjects:
        if subject not in missing:
            say(f"eval: accumulate of {subject.name} on {drafts[subject.name].text} is there already, nothing to do")
    if missing:
        walk = _Walk(opened, settings, windows.tokens, _Ticks.of(opened, settings, windows, missing))
        with progress("eval accumulate", walk.ticks.total) as ticker:
            walk.ticks.ticker = ticker
            for subject in missing:
                result = walk.result(subject, drafts[subject.name])
                path = write_evaluation(opened.run.evals, result)
                say(f"eval: accumulate of {subject.name} on {result.text} -> {path}")
                found[subject.name] = result
    return [result for result in found.values() if result is not None]


def _draft(opened: Opened, settings: Settings, windows: Windows, subject: Subject) -> Result:
    """The result before anything is decoded."""
    record, kind = windows.records[0], cache_kind(subject, opened.options)
    share = seen_share(subject.plan, windows, opened.tokenizer.bos) if subject.plan is not None else None
    if share:
        say(f"eval: {share:.0%} of {record.name} is calibration text of {subject.name}: its figures flatter it")
    return Result(
        **opened.origin(subject),
        cache=kind,
        simulated=kind == "simulated",
        protocol=opened.protocol(
            tokens=windows.digest,
            text=record.sha256,
            windows=windows.tokens.shape[0],
            prompt=settings.prompt,
            decoded=settings.tokens,
            ways=list(settings.way),
            temperature=settings.temperature,
            seed=settings.seed,
        ),
        seconds=0.0,
        text=record.name,
        text_sha256=record.sha256,
        windows=windows.tokens.shape[0],
        prompt=settings.prompt,
        decoded=settings.tokens,
        calibration_share=share,
    )


@dataclass
class _Ticks:
    """Progress by stretches of decoding."""

    total: int
    ticker: Ticker | None = None

    @classmethod
    def of(cls, opened: Opened, settings: Settings, windows: Windows, subjects: Sequence[Subject]) -> _Ticks:
        batches = -(-windows.tokens.shape[0] // opened.options.batch)
        return cls(batches * -(-settings.tokens // _STRETCH) * len(settings.way) * len(subjects))

    def advance(self, name: str) -> None:
        if self.ticker is not None:
            self.ticker.advance(text=f"eval accumulate: {name}")


@dataclass
class _Walk:
    """The model of a call on the windows [n, prompt + steps + 1] of one text."""

    opened: Opened
    settings: Settings
    windows: Tensor
    ticks: _Ticks
    _written: dict[int, Tensor] | None = None

    def result(self, subject: Subject, draft: Result) -> Result:
        """One subject, every way."""
        session = session_of(subject, self.opened.model(), self.opened.options)
        began, rows = time.perf_counter(), []
        for way in self.settings.way:
            compared = Compared()
            for start in range(0, self.windows.shape[0], self.opened.options.batch):
                self._batch(session, way, start, compared)
            rows.append(compared.row(way))
        return draft.model_copy(update={"rows": rows, "seconds": time.perf_counter() - began})

    def _batch(self, session: Session, way: Way, start: int, compared: Compared) -> None:
        tokens = self._tokens(start)
        prompts, steps = tokens[:, : self.settings.prompt], self.settings.tokens
        choose = self._draw(start) if way == "own" else _forced(self._text(way, start), self.settings.prompt)
        for stretch in decoded(session, prompts, steps, choose, self.opened.tokenizer.encode, _STRETCH):
            compared.add(self.opened.model(), stretch, session.name, start)
            self.ticks.advance(session.name)

    def _tokens(self, start: int) -> Tensor:
        rows = self.windows[start : start + self.opened.options.batch]
        return rows.to(input_device(self.opened.model()))

    def _draw(self, start: int) -> Draw:
        numbers = range(start, min(start + self.opened.options.batch, self.windows.shape[0]))
        return Draw.of(self.settings.seed, numbers, self.settings.tokens + 1, self.settings.temperature)

    def _text(self, way: Way, start: int) -> Tensor:
        """The tokens [B, prompt + steps + 1] that a cache is to be fed: of the text, or of the uncompressed model."""
        tokens = self._tokens(start)
        if way == "text":
            return tokens
        self._written = self._written or {}
        if start not in self._written:
            session, prompts = plain(self.opened.model(), "uncompressed"), tokens[:, : self.settings.prompt]
            steps, encode = self.settings.tokens, self.opened.tokenizer.encode
            for stretch in decoded(session, prompts, steps, self._draw(start), encode, _STRETCH):
                self._written[start] = stretch.tokens
        return self._written[start]


def _forced(tokens: Tensor, prompt: int) -> Choose:
    """The tokens that are there already."""
    return lambda step, logits: tokens[:, prompt + step]
