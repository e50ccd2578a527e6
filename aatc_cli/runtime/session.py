"""The session: a model with the caches of one plan, and the block in which it works with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Self

from torch import Tensor, nn

from aatc_cli.core.layout import CacheLayout
from aatc_cli.errors import AatcError
from aatc_cli.models.adapter import AttentionLayer
from aatc_cli.models.assistant import caches_of_assistant
from aatc_cli.models.cache_hooks import CacheCall, hosted
from aatc_cli.models.compressed import CacheState, HostedCache, cache_keyword
from aatc_cli.models.generation import plain_cache
from aatc_cli.models.refusals import check_model
from aatc_cli.runtime.spec import CacheSpec
from aatc_cli.runtime.state import CompressedState
from aatc_cli.runtime.watch import ModelWatch

# the form of cache that is asked for; what "auto" stands for, `forms.chosen` says
CacheChoice = Literal["auto", "packed", "fused", "simulated"]


@dataclass(frozen=True, eq=False)
class Session:
    """A model and the caches of one plan for it; ``keyword`` names the argument of the model that takes one.

    name and digest are the plan's ("codecs" and None of bare ones); spec is None for the model's own cache. Caches are
    of use inside the block of `attached` alone, and only in sessions of the same model, plan, window and dtype.
    """

    name: str
    model: nn.Module
    layers: list[AttentionLayer]
    keyword: str
    spec: CacheSpec | None
    watch: ModelWatch
    digest: str | None = None

    @classmethod
    def of(
        cls,
        name: str,
        model: nn.Module,
        layers: list[AttentionLayer],
        spec: CacheSpec | None,
        digest: str | None = None,
    ) -> Self:
        """A session of ``model`` as it is now."""
        return cls(name, model, layers, cache_keyword(model), spec, ModelWatch(model, layers), digest)

    @property
    def kind(self) -> Literal["plain", "packed", "fused", "simulated"]:
        """How its caches hold tokens; "plain" is the model's own."""
        return "plain" if self.spec is None else self.spec.form.kind

    @property
    def layout(self) -> CacheLayout | None:
        """The byte law of its caches, where one is known."""
        return None if self.spec is None else self.spec.layout

    def new_cache(self, room: int | None = None) -> Any:
        """An empty cache, to be given to ``generate`` or ``forward`` as ``keyword`` inside the block.

        room: tokens that a fused cache has place for from the start and never more, as a captured graph needs it;
        without it the cache grows. Raises `AatcError` for a room that other caches do not have.
        """
        if self.spec is None:
            if room is not None:
                raise AatcError("the model's own cache has no spare room", "leave out the number of tokens it is for")
            return plain_cache(self.model)
        if room is not None and self.kind != "fused":
            self.spec.form.stores(1, room)
        cache = HostedCache(CompressedState(self.spec.with_room(room)), len(self.spec.windows))
        cache.owner = self
        return cache

    def bytes_live(self, cache: Any) -> int:
        """Bytes that ``cache`` has allocated for tokens; raises `AatcError` of a simulated one."""
        if isinstance(cache, HostedCache):
            state: Any = cache.state
            return int(state.bytes_live())
        held = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
        return sum(tensor.nbytes for tensor in held if isinstance(tensor, Tensor))

    @contextmanager
    def attached(self) -> Iterator[Self]:
        """The block in which the model works with caches of this session, and with no other ones.

        Raises `AatcError` for a model that is attached already, compiled, or changed since the session began.
        """
        self.check_model()
        self.watch.check_numbers()
        if self.spec is None:
            yield self
            return
        check_model(self.model)
        with (
            hosted(self.model, self.layers, attend, self.admit) as hooks,
            caches_of_assistant(self.model, self.keyword, self._draft_cache),
        ):
            hooks.begin = self._begin(self.watch.hooks())
            yield self

    def check_model(self) -> None:
        """Raise `AatcError` naming what was changed in the model since the session began."""
        self.watch.check()

    def admit(self, cache: HostedCache) -> None:
        """Raise `AatcError` for a cache of another model, plan, window, dtype or kind."""
        owner = cache.owner
        if owner is self:
            return
        if not isinstance(owner, Session) or owner.spec is None:
            raise AatcError("this cache is of no session", "make it by session.new_cache()")
        assert self.spec is not None
        if owner.model is not self.model:
            raise _foreign("another model", owner.name, self.name)
        if owner.kind != self.kind:
            raise _foreign(f"{owner.kind} tokens", owner.name, f"{self.name}, whose caches are {self.kind}")
        if owner.spec.digest != self.spec.digest:
            raise _foreign("another plan, window or dtype", owner.name, self.name)
        if not owner.watch.same(self.watch):
            raise _foreign("the model before it was changed", owner.name, self.name)
        cache.owner = self

    def _draft_cache(self) -> Any:
        """A cache for drafts, which are taken back whatever was packed meanwhile."""
        cache = self.new_cache()
        cache.state.recording = cache.state.drafting = True
        return cache

    def _begin(self, hooks: tuple[int, ...]) -> Any:
        def begin() -> None:
            self.check_model()
            self.watch.check_hooks(hooks)

        return begin


def attend(state: CacheState, call: CacheCall) -> Tensor:
    """The attention function of every cache, for `models.cache_hooks.hosted`."""
    found: Any = state
    out: Tensor = found.attend(call)
    return out


def _foreign(what: str, theirs: str, ours: str) -> AatcError:
    return AatcError(
        f"this cache holds {what}: it is of the session of {theirs}, and the model is attached to {ours}",
        "make the cache by new_cache() of the session whose block this is",
    )
