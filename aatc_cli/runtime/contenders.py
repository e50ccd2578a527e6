"""Caches of several methods for one model, filled from one pass over the prompts.

Prompt tokens attend exactly whatever the cache, so the pass is the same for all: each layer attends once, and its keys
and values go into every cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from aatc_cli.models.adapter import attention_layers
from aatc_cli.models.cache_hooks import CacheCall, hosted
from aatc_cli.models.compressed import CacheState, HostedCache, cache_keyword
from aatc_cli.models.generation import plain_cache
from aatc_cli.runtime.batch import CacheSpec
from aatc_cli.runtime.cache import CompressedState
from aatc_cli.runtime.simulated import SimulatedSpec, SimulatedState


class Attachment(Protocol):
    """What a context manager of a cache yields: a maker of empty caches."""

    def new_cache(self) -> Any:
        """An empty cache for the attached model."""
        ...


@dataclass(frozen=True)
class Plain:
    """The model's own cache."""

    name: str
    model: nn.Module

    def attached(self) -> AbstractContextManager[Attachment]:
        """Nothing to attach."""
        return nullcontext(self)

    def new_cache(self) -> Any:
        """An empty cache, as the model makes it for itself."""
        return plain_cache(self.model)


@dataclass(frozen=True)
class Packed:
    """The packed cache of a plan."""

    name: str
    model: nn.Module
    spec: CacheSpec

    @contextmanager
    def attached(self) -> Iterator[Attachment]:
        """The hooks that bring the model's attention to hosted caches."""
        with hosted(self.model, attention_layers(self.model), _attend):
            yield self

    def new_cache(self) -> HostedCache:
        """An empty cache of the plan."""
        return HostedCache(CompressedState(self.spec), len(self.spec.windows))


@dataclass(frozen=True)
class Simulated(Packed):
    """The cache of a method that has no packed form."""

    spec: SimulatedSpec

    def new_cache(self) -> HostedCache:
        """An empty cache of the method."""
        return HostedCache(SimulatedState(self.spec), len(self.spec.windows))


AnyContender = Plain | Packed


@torch.no_grad()
def shared_prefill(
    model: nn.Module, contenders: Sequence[AnyContender], ids: Tensor, mask: Tensor, positions: Tensor
) -> list[tuple[Tensor, Any]]:
    """Logits [B, V] behind the prompts and the filled cache of every contender, in order.

    ids, mask, positions [B, T]: left-padded prompts. All caches are filled by one forward pass.
    """
    keyword = cache_keyword(model)

    def run(cache: Any) -> Tensor:
        found: Any = model(
            ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1, **{keyword: cache}
        )
        logits: Tensor = found.logits[:, -1]
        return logits

    behind = {c.name: c.new_cache() for c in contenders if isinstance(c, Packed)}
    plain = {c.name: c.new_cache() for c in contenders if isinstance(c, Plain)}
    if behind:
        state: Any = _Fan([cache.state for cache in behind.values()], list(plain.values()))
        with hosted(model, attention_layers(model), _attend):
            logits = dict.fromkeys(behind | plain, run(HostedCache(state, len(state.leader.spec.windows))))
    else:
        logits = {name: run(cache) for name, cache in plain.items()}
    caches = behind | plain
    return [(logits[contender.name], caches[contender.name]) for contender in contenders]


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


def _attend(state: CacheState, call: CacheCall) -> Tensor:
    found: Any = state
    out: Tensor = found.attend(call)
    return out
