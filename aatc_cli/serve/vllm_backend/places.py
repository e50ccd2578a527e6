"""Which slot a request's exact rows lie in: requests that decode lie in the order of their batch.

The kernel of tiles takes rows of a batch from the first slots, so what decodes moves to the front and what does not
makes room. Slots are as many as requests that run at once; a request that ends or is preempted gives its slot back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from aatc_cli.core.tiles import TILE
from aatc_cli.errors import AatcError
from aatc_cli.serve.vllm_backend.lost import Lost


@dataclass
class Held:
    """A request: its slot, the tokens that are cached, and how many tiles of them are packed."""

    slot: int
    tokens: int = 0
    tiles: int = 0


class Places:
    """Requests by their ids in ``count`` slots; plan: whose exact rows they are, for messages."""

    def __init__(self, count: int, plan: str = "the plan") -> None:
        self.count, self.plan, self.lost = count, plan, Lost(plan)
        self.held: dict[str, Held] = {}

    def take(self, requests: Sequence[str]) -> None:
        """Take the slots of requests that lost their blocks, which is noted."""
        self.lost.add([(request, self.held[request].tokens) for request in requests if request in self.held])
        self.release(requests)

    def recognise(self, request: str, cached: int, *, shared: bool) -> None:
        """Check that the cached tokens of a request are those that were seen, or whole blocks of a ``shared`` prefix.

        Raises `AatcError` where they are not.
        """
        held = self.held[request]
        if shared and not held.tokens and cached % TILE == 0:
            held.tokens, held.tiles = cached, max(cached // TILE - 1, 0)
        if held.tokens != cached:
            raise AatcError(
                f"request {request} has {cached} cached tokens, of which {held.tokens} went through {self.plan}",
                "serve without KV connectors and speculative decoding",
            )

    def release(self, requests: Iterable[str]) -> None:
        """Give back the slots of requests; unknown ones are passed over."""
        for request in requests:
            self.held.pop(request, None)

    def arrange(self, decoding: Sequence[str], others: Sequence[str]) -> list[tuple[int, int]]:
        """Give every request a slot, those that decode the one of their row. -> (from, to), to be moved at once.

        Raises `AatcError` for more requests than slots.
        """
        rows = {request: row for row, request in enumerate(decoding)}
        kept = {request: held for request, held in self.held.items() if request not in rows}
        staying = {held.slot for held in kept.values() if held.slot >= len(rows)}
        free = iter([slot for slot in range(len(rows), self.count) if slot not in staying])
        moves = []
        homeless = [request for request, held in kept.items() if held.slot < len(rows)]
        for request in homeless + [request for request in others if request not in self.held]:
            slot = next(free, None)
            if slot is None:
                raise AatcError(
                    f"{self.plan}: {len(self.held)} requests run, and there are exact rows for {self.count}",
                    "start the engine with a larger --max-num-seqs",
                )
            moves += self._put(request, slot)
        for request, row in rows.items():
            moves += self._put(request, row)
        return moves

    def _put(self, request: str, slot: int) -> list[tuple[int, int]]:
        held = self.held.get(request)
        if held is None:
            self.held[request] = Held(slot)
            return []
        before, held.slot = held.slot, slot
        return [] if before == slot else [(before, slot)]
