"""A transformers cache whose contents live elsewhere: what ``generate`` may ask of a cache, handed on to its state."""

from __future__ import annotations

import copy
import inspect
import weakref
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from aatc_cli.errors import AatcError


class CacheState(Protocol):
    """What a hosted cache is made of. Columns are positions of the padded batch that were fed so far."""

    columns: int
    recording: bool

    def select(self, rows: Tensor) -> None:
        """Keep the sequences ``rows``, in this order, repeats allowed."""
        ...

    def crop(self, count: int) -> None:
        """Forget the ``count`` latest columns and settle what was recorded."""
        ...

    def reset(self) -> None:
        """Forget everything."""
        ...


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's entry in the list that transformers wants; it only points at the whole.

    Weakly: with a cycle of references the tensors of a dropped cache would wait for the garbage collector, which does
    not know how much they hold.
    """

    is_sliding = False
    is_croppable = True
    is_compileable = False
    supports_early_init = False

    def __init__(self, host: HostedCache) -> None:
        super().__init__()
        self._host = weakref.ref(host)
        self.is_initialized = True

    @property
    def host(self) -> HostedCache:
        """The cache that this is a layer of."""
        host = self._host()
        assert host is not None
        return host

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the state makes its tensors when the first tokens come."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Hand the new tokens through to the attention function, which stores them; raises outside `hosted`."""
        if not self.host.attached:
            raise AatcError("a compressed cache was used outside its block", "call the model inside `with attach(...)`")
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Columns fed so far."""
        return self.host.state.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that a mask covers, and the first of them."""
        return self.host.state.columns + query_length, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1


class HostedCache(Cache):  # type: ignore[misc]
    """A transformers ``Cache`` of ``layers`` layers over a `CacheState`. Give it to ``generate`` or ``forward``."""

    def __init__(self, state: CacheState, layers: int) -> None:
        super().__init__(layers=[_Layer(self) for _ in range(layers)])
        self.state = state
        self.attached = False
        # whose it is: only blocks of an equal session take it
        self.owner: Any = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Put the sequences in the order of the surviving beams."""
        self.state.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences."""
        self.state.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence ``repeats`` times."""
        self.state.select(torch.arange(self.batch_size).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the latest -``tokens_to_remove`` tokens; the number is negative or zero, as in transformers."""
        if tokens_to_remove > 0:
            raise AatcError(
                f"crop({tokens_to_remove}) is not a number of tokens to remove", "give the negative of that number"
            )
        self.state.crop(-tokens_to_remove)

    def activate_past_recording(self) -> None:
        """From now on every step can be taken back whole by `crop` (assisted decoding asks for this)."""
        self.state.recording = True

    def reset(self) -> None:
        """Forget everything."""
        self.state.reset()

    @property
    def batch_size(self) -> int:
        """Sequences in the cache; -1 before the first token."""
        return int(getattr(self.state, "batch", -1))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = type(self)(copy.deepcopy(self.state, memo), len(self.layers))
        new.owner = self.owner
        memo[id(self)] = new
        return new


def cache_keyword(model: nn.Module) -> str:
    """The name under which this model takes a cache: ``cache``, or ``past_key_values`` in older transformers."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
