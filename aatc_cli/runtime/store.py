"""The store: what a cache is made of, one for every layer and every group of sequences of equal length.

A cache of a whole model (`runtime.state`) knows batches, padding, beams and steps back. What a token is kept *as* is
the store's own matter, and a way to keep them is one class of stores and one `Form` that makes them:

| form | what is stored | where |
|---|---|---|
| packed | codes of any widths in planes, unpacked by torch | `runtime/packed/` |
| fused | codes in tiles of 64 tokens at a capacity, decoded by kernels | `runtime/fused/` |
| fused | the same of tiles with classes, in records of 16 tokens | `runtime/fused_tiles/` |
| simulated | full vectors and what a codec gives back | `runtime/simulated/` |
| (exact) | the latest tokens of a sliding layer | `runtime/sliding.py` |

A store has to keep these promises; whoever writes another one (tiles with token classes in pages, say) keeps them too:

- ``append`` takes exact rows, applies the window rule of `core.layout` and flushes what leaves the window *by itself*:
  the state after n rows is that of n single appends. Rows are coded once, from exact values.
- ``attend`` changes nothing that is read later, but for sums of what exact tokens receive. It reads sinks, packed
  tokens and window under one softmax.
- tensors are replaced or written behind what a ``snapshot`` can see, so that a snapshot stays as it was.
- ``tensors`` are the whole contents: put into an empty store of the same form and batch with ``load`` they give the
  same store. Saving, copying, beams and selecting rows of a batch are nothing but that.
- ``nbytes`` counts what is allocated, spare room included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor

from aatc_cli.core.rope import RopeStyle

Kind = Literal["packed", "fused", "simulated"]
# keys before or after RoPE: what a codec was made for
Coordinates = Literal["pre-rope", "post-rope"]
# cos and sin [n, R] of tokens first .. first + n - 1, in the model's dtype
Tables = Callable[[int, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class LayerView:
    """What attention of one layer knows beside its store.

    tables give the rotation of the store's tokens by index, rope how pairs lie; sinks [Hq] and softcap are those of
    `core.attend.masked_attention`; offset is the position of the store's first token; peers: the stores of all
    compressed layers, for codecs over layers. sums [b, Hq, n]: of a prompt that is watched, the logarithms of what its
    softmax divides by, where they are known.
    """

    scaling: float
    tables: Tables
    rope: RopeStyle = "half"
    sliding_window: int | None = None
    sinks: Tensor | None = None
    softcap: float | None = None
    offset: int = 0
    peers: Sequence[Any] = ()
    sums: Tensor | None = None


class Store(Protocol):
    """The cache of one layer for b sequences of equal length. Rows are [b, n, C], keys in the form's coordinates."""

    tokens: int
    # whether it asks for the sums of a prompt's softmax, with which `watch` has less to do
    sums: bool

    @property
    def packed(self) -> int:
        """Tokens per sequence that are no longer exact, all of them behind the sinks."""
        ...

    @property
    def least(self) -> int:
        """Tokens that `drop` must leave, the rest being exact."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes allocated for tokens."""
        ...

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Take in rows of the next n tokens and flush what leaves the window."""
        ...

    def watch(self, query: Tensor, keys: Tensor, view: LayerView) -> None:
        """Told, before their rows are appended, of first tokens that attend to themselves exactly, as a prompt does.

        query [b, Hq, n, D] and keys [b, H, n, D] are rotated. A store whose codes depend on attention looks at them.
        """
        ...

    def again(self, after: Any, keys: Tensor, values: Tensor) -> None:
        """Take again rows [b, n, C] of a step that is taken back in part.

        This store is the snapshot from before the step, ``after`` the store that the whole step was taken with; the
        state is then as if the rows that are not given had never come.
        """
        ...

    def attend(self, query: Tensor, view: LayerView, fresh: tuple[Tensor, Tensor] | None) -> Tensor:
        """Attention of rotated queries [b, Hq, q, D] over the store and, causally, over ``fresh``. -> [b, Hq, q, D].

        fresh: rotated keys and values [b, H, q, D] of the queries' own tokens, not in the store yet; without it there
        is one query, that of the store's last token.
        """
        ...

    def drop(self, count: int) -> None:
        """Forget the ``count`` latest tokens, all of them exact ones; packed tokens stay packed."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """The contents by name, each with the sequences as first axis."""
        ...

    def load(self, tensors: Mapping[str, Tensor], tokens: int) -> None:
        """Put the contents of ``tokens`` tokens in place, as `tensors` of such a store gives them."""
        ...

    def snapshot(self) -> Self:
        """A store in the same state, which stays as it is whatever this one does."""
        ...

    def adopt(self, other: Any, places: Sequence[int]) -> None:
        """Hold the sequences at ``places`` of a store of the same form, any order, repeats allowed.

        This store is empty before, and made for as many sequences. Neither store sees what the other does later.
        """
        ...

    def fits(self, tensors: Mapping[str, Tensor], tokens: int) -> bool:
        """Whether ``tensors``, of a file, can be the contents of such a store with ``tokens`` tokens."""
        ...


class StoreParts:
    """What most stores do alike: rows of a batch by way of the contents, and no interest in who attends to whom."""

    sums = False

    def watch(self, query: Tensor, keys: Tensor, view: LayerView) -> None:
        """Nothing of it is kept."""

    def again(self, after: Any, keys: Tensor, values: Tensor) -> None:
        """Append the rows: what was stored of them does not depend on how they were attended to."""
        mine: Any = self
        mine.append(keys, values)

    def adopt(self, other: Any, places: Sequence[int]) -> None:
        """Hold the sequences at ``places`` of ``other`` in tensors of its own."""
        mine: Any = self
        index = torch.tensor(places)
        found = other.tensors().items()
        mine.load({name: part.index_select(0, index.to(part.device)) for name, part in found}, other.tokens)


class Form(Protocol):
    """A way to keep tokens: makes the stores of all compressed layers, and knows what decides a stored number."""

    @property
    def kind(self) -> Kind:
        """Its name."""
        ...

    @property
    def coordinates(self) -> Coordinates:
        """Of the keys that its stores take."""
        ...

    def stores(self, batch: int, room: int | None = None) -> list[Store]:
        """Empty stores of every compressed layer for ``batch`` sequences of equal length.

        room: tokens that must find place without anything being allocated again; None lets stores grow as they need.
        """
        ...

    def facts(self) -> list[Any]:
        """Everything that decides a stored number, as JSON with digests of tensors."""
        ...
