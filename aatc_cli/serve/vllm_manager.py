"""The scheduler's side of the tier for vLLM 0.33: which chunks are there, in which slot, and where they begin."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from importlib import import_module
from typing import Any

_base: Any = import_module("vllm.v1.kv_offload.base")


class ChunkSlots(_base.LoadStoreSpec):  # type: ignore[misc]
    """Slots of chunks, the position of the first token of each, and its key."""

    def __init__(self, slots: list[int], firsts: list[int], keys: list[bytes]) -> None:
        self.slots, self.firsts, self.keys = slots, firsts, keys

    @staticmethod
    def medium() -> str:
        """What 0.23 tells handlers apart by."""
        return "AATC"


@dataclass
class _Entry:
    """A chunk: ``readers`` keep it from being evicted, as long as it is not ``ready`` its writer does."""

    slot: int
    first: int
    ready: bool = False
    readers: int = 0


class AatcManager(_base.OffloadingManager):  # type: ignore[misc]
    """``capacity`` slots of chunks of ``tokens`` tokens; the one that was used least recently goes first."""

    def __init__(self, capacity: int, tokens: int) -> None:
        self.capacity, self.tokens = capacity, tokens
        self.entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self.free = list(range(capacity - 1, -1, -1))

    def on_new_request(self, req_context: Any) -> Any:
        """Nothing is kept of a request."""
        return _base.RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Whether a chunk can be read."""
        entry = self.entries.get(key)
        if entry is None:
            return _base.LookupResult.MISS
        return _base.LookupResult.HIT if entry.ready else _base.LookupResult.HIT_PENDING

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Mark chunks as used, the first of a prefix last: what follows it is of no use without it."""
        for key in reversed(list(keys)):
            if key in self.entries:
                self.entries.move_to_end(key)

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> ChunkSlots:
        """Hold chunks for reading."""
        found = [self.entries[key] for key in keys]
        for entry in found:
            entry.readers += 1
        return ChunkSlots([entry.slot for entry in found], [entry.first for entry in found], list(keys))

    def complete_load(self, keys: Collection[bytes], req_context: Any) -> None:
        """Let go of chunks that were read."""
        for key in keys:
            if key in self.entries:
                self.entries[key].readers -= 1

    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> Any:
        """Find slots for chunks that are new; None where all others are in use.

        A chunk whose place in its text is not known is not stored: its keys could not be turned back.
        """
        firsts = self.firsts_of(keys, req_context)
        wanted = [key for key in firsts if key not in self.entries]
        evicted: list[bytes] = []
        short = len(wanted) - len(self.free)
        if short > 0:
            kept = set(keys)
            idle = [k for k, e in self.entries.items() if e.ready and not e.readers and k not in kept]
            if len(idle) < short:
                return None
            evicted = idle[:short]
            for key in evicted:
                self.free.append(self.entries.pop(key).slot)
        made = {key: _Entry(self.free.pop(), firsts[key]) for key in wanted}
        self.entries.update(made)
        spec = ChunkSlots([e.slot for e in made.values()], [e.first for e in made.values()], wanted)
        return _base.PrepareStoreOutput(keys_to_store=wanted, store_spec=spec, evicted_keys=evicted)

    def firsts_of(self, keys: Collection[bytes], req_context: Any) -> dict[bytes, int]:
        """The position of the first token of chunks, as far as it is known."""
        ends = {key: req_context.get_offload_key_position(key) for key in keys}
        return {key: int(end) - self.tokens for key, end in ends.items() if end is not None and end >= self.tokens}

    def complete_store(self, keys: Collection[bytes], req_context: Any, success: bool = True) -> None:
        """Chunks are written, or were not and go."""
        for key in keys:
            entry = self.entries.get(key)
            if entry is None or entry.ready:
                continue
            if success:
                entry.ready = True
            else:
                self.free.append(self.entries.pop(key).slot)

    def reset_cache(self) -> None:
        """Forget all chunks that nobody reads or writes."""
        for key in [key for key, entry in self.entries.items() if entry.ready and not entry.readers]:
            self.free.append(self.entries.pop(key).slot)
