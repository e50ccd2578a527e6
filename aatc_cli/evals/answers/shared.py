"""Answers of a batch of prompts of any lengths by one step that is captured once, over a fused cache of tiles."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from aatc_cli.runtime.fused_tiles.ragged import RaggedDecoder
from aatc_cli.runtime.session import Session


class SharedSteps:
    """A subject's session whose answers share a step (`RaggedDecoder`), which is kept from batch to batch."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.decoder: RaggedDecoder | None = None

    @property
    def name(self) -> str:
        """Name in results."""
        return self.session.name

    def attached(self) -> AbstractContextManager[Any]:
        """Bring the model's attention to the session's caches."""
        return self.session.attached()

    def continued(
        self, logits: Tensor, cache: Any, limit: int, ends: frozenset[int], finished: Callable[[int, list[int]], bool]
    ) -> list[list[int]]:
        """At most ``limit`` greedy tokens behind each prompt of a filled ``cache``, as `generation.generate` has it."""
        tokens = logits.argmax(-1)
        texts: list[list[int]] = [[] for _ in range(len(tokens))]
        longest = max(group.length for group in cache.state.groups)
        decoder = self._decoder(len(tokens), longest + limit)
        live = dict(enumerate(decoder.start(cache, tokens)))
        chosen = {live[place]: token for place, token in enumerate(tokens.tolist())}
        try:
            for count in range(1, limit + 1):
                for place, row in list(live.items()):
                    ended = chosen[row] in ends
                    if not ended:
                        texts[place].append(chosen[row])
                    if ended or finished(place, texts[place]):
                        decoder.end(live.pop(place))
                if not live or count == limit:
                    break
                chosen = dict(enumerate(decoder.step().tolist()))
        finally:
            for row in live.values():
                decoder.end(row)
        return texts

    def _decoder(self, rows: int, room: int) -> RaggedDecoder:
        """The step of before where it is large enough, else a larger one."""
        if self.decoder is None or rows > len(self.decoder.lengths) or room > self.decoder.room:
            had = self.decoder
            self.decoder = None
            self.decoder = RaggedDecoder(
                self.session, max(rows, len(had.lengths) if had else 0), max(room, had.room if had else 0)
            )
        return self.decoder
