"""The compressed cache of a whole model under ``generate``: batches, padding, beams, taking steps back.

Rows of a batch that have cached equally many tokens share one store per layer; a left-padded batch is a few such
groups. Padding is never stored, never a sink, and costs nothing. A prompt attends to itself exactly and is packed
afterwards; every later token is stored first and attends then, as the window rule has it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from aatc_cli.core.attend import attention_with_sums
from aatc_cli.errors import AatcError
from aatc_cli.models.adapter import AttentionSite
from aatc_cli.models.attention import exact_attention
from aatc_cli.models.cache_hooks import CacheCall
from aatc_cli.runtime.batch import Fresh, Group, Step, alike, check_rows, new_tokens, starts_of
from aatc_cli.runtime.contents import Contents
from aatc_cli.runtime.pressed.store import tell_choices
from aatc_cli.runtime.sliding import SlidingStore
from aatc_cli.runtime.spec import CacheSpec
from aatc_cli.runtime.store import LayerView, Store, Tables

# rotation tables of one forward pass that are kept for the next layers
_TABLES = 64


class CompressedState(Contents):
    """The contents of one compressed cache; implements `models.compressed.CacheState`."""

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec)
        # a step that is captured once and replayed looks at nothing on the device
        self.steady = False
        # by sequence and compressed layer, what a press leaves of the prompt that comes next [1, H, P]
        self.ahead: list[list[Tensor]] = []
        self._tables: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def attend(self, call: CacheCall) -> Tensor:
        """Attention of one layer, whose new tokens enter the store. -> [B, Hq, q, D], zero at padding.

        Raises `AatcError` for a key or value that is NaN or infinite, which spoils the cache: of a prompt at its layer,
        of a single token when the last layer has come.
        """
        call = self._seen(call)
        layer = call.site.place
        if layer == 0:
            self._begin(call)
        step = self._step
        assert step is not None
        if self.recording:
            for before, group in zip(step.before, self.groups, strict=True):
                before.append(group.stores[layer].snapshot())
            step.given.append((call.k_rows, call.v_rows))
        if len(self.groups) == 1 and step.counts[0] == step.width:
            out = self._attend_group(call, self.groups[0])
        else:
            out = torch.zeros_like(call.query)
            for group, count in zip(self.groups, step.counts, strict=True):
                if count:
                    out[group.rows, :, step.width - count :] = self._attend_group(_part(call, group.rows, count), group)
        if layer == len(self.spec.windows) - 1:
            self._tables.clear()
            self._check(step.fresh)
            self._step = None
            if self.recording:
                self._done = [*(self._done if self.drafting else []), step]
        return out

    def take(self, call: CacheCall) -> None:
        """Store one layer's new tokens as `attend` does, of a prompt whose attention is computed elsewhere."""
        call = self._seen(call)
        place = call.site.place
        if place == 0:
            self._begin(call)
        step = self._step
        assert step is not None
        assert not self.recording
        for group, count in zip(self.groups, step.counts, strict=True):
            if count:
                part = call if count == step.width and len(self.groups) == 1 else _part(call, group.rows, count)
                self._note(step, part, group)
                store = group.stores[place]
                if store.tokens == 0:
                    # the output is the leader's, and the sums are this store's alone to ask for
                    found = _with_sums(part, (part.query, part.key, part.value)) if store.sums else None
                    sums = None if found is None else found[1]
                    store.watch(part.query, part.key, replace(self._view(part, group), sums=sums))
                store.append(part.k_rows, part.v_rows)
        if place == len(self.spec.windows) - 1:
            self._check(step.fresh)
            self._step = None

    def _attend_group(self, call: CacheCall, group: Group) -> Tensor:
        store, count = group.stores[call.site.place], call.query.shape[2]
        assert self._step is not None
        self._note(self._step, call, group)
        if isinstance(store, SlidingStore):
            out = store.attend(call.query, self._view(call, group), (call.key, call.value))
            store.append(call.k_rows, call.v_rows)
            return out
        lead = max(call.prompt, 1) if self.recording else count
        parts = [self._attend_lead(call, group, store, lead)]
        for place in range(lead, count):
            store.append(call.k_rows[:, place : place + 1], call.v_rows[:, place : place + 1])
            parts.append(self._attend_stored(call, group, store, place))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def _attend_lead(self, call: CacheCall, group: Group, store: Store, lead: int) -> Tensor:
        """The first ``lead`` queries: a prompt, exact among itself, or one step."""
        rows = (call.k_rows[:, :lead], call.v_rows[:, :lead])
        if lead == 1 and store.tokens:
            store.append(*rows)
            return self._attend_stored(call, group, store, 0)
        query, key, value = (x[:, :, :lead] for x in (call.query, call.key, call.value))
        if store.tokens == 0:
            found = _with_sums(call, (query, key, value)) if store.sums else None
            out, sums = found or (exact_attention(call.site, query, key, value, call.scaling), None)
            store.watch(query, key, replace(self._view(call, group), sums=sums))
        else:
            out = store.attend(query, self._view(call, group), (key, value))
        store.append(*rows)
        return out

    def _attend_stored(self, call: CacheCall, group: Group, store: Store, place: int) -> Tensor:
        return store.attend(call.query[:, :, place : place + 1], self._view(call, group), None)

    def _view(self, call: CacheCall, group: Group) -> LayerView:
        """What the store of a layer is told about it."""
        layer = call.site
        return LayerView(
            call.scaling,
            self._rotation(call, group),
            layer.rope if isinstance(layer, AttentionSite) else "none",
            layer.sliding_window,
            layer.sinks,
            layer.softcap,
            group.offset,
            [store for store in group.stores if not isinstance(store, SlidingStore)],
        )

    def _seen(self, call: CacheCall) -> CacheCall:
        """The call with the rows that the stores take."""
        if self.spec.form.coordinates == "pre-rope" or not isinstance(call.site, AttentionSite):
            return call
        return replace(call, k_rows=call.key.transpose(1, 2).flatten(2))

    def _rotation(self, call: CacheCall, group: Group) -> Tables:
        def tables(first: int, count: int) -> tuple[Tensor, Tensor]:
            name = (id(call.rotation), group.offset + first, count)
            if name not in self._tables:
                if len(self._tables) >= _TABLES:
                    self._tables.pop(next(iter(self._tables)))
                span = torch.arange(group.offset + first, group.offset + first + count, device=call.query.device)
                # kept with tokens side by side, as packed keys are reconstructed
                cos, sin = (table.T.contiguous().T for table in call.rotation(span))
                self._tables[name] = cos, sin
            return self._tables[name]

        return tables

    def _begin(self, call: CacheCall) -> None:
        """Check the step against the cache and sort the rows into groups of equal length."""
        if self.steady:
            self._step = self._steady_step()
            return
        batch, width = call.query.shape[0], call.query.shape[2]
        if self.batch == -1:
            self.batch, self.groups = batch, [Group(list(range(batch)), 0, 0, self.spec.stores(batch))]
        if batch != self.batch:
            raise AatcError(
                f"a batch of {batch} does not fit a cache of {self.batch} sequences", "begin a new cache for it"
            )
        if self.refused or any(store.tokens != group.length for group in self.groups for store in group.stores):
            raise AatcError("an earlier forward pass through this cache was interrupted", "begin a new cache")
        counts = new_tokens(self.groups, self.columns, call.mask, width)
        starts = starts_of(call.positions, counts, width)
        # group by group, rows that go on alike: nothing is changed before all of it is checked
        parts = [alike(group, counts, starts) for group in self.groups]
        ends = [
            group.length + new + offset for group, part in zip(self.groups, parts, strict=True) for new, offset in part
        ]
        self.spec.check_limit(max(group.offset + group.length for group in self.groups), max(ends))
        groups: list[Group] = []
        for group, part in zip(self.groups, parts, strict=True):
            for (new, offset), places in part.items():
                rows = [group.rows[place] for place in places]
                piece = group if len(part) == 1 else group.select(places, rows, self.spec)
                groups.append(replace(piece, offset=offset, length=piece.length + new))
        self.groups, self.columns = groups, self.columns + width
        news = [counts[group.rows[0]] for group in groups]
        self._step = Step(width, news, [[] for _ in groups] if self.recording else [], [])
        self._tables.clear()
        if self.ahead:
            for group in groups:
                tell_choices(group.stores, [self.ahead[row] for row in group.rows])
            self.ahead = []

    def _steady_step(self) -> Step:
        """The next single token of a batch of one length, with no look at the device."""
        [group] = self.groups
        group.length += 1
        self.columns += 1
        return Step(1, [1], [], [])

    def _note(self, step: Step, call: CacheCall, group: Group) -> None:
        """Look at the rows of a call: at once, or those of a single token later, with those of the other layers."""
        if self.steady:
            return
        step.fresh.append(Fresh(call.site.place, group, call.k_rows, call.v_rows))
        if call.query.shape[2] > 1:
            self._check(step.fresh)

    def _check(self, fresh: list[Fresh]) -> None:
        try:
            check_rows(fresh)
            fresh.clear()
        except AatcError:
            self._step, self._done, self.refused = None, [], True
            raise


def _with_sums(call: CacheCall, heads: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor] | None:
    """Causal attention of a prompt's query, key and value, and the sums of its softmax; None where none tells them."""
    site = call.site
    if site.sliding_window is not None or site.sinks is not None or site.softcap is not None:
        return None
    return attention_with_sums(*heads, call.scaling)


def _part(call: CacheCall, rows: list[int], count: int) -> CacheCall:
    """The same call for some rows and their last ``count`` tokens."""
    skipped = call.query.shape[2] - count
    heads = {name: getattr(call, name)[rows][:, :, skipped:] for name in ("query", "key", "value")}
    return replace(
        call,
        **heads,
        k_rows=call.k_rows[rows][:, skipped:],
        v_rows=call.v_rows[rows][:, skipped:],
        prompt=call.prompt - skipped,
    )
