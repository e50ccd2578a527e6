"""Many small tensors brought to a device in one copy.

A GPU that several processes share takes some milliseconds for every copy that the host waits for, however small it is,
and what a plan says of a model are thousands of small tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

# where parts of the copy begin: as far apart as an allocator puts tensors of their own
_ALIGNMENT = 512
# of fields of a dataclass whose tensors are of use on the host alone
ON_HOST = {"brought": "on the host"}


def brought(thing: T, device: torch.device | str) -> T:
    """``thing`` with its tensors on ``device``: lists, tuples, dicts and dataclasses of them, made anew.

    Tensors of the host are parts of one buffer, which lives as long as any of them does. What is found twice stays one
    tensor; fields with the metadata `ON_HOST` stay where they are.
    """
    place, found = torch.device(device), dict[int, Tensor]()

    def find(tensor: Tensor) -> Tensor:
        return found.setdefault(id(tensor), tensor)

    _with(thing, find)
    there = _copied(found, place)
    made: T = _with(thing, lambda tensor: there[id(tensor)])
    return made


def _with(thing: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same with every tensor as ``change`` has it."""
    if isinstance(thing, Tensor):
        return change(thing)
    if isinstance(thing, dict):
        return {name: _with(part, change) for name, part in thing.items()}
    if isinstance(thing, list | tuple):
        return type(thing)(_with(part, change) for part in thing)
    if is_dataclass(thing) and not isinstance(thing, type):
        names = [one.name for one in fields(thing) if one.init and "brought" not in one.metadata]
        return replace(thing, **{name: _with(getattr(thing, name), change) for name in names})
    return thing


def _copied(tensors: dict[int, Tensor], place: torch.device) -> dict[int, Tensor]:
    """All of them on a device, by the same names."""
    if place.type == "cpu":
        return {name: tensor.to(place) for name, tensor in tensors.items()}
    mine = {name: tensor for name, tensor in tensors.items() if tensor.device.type == "cpu" and tensor.numel()}
    starts, size = {}, 0
    for name, tensor in mine.items():
        starts[name], size = size, size + -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    whole = torch.empty(size, dtype=torch.uint8)
    for name, tensor in mine.items():
        _part(whole, starts[name], tensor).copy_(tensor)
    there = whole.to(place)
    parts = {name: _part(there, starts[name], tensor) for name, tensor in mine.items()}
    return {name: parts[name] if name in parts else tensor.to(place) for name, tensor in tensors.items()}


def _part(whole: Tensor, start: int, like: Tensor) -> Tensor:
    """The bytes from ``start`` on as a tensor of the shape and dtype of another."""
    return whole[start : start + like.nbytes].view(like.dtype).view(like.shape)
