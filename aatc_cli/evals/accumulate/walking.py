"""One text walked through by every subject, every way, batch by batch of windows."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from aatc_cli.console import Ticker
from aatc_cli.evals.accumulate.comparing import Compared
from aatc_cli.evals.accumulate.decoding import Choose, Draw, Given, decoded
from aatc_cli.evals.accumulate.reading import AtOnce
from aatc_cli.evals.accumulate.result import Result
from aatc_cli.evals.accumulate.settings import Settings, Way
from aatc_cli.evals.caches import session_of
from aatc_cli.evals.opened import Opened
from aatc_cli.evals.subjects import Subject
from aatc_cli.models.placement import input_device
from aatc_cli.runtime.attach import plain
from aatc_cli.runtime.session import Session

# steps whose logits are held until the uncompressed model has read the same tokens
STRETCH = 128


@dataclass
class Ticks:
    """Progress by stretches of decoding."""

    total: int
    ticker: Ticker | None = None

    @classmethod
    def of(cls, opened: Opened, settings: Settings, windows: int, subjects: int) -> Ticks:
        """Of all that these numbers of windows and subjects take."""
        batches = -(-windows // opened.options.batch)
        return cls(batches * -(-settings.tokens // STRETCH) * len(settings.way) * subjects)

    def advance(self, name: str, count: int = 1) -> None:
        """Stretches are done."""
        if self.ticker is not None:
            self.ticker.advance(count, text=f"eval accumulate: {name}")


@dataclass
class Walk:
    """The model of a call on the windows [n, prompt + steps + 1] of one text."""

    opened: Opened
    settings: Settings
    windows: Tensor
    ticks: Ticks
    _written: dict[int, Tensor] | None = None
    _latest: tuple[str, Session] | None = None

    @cached_property
    def reading(self) -> AtOnce:
        """Reads what is given in one pass."""
        return AtOnce(self.opened, self.settings.prompt)

    def result(self, subject: Subject, draft: Result) -> Result:
        """One subject, every way."""
        began, rows = time.perf_counter(), []
        for way in self.settings.way:
            compared = Compared()
            for start in range(0, self.windows.shape[0], self.opened.options.batch):
                self._batch(subject, way, start, compared)
            rows.append(compared.row(way))
        return draft.model_copy(update={"rows": rows, "seconds": time.perf_counter() - began})

    def _batch(self, subject: Subject, way: Way, start: int, compared: Compared) -> None:
        model = self.opened.model()
        if self.settings.at_once and way != "own":
            compared.add(model, self.reading.stretch(subject, self._text(way, start)), subject.name, start)
            self.ticks.advance(subject.name, -(-self.settings.tokens // STRETCH))
            return
        prompts, steps = self._tokens(start)[:, : self.settings.prompt], self.settings.tokens
        choose: Choose = self._draw(start) if way == "own" else Given(self._text(way, start), self.settings.prompt)
        session = self._session(subject)
        for stretch in decoded(session, prompts, steps, choose, self.opened.tokenizer.encode, STRETCH):
            compared.add(model, stretch, subject.name, start)
            self.ticks.advance(subject.name)

    def _session(self, subject: Subject) -> Session:
        """Of one subject at a time: its codecs are placed once for all ways and batches."""
        if self._latest is None or self._latest[0] != subject.name:
            self._latest = subject.name, session_of(subject, self.opened.model(), self.opened.options)
        return self._latest[1]

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
            for stretch in decoded(session, prompts, steps, self._draw(start), encode, STRETCH):
                self._written[start] = stretch.tokens
        return self._written[start]
