"""The watch on a model: whether it is still what it was when a session began.

A cache is filled by one model, and what it holds means something to that model only. At every forward pass, and without
reading a weight, the watch sees: modules that were replaced or added (adapters), weights and buffers that are others or
were written to through torch, dtype and device, hooks on the outputs that the cache reads, and train mode that computes
something else. It does not see numbers that were changed through ``tensor.data`` in place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aatc_cli.errors import AatcError
from aatc_cli.models.adapter import AttentionLayer, AttentionSite

_AGAIN = "undo the change, or begin a new session with the changed model"
# rotations of these kinds write their frequencies anew, as the length asks for
MOVING = ("dynamic", "longrope")


@dataclass(frozen=True)
class _Part:
    """A module as it was: its children by identity, how many parameters and buffers it had, its adapters."""

    name: str
    module: nn.Module
    children: list[int]
    counts: tuple[int, int]
    adapters: str | None
    numbers: dict[str, Any]


@dataclass(frozen=True)
class _Held:
    """A tensor of a module as it was: the dictionary that holds it, where its numbers lie, how often they changed."""

    module: str
    place: dict[str, Any]
    name: str
    tensor: Tensor
    address: int
    version: int
    dtype: torch.dtype
    device: torch.device


class ModelWatch:
    """What a model was; `check` raises when it is something else."""

    def __init__(self, model: nn.Module, layers: Iterable[AttentionLayer]) -> None:
        parameter = next(model.parameters())
        self.dtype, self.device = parameter.dtype, parameter.device
        self.parts = [_part(name, module) for name, module in model.named_modules()]
        self.held = [held for part in self.parts for held in _held(part)]
        self.taps = [
            (f"{layer.name}.{side}", tap.module)
            for layer in layers
            if isinstance(layer, AttentionSite)
            for side, tap in (("k", layer.k), ("v", layer.v))
        ]

    def check(self) -> None:
        """Raise `AatcError` naming the first difference. It is called for every token: a microsecond a module."""
        for part in self.parts:
            module = part.module
            children = module._modules
            if (children or part.children) and [*map(id, children.values())] != part.children:
                raise _changed(f"the modules of {part.name or 'the model'} were replaced or added to (an adapter?)")
            if (len(module._parameters), len(module._buffers)) != part.counts:
                raise _changed(f"the weights of {part.name or 'the model'} were changed")
            if part.adapters is not None and _adapters(module) != part.adapters:
                raise _changed(f"the adapters of {part.name} were switched")
            if module.training:
                _check_training(part.name, module)
        for held in self.held:
            tensor: Tensor | None = held.place.get(held.name)
            if (
                tensor is None
                or tensor is not held.tensor
                or _version(tensor) != held.version
                or tensor.data_ptr() != held.address
            ):
                raise self._other(held, tensor)

    def check_numbers(self) -> None:
        """Raise `AatcError` for plain numbers of a module that are others: an epsilon, a scale, a dropout.

        Too slow for every token, so it is for the beginning of a block.
        """
        for part in self.parts:
            now = _numbers(part.module)
            if now != part.numbers:
                names = ", ".join(
                    sorted(name for name in now | part.numbers if now.get(name) != part.numbers.get(name))
                )
                raise _changed(f"{names} of {part.name or 'the model'} is another number")

    def same(self, other: ModelWatch) -> bool:
        """Whether another watch began with the model in the same state."""
        mine, theirs = (
            [(id(held.tensor), held.address, held.version) for held in watch.held] for watch in (self, other)
        )
        return mine == theirs and self.parts == other.parts

    def hooks(self) -> tuple[int, ...]:
        """How many hooks are on every output that a cache reads."""
        return tuple(len(module._forward_hooks) for _, module in self.taps)

    def check_hooks(self, before: tuple[int, ...]) -> None:
        """Raise `AatcError` when hooks came or went since ``before``: they may change what the cache does not see."""
        for (name, _), then, now in zip(self.taps, before, self.hooks(), strict=True):
            if then != now:
                raise AatcError(
                    f"a hook was put on the output of {name} inside the block, or taken away: what it changes, the "
                    "cache would not see",
                    "register the hook before the model is attached",
                )

    def _other(self, held: _Held, now: Tensor | None) -> AatcError:
        """The error for a tensor that is not the one it was."""
        if now is not None and now.dtype != held.dtype:
            return _changed(f"the model is {_short(now.dtype)} now and was {_short(held.dtype)}")
        if now is not None and now.device != held.device:
            return _changed(f"the model lies on {now.device} now and lay on {held.device}")
        return _changed(f"the weights of {held.module or 'the model'} were changed")


def _part(name: str, module: nn.Module) -> _Part:
    children = [*map(id, module._modules.values())]
    counts = len(module._parameters), len(module._buffers)
    return _Part(name, module, children, counts, _adapters(module), _numbers(module))


def _held(part: _Part) -> list[_Held]:
    moving = getattr(part.module, "rope_type", None) in MOVING
    places: list[dict[str, Any]] = [part.module._parameters, {} if moving else part.module._buffers]
    return [
        _Held(part.name, place, name, tensor, tensor.data_ptr(), _version(tensor), tensor.dtype, tensor.device)
        for place in places
        for name, tensor in place.items()
        if tensor is not None
    ]


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _adapters(module: nn.Module) -> str | None:
    """Which adapters act in a module, as the libraries that add them tell; None where there are none."""
    found = module.__dict__
    if "_active_adapter" not in found:
        return None
    return repr([found.get(name) for name in ("_active_adapter", "_disable_adapters", "merged_adapters")])


def _numbers(module: nn.Module) -> dict[str, Any]:
    """The plain numbers among a module's attributes; whether it is in train mode is not one of them."""
    if getattr(module, "rope_type", None) in MOVING:
        return {}
    found = module.__dict__.items()
    return {name: value for name, value in found if type(value) in (int, float, bool) and name != "training"}


def _check_training(name: str, module: nn.Module) -> None:
    """Raise `AatcError` for train mode where it computes something else, or leaves the cache out."""
    chance = module.p if isinstance(module, nn.Dropout) else getattr(module, "attention_dropout", 0.0)
    if isinstance(chance, float) and chance > 0:
        raise AatcError(f"{name} is in train mode, with a dropout of {chance:g}", "call model.eval() before the block")
    if getattr(module, "gradient_checkpointing", False):
        raise AatcError(
            f"{name or 'the model'} is in train mode with gradient checkpointing, which uses no cache",
            "call model.eval() before the block",
        )


def _changed(what: str) -> AatcError:
    return AatcError(f"{what} since the session began", _AGAIN)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
