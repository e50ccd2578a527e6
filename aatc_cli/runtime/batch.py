"""Which sequences of a batch have cached equally many tokens, and what a forward pass adds to each of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from aatc_cli.errors import AatcError
from aatc_cli.runtime.spec import CacheSpec
from aatc_cli.runtime.store import Store

# the latents of larger numbers may be infinite in float32, whose range they leave by this factor
_HEADROOM = 2.0**24
LARGEST = torch.finfo(torch.float32).max / _HEADROOM


@dataclass
class Group:
    """Sequences ``rows`` of the batch with ``length`` tokens each, the first of them at position ``offset``."""

    rows: list[int]
    offset: int
    length: int
    stores: list[Store]

    def select(self, places: list[int], rows: list[int], spec: CacheSpec) -> Group:
        """The sequences at ``places`` of this group (any order, repeats allowed), as rows ``rows``, in new stores."""
        stores = spec.stores(len(places))
        for old, new in zip(self.stores, stores, strict=True):
            new.adopt(old, places)
        return Group(rows, self.offset, self.length, stores)


@dataclass
class Step:
    """One forward pass: new tokens per group, and with recording what it takes to undo it.

    fresh: per layer and group the keys and values [b, n, C] of new tokens that are still to be looked at.
    """

    width: int
    counts: list[int]
    before: list[list[Store]]
    given: list[tuple[Tensor, Tensor]]
    fresh: list[Fresh] = field(default_factory=list)


@dataclass(frozen=True)
class Fresh:
    """Keys and values [b, n, C] of the newest n tokens of a group in the layer at ``place``, all layers counted."""

    place: int
    group: Group
    keys: Tensor
    values: Tensor


def check_rows(fresh: list[Fresh]) -> None:
    """Raise `AatcError` naming layer, token and sequence of the first row that is not finite or beyond `LARGEST`.

    One look at the device for all that is given.
    """
    if not fresh:
        return
    keys, values = (
        torch.cat(rows) if len(rows) > 1 else rows[0]
        for rows in ([one.keys.flatten(0, 1) for one in fresh], [one.values.flatten(0, 1) for one in fresh])
    )
    # zero for a row that a cache can hold, NaN for another
    marks = torch.stack((*_extremes(keys), *_extremes(values))).float().mul(_HEADROOM).mul(0).sum(0).isnan()
    if not bool(marks.any()):
        return
    first = int(marks.nonzero()[0])
    for one in fresh:
        rows = one.keys.shape[0] * one.keys.shape[1]
        if first < rows:
            break
        first -= rows
    row, index = divmod(first, one.keys.shape[1])
    raise AatcError(
        f"the keys or values of layer {one.place} are not finite, or beyond {LARGEST:.0e}, "
        f"at token {one.group.length - one.keys.shape[1] + index} of sequence {one.group.rows[row]}",
        "load the model in float32 or bfloat16, and begin a new cache",
    )


def new_tokens(groups: list[Group], columns: int, mask: Tensor | None, width: int) -> list[int]:
    """Real tokens among the ``width`` new columns of every row, from the mask of all columns."""
    batch = sum(len(group.rows) for group in groups)
    if mask is None:
        if any(group.length != columns for group in groups):
            raise AatcError("this cache holds a left-padded batch", "pass its attention_mask of all tokens so far")
        return [width] * batch
    real = mask.to("cpu", torch.bool)
    if real.shape != (batch, columns + width):
        raise AatcError(
            f"the attention mask is of shape {list(real.shape)}, "
            f"the cache and the new tokens of [{batch}, {columns + width}]",
            "pass the mask of all tokens so far, padding included",
        )
    past = real[:, :columns].sum(1).tolist()
    holes = bool((real[:, :-1] & ~real[:, 1:]).any())
    if holes or any(past[row] != group.length for group in groups for row in group.rows):
        raise AatcError("the attention mask has gaps, or differs from the one given before", "pad on the left only")
    return [int(count) for count in real[:, columns:].sum(1).tolist()]


def starts_of(positions: Tensor, counts: list[int], width: int) -> list[int]:
    """Position of every row's first new token; raises `AatcError` when its positions do not follow one another."""
    table = positions.to("cpu").expand(len(counts), width)
    starts = []
    for row, count in enumerate(counts):
        span = table[row, width - count :]
        if count and not torch.equal(span, span[0] + torch.arange(count)):
            raise AatcError(f"the positions of sequence {row} do not follow one another", "leave out position_ids")
        starts.append(int(span[0]) if count else 0)
    return starts


def alike(group: Group, counts: list[int], starts: list[int]) -> dict[tuple[int, int], list[int]]:
    """Places in the group by (new tokens, position of the first token); raises `AatcError` on a jump in position."""
    parts: dict[tuple[int, int], list[int]] = {}
    for place, row in enumerate(group.rows):
        offset = starts[row] - group.length if counts[row] else group.offset
        if group.length and offset != group.offset:
            raise AatcError(
                f"sequence {row} goes on at position {starts[row]}, "
                f"its cache ends at {group.offset + group.length - 1}",
                "leave out position_ids, or begin a new cache",
            )
        parts.setdefault((counts[row], offset), []).append(place)
    return parts


def _extremes(rows: Tensor) -> tuple[Tensor, ...]:
    """What tells of rows [n, C] whether all numbers of each are finite: [n], once or twice."""
    # a GPU is slow at the least and the largest together
    return (rows.abs().amax(-1),) if rows.is_cuda else tuple(rows.aminmax(dim=-1))
