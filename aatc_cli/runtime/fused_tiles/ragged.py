"""Greedy decoding of sequences that begin and end as they like, one replayed step over a shared pool of tiles.

Rows of the step have sequences of any lengths: tokens, tiles and pages of each are on the device, and a step is the
same whatever they are. A row without a sequence decodes a token that nobody looks at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aatc_cli.core import SIDES
from aatc_cli.core.tile_sizes import TILE
from aatc_cli.errors import AatcError
from aatc_cli.models.compressed import HostedCache
from aatc_cli.runtime.batch import Group
from aatc_cli.runtime.captured import CapturedStep
from aatc_cli.runtime.fused_tiles.buffers import SlotRows, SlotSums
from aatc_cli.runtime.fused_tiles.form import FusedTilesForm
from aatc_cli.runtime.fused_tiles.pool import SharedPages, TilePool
from aatc_cli.runtime.fused_tiles.shared import FusedTilesShared
from aatc_cli.runtime.fused_tiles.store import FusedTileStore
from aatc_cli.runtime.session import Session
from aatc_cli.runtime.state import CompressedState


class RaggedShared(FusedTilesShared):
    """Counters of sequences of different lengths; ``alive`` int32 [b] is one where a row has a sequence.

    pages int32 [b, most]: the page of every tile. A row without a sequence has one token behind the sinks, always.
    """

    def __init__(self, form: FusedTilesForm, batch: int, most: int) -> None:
        super().__init__(form, batch)
        self.alive = torch.zeros_like(self.tokens)
        self.pages = torch.zeros(batch, most, dtype=torch.int32, device=self.tokens.device)
        self.tokens.fill_(form.window.sinks + 1)
        self.move(-1, -1, most, 0)
        self.steady = True

    def move(self, tokens: int, tiles: int, capacity: int, offset: int) -> None:
        """Make the angles; counters are those of single sequences."""
        self.state = (tokens, tiles)
        super().move(tokens, tiles, capacity, offset)

    def write(self, place: int, exact: SlotRows, received: SlotSums, keys: Tensor, values: Tensor) -> None:
        """Write the row [B, 1, C] of the next token of every sequence where the device counts it to be."""
        sinks = self.form.window.sinks
        if place == 0:
            self.tokens += self.alive
            self.begin(self.tokens)
        at = self.slot[:, None, None]
        exact.keys[:, sinks:].scatter_(1, at.expand(-1, 1, keys.shape[2]), keys)
        exact.values[:, sinks:].scatter_(1, at.expand(-1, 1, values.shape[2]), values)
        received.held.scatter_(2, at.expand(-1, received.held.shape[1], 1), 0.0)


class RaggedDecoder:
    """Decode steps of at most ``rows`` sequences of at most ``room`` tokens, over a pool of ``pages`` tiles.

    Made inside the block of ``session``, whose caches are fused ones of tiles; on a GPU the step is captured once,
    before any sequence begins. Raises `AatcError` for other sessions.
    """

    def __init__(self, session: Session, rows: int, room: int, pages: int | None = None) -> None:
        self.form = _form_of(session)
        window, device = self.form.window, self.form.frequencies.device
        most = max(-(-room // TILE), 1)
        self.shared = RaggedShared(self.form, rows, most)
        sizes = [fused.layer.held.nbytes for fused in self.form.layers]
        self.pool = TilePool(sizes, rows * most if pages is None else pages, device)
        self.stores = [FusedTileStore(self.shared, place, rows, None) for place in range(len(sizes))]
        for store, data in zip(self.stores, self.pool.data, strict=True):
            store.pages = SharedPages(data, self.shared.pages)
            # no prompt comes through this step, whatever has been fed
            store.tokens = self.form.window.sinks + 1
        self.room, self.window = room, window
        self.lengths = [0] * rows
        self.tiles: list[list[int]] = [[] for _ in range(rows)]
        self.tokens = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        self.positions = torch.full_like(self.tokens, window.sinks)
        kwargs = {session.keyword: _cache(session, self.stores, rows), "use_cache": True, "logits_to_keep": 1}
        alive = self.shared.alive[:, None]
        self.decoding = CapturedStep(session.model, kwargs, self.tokens, self.positions, alive)
        if device.type == "cuda":
            self.decoding.capture()

    @property
    def logits(self) -> Tensor | None:
        """Of the latest step, [b, V]."""
        return self.decoding.logits

    @property
    def free(self) -> list[int]:
        """Rows without a sequence."""
        return [row for row, length in enumerate(self.lengths) if not length]

    def start(self, cache: HostedCache, tokens: Tensor) -> list[int]:
        """Go on from the sequences of a filled ``cache`` of the session, with the ``tokens`` [b] behind them.

        -> the row of each. Prompts of a left-padded batch have lengths of their own. Raises `AatcError` where there
        are not as many free rows or pages, or a prompt is not longer than the sinks.
        """
        state: Any = cache.state
        free, needed = self.free, sum(len(group.rows) for group in state.groups)
        if needed > len(free):
            raise AatcError(f"{needed} sequences do not fit into {len(free)} free rows", "end a sequence first")
        for group in state.groups:
            if group.offset or group.length <= self.window.sinks or group.length > self.room:
                problem = f"a sequence of {group.length} tokens from position {group.offset} on cannot be gone on from"
                raise AatcError(problem, f"begin at 0 and have {self.window.sinks + 1} to {self.room} tokens")
        rows = free[:needed]
        for group in state.groups:
            for place, index in enumerate(group.rows):
                self._take(rows[index], group, place)
                self.tokens[rows[index], 0] = tokens[index]
        return rows

    def end(self, row: int) -> None:
        """The sequence of ``row`` is over: its pages are free again."""
        self.pool.give(self.tiles[row])
        self.tiles[row], self.lengths[row] = [], 0
        self._tell(row, self.window.sinks + 1, alive=0)

    def step(self) -> Tensor:
        """Feed the current tokens and choose the next, [b]; they are the step's own buffer, fed by the next one."""
        live = [row for row, length in enumerate(self.lengths) if length]
        if longest := [row for row in live if self.lengths[row] >= self.room]:
            raise AatcError(f"row {longest[0]} has {self.room} tokens, all there is room for", "end it")
        self._make_way(live)
        self.decoding.run()
        for row in live:
            self.lengths[row] += 1
        return self.tokens[:, 0]

    def _take(self, row: int, group: Group, place: int) -> None:
        """Copy one sequence of a filled cache into a row."""
        first: Any = group.stores[0]
        count = int(first.pages.count)
        pages = self.pool.take(count)
        index = torch.tensor(pages, dtype=torch.int64, device=self.tokens.device)
        for mine, store, data in zip(self.stores, group.stores, self.pool.data, strict=True):
            theirs: Any = store
            mine.exact.keys[row], mine.exact.values[row] = theirs.exact.keys[place], theirs.exact.values[place]
            mine.received.held[row] = theirs.received.held[place]
            data.index_copy_(0, index, theirs.pages.data[place, :count])
        self.shared.pages[row, :count] = index.to(torch.int32)
        self.tiles[row], self.lengths[row] = pages, group.length
        self._tell(row, group.length, alive=1)

    def _tell(self, row: int, tokens: int, *, alive: int) -> None:
        """Bring what the device counts of a row to what is known of it here."""
        self.shared.tokens[row], self.shared.alive[row] = tokens, alive
        self.shared.tiles[row] = len(self.tiles[row])
        self.positions[row, 0] = tokens

    def _make_way(self, live: Sequence[int]) -> None:
        """Pack the oldest tile of every sequence whose next token would be written over one that is not packed."""
        kept = self.window.sinks + self.window.recent
        full = [row for row in live if self.lengths[row] - TILE * len(self.tiles[row]) >= kept]
        for done in sorted({len(self.tiles[row]) for row in full}):
            self._flush([row for row in full if len(self.tiles[row]) == done], done)

    def _flush(self, rows: Sequence[int], done: int) -> None:
        pages, device = self.pool.take(len(rows)), self.tokens.device
        index, places = (torch.tensor(part, dtype=torch.int64, device=device) for part in (rows, pages))
        slots = (TILE * done + torch.arange(TILE, device=device)) % self.window.recent
        for store, data in zip(self.stores, self.pool.data, strict=True):
            held = store.exact.keys, store.exact.values
            oldest = {
                side: part.index_select(0, index).index_select(1, self.window.sinks + slots)
                for side, part in zip(SIDES, held, strict=True)
            }
            known = store.received.held.index_select(0, index).index_select(2, slots)
            data.index_copy_(0, places, store.layer.encode(oldest, known, TILE * done)[:, 0])
        self.shared.pages[index, done] = places.to(torch.int32)
        self.shared.tiles[index] += 1
        for row, page in zip(rows, pages, strict=True):
            self.tiles[row].append(page)


def has_shared_step(session: Session) -> bool:
    """Whether sequences of a session's caches can share a step."""
    try:
        _form_of(session)
    except AatcError:
        return False
    return True


def _form_of(session: Session) -> FusedTilesForm:
    """The form of a session's caches; raises `AatcError` for one that has no ragged step."""
    spec = session.spec
    form = None if spec is None else spec.form
    if not isinstance(form, FusedTilesForm) or form.layers[0].tables is None:
        raise AatcError("sequences share a step in fused caches of tiles on a GPU alone", "attach with cache='fused'")
    assert spec is not None
    if any(window is not None for window in spec.windows):
        raise AatcError("a step of sequences of their own lengths has no sliding layers", "decode them one by one")
    return form


def _cache(session: Session, stores: Sequence[FusedTileStore], rows: int) -> HostedCache:
    """The cache that the model is given in a step; what it counts on the host means nothing."""
    assert session.spec is not None
    state = CompressedState(session.spec)
    state.batch, state.columns, state.steady = rows, stores[0].tokens, True
    state.groups = [Group(list(range(rows)), 0, state.columns, list(stores))]
    cache = HostedCache(state, len(stores))
    cache.owner = session
    return cache
