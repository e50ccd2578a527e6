"""One pass over prompts that fills the caches of several sessions.

Prompt tokens attend exactly whatever the cache, so the pass is the same for all: each layer attends once, and its keys
and values go into every cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aatc_cli.errors import AatcError
from aatc_cli.models.adapter import attention_layers, attention_sites
from aatc_cli.models.cache_hooks import CacheCall, hosted
from aatc_cli.models.compressed import HostedCache
from aatc_cli.runtime.pressed.form import pressed_of
from aatc_cli.runtime.second_pass import Encode, choices_over_layers, second_reading
from aatc_cli.runtime.session import Session, attend
from aatc_cli.runtime.state import CompressedState


@torch.no_grad()
def shared_prefill(
    sessions: Sequence[Session], ids: Tensor, mask: Tensor, positions: Tensor, encode: Encode | None = None
) -> list[tuple[Tensor, Any]]:
    """Logits [B, V] behind the prompts and the filled cache of every session, in order.

    ids, mask, positions [B, T]: left-padded prompts. All caches are filled by one forward pass of the sessions' model,
    outside of their blocks. encode: the tokenizer, with which presses that read a prompt twice ask for it again. Raises
    `AatcError` for sessions of several models.
    """
    model: Any = sessions[0].model
    if any(session.model is not model for session in sessions):
        raise AatcError("one pass over prompts fills the caches of one model", "prepare all sessions for one model")
    for session in sessions:
        session.check_model()

    def run(cache: Any) -> Tensor:
        keyword = {sessions[0].keyword: cache}
        found: Any = model(
            ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1, **keyword
        )
        logits: Tensor = found.logits[:, -1]
        return logits

    caches = [session.new_cache() for session in sessions]
    states = [cache.state for cache in caches if isinstance(cache, HostedCache)]
    plain = [cache for cache in caches if not isinstance(cache, HostedCache)]
    if not states:
        return [(run(cache), cache) for cache in caches]
    if encode is not None:
        _read_twice(model, states, ids, mask, encode)
    fan: Any = _Fan(states, plain)
    with hosted(model, attention_layers(model), attend):
        logits = run(HostedCache(fan, len(fan.leader.spec.windows)))
    return [(logits, cache) for cache in caches]


def _read_twice(model: Any, states: Sequence[Any], ids: Tensor, mask: Tensor, encode: Encode) -> None:
    """Tell the caches whose press asks for it what a second reading of their prompts leaves."""
    found = [(state, pressed_of(state.spec)) for state in states]
    asking = [(state, pressed) for state, pressed in found if pressed is not None and pressed.rule.rereads]
    if not asking:
        return
    sites, sinks = attention_sites(model), asking[0][0].spec.window.sinks
    for row, real in zip(ids, mask.bool(), strict=True):
        readings = second_reading(model, sites, row[real][None], encode, sinks)
        for state, pressed in asking:
            state.ahead.append(choices_over_layers(readings, pressed, state.spec.window))


class _Fan:
    """A cache state for one pass over prompts: the first state attends, all others only store."""

    recording = False

    def __init__(self, states: list[Any], plain: list[Any]) -> None:
        self.leader: CompressedState = states[0]
        self.others: list[CompressedState] = states[1:]
        self.plain = plain

    @property
    def columns(self) -> int:
        """Columns fed so far."""
        return self.leader.columns

    def attend(self, call: CacheCall) -> Tensor:
        """The layer's attention, computed once; every cache takes its keys and values."""
        out = self.leader.attend(call)
        for state in self.others:
            state.take(call)
        for cache in self.plain:
            cache.update(call.key, call.value, call.site.place)
        return out
