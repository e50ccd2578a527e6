"""One text walked through by every subject, every way, batch by batch of windows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from aatc_cli.console import Ticker
from aatc_cli.evals.accumulate.comparing import Compared
from aatc_cli.evals.accumulate.decoding import Draw, Given, decoded
from aatc_cli.evals.accumulate.reading import AtOnce
from aatc_cli.evals.accumulate.result import Result
from aatc_cli.evals.accumulate.settings import Settings, Way
from aatc_cli.evals.accumulate.writing import written
from aatc_cli.evals.caches import session_of
from aatc_cli.evals.opened import Opened
from aatc_cli.evals.subjects import Subject
from aatc_cli.models.placement import input_device
from aatc_cli.runtime.attach import plain
from aatc_cli.runtime.session import Session

# steps whose logits are held until the uncompressed model has read the same tokens
STRETCH = 256


@dataclass
class Ticks:
    """Progress by tokens of every batch of windows."""

    total: int
    ticker: Ticker | None = None

    @classmethod
    def of(cls, opened: Opened, settings: Settings, windows: int, subjects: int) -> Ticks:
        """Of all that these numbers of windows and subjects take."""
        batches = -(-windows // opened.options.batch)
        return cls(batches * settings.tokens * len(settings.way) * subjects)

    def advance(self, name: str, count: int) -> None:
        """Tokens are decoded and compared."""
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

    def results(self, subjects: Sequence[Subject], drafts: Mapping[str, Result]) -> Iterator[tuple[Subject, Result]]:
        """Every subject with its result by name: each when it is done, what caches write themselves before all others.

        Several of them write together, which costs hardly more than one.
        """
        begin = time.perf_counter()
        own = self._own(subjects) if "own" in self.settings.way else {}
        together = (time.perf_counter() - begin) / len(subjects)
        for subject in subjects:
            began, rows = time.perf_counter(), []
            for way in self.settings.way:
                compared = own.pop(subject.name) if way == "own" else self._given(subject, way)
                rows.append(compared.row(way))
            seconds = time.perf_counter() - began + together
            yield subject, drafts[subject.name].model_copy(update={"rows": rows, "seconds": seconds})

    def _own(self, subjects: Sequence[Subject]) -> dict[str, Compared]:
        """What every subject writes with its own cache, by name."""
        model, options = self.opened.model(), self.opened.options
        sessions = [session_of(subject, model, options) for subject in subjects]
        found = {subject.name: Compared() for subject in subjects}
        for start in range(0, self.windows.shape[0], options.batch):
            prompts = self._tokens(start)[:, : self.settings.prompt]
            encode = self.opened.tokenizer.encode
            for made in written(sessions, prompts, self.settings.tokens, self._draw(start), encode, STRETCH):
                for place, stretch in made:
                    name = subjects[place].name
                    found[name].add(model, stretch, name, start)
                    self.ticks.advance(name, stretch.logits.shape[1])
        return found

    def _given(self, subject: Subject, way: Way) -> Compared:
        """A subject along tokens that others have written."""
        compared, model = Compared(), self.opened.model()
        for start in range(0, self.windows.shape[0], self.opened.options.batch):
            tokens = self._text(way, start)
            if self.settings.at_once:
                compared.add(model, self.reading.stretch(subject, tokens), subject.name, start)
                self.ticks.advance(subject.name, self.settings.tokens)
                continue
            session, given = self._session(subject), Given(tokens, self.settings.prompt)
            prompts, encode = tokens[:, : self.settings.prompt], self.opened.tokenizer.encode
            for stretch in decoded(session, prompts, self.settings.tokens, given, encode, STRETCH):
                compared.add(model, stretch, subject.name, start)
                self.ticks.advance(subject.name, stretch.logits.shape[1])
        return compared

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
            for [(_, stretch)] in written([session], prompts, steps, self._draw(start), encode, STRETCH):
                self._written[start] = stretch.tokens
        return self._written[start]
