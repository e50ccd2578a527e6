"""The watch on a model: whether it is still what it was when a session began.

A cache is filled by one model, and what it holds means something to that model only. At every forward pass, and without
reading a weight, the watch sees: modules that were replaced or added (adapters), weights and buffers that are others or
were written to through torch, dtype and device, hooks on the outputs that the cache reads, and train mode that computes
something else. It does not see numbers that were changed through ``tensor.data`` in place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from aatc_cli.errors import AatcError
from aatc_cli.models.adapter import AttentionLayer, AttentionSite

_AGAIN = "undo the change, or begin a new session with the changed model"
# rotations of these kinds write their frequencies anew, as the length asks for
_MOVING = ("dynamic", "longrope")


# where a tensor lies, how often torch wrote to it, and what it is of
_Mark = tuple[int, int, int, torch.dtype]


@dataclass(frozen=True)
class _Part:
    """A module as it was: its children, tensors and adapters. ``moving``: its buffers change as a matter of course."""

    name: str
    module: nn.Module
    moving: bool
    children: tuple[int, ...]
    marks: tuple[_Mark, ...]
    adapters: str


class ModelWatch:
    """What a model was; `check` raises when it is something else."""

    def __init__(self, model: nn.Module, layers: Iterable[AttentionLayer]) -> None:
        parameter = next(model.parameters())
        self.dtype, self.device = parameter.dtype, parameter.device
        self.parts = [_part(name, module) for name, module in model.named_modules()]
        self.taps = [
            (f"{layer.name}.{side}", tap.module)
            for layer in layers
            if isinstance(layer, AttentionSite)
            for side, tap in (("k", layer.k), ("v", layer.v))
        ]

    def check(self) -> None:
        """Raise `AatcError` naming the first difference."""
        for part in self.parts:
            module = part.module
            if tuple(map(id, module._modules.values())) != part.children:
                raise _changed(f"the modules of {part.name or 'the model'} were replaced or added to (an adapter?)")
            if _adapters(module) != part.adapters:
                raise _changed(f"the adapters of {part.name} were switched")
            if _marks(module, part.moving) != part.marks:
                raise self._other(part)
            if module.training:
                _check_training(part.name, module)

    def same(self, other: ModelWatch) -> bool:
        """Whether another watch began with the model in the same state."""
        return self.parts == other.parts

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

    def _other(self, part: _Part) -> AatcError:
        """The error for tensors of a module that are not those they were."""
        now = next((tensor for tensor in _tensors(part.module, part.moving)), None)
        if now is not None and part.marks and now.dtype != part.marks[0][3]:
            return _changed(f"the model is {_short(now.dtype)} now and was {_short(part.marks[0][3])}")
        if now is not None and now.device != self.device:
            return _changed(f"the model lies on {now.device} now and lay on {self.device}")
        return _changed(f"the weights of {part.name or 'the model'} were changed")


def _part(name: str, module: nn.Module) -> _Part:
    moving = getattr(module, "rope_type", None) in _MOVING
    children = tuple(map(id, module._modules.values()))
    return _Part(name, module, moving, children, _marks(module, moving), _adapters(module))


def _tensors(module: nn.Module, moving: bool) -> list[Tensor]:
    found: list[Tensor] = [part for part in module._parameters.values() if part is not None]
    return found if moving else found + [part for part in module._buffers.values() if part is not None]


def _marks(module: nn.Module, moving: bool) -> tuple[_Mark, ...]:
    return tuple(
        (id(tensor), tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version, tensor.dtype)
        for tensor in _tensors(module, moving)
    )


def _adapters(module: nn.Module) -> str:
    """Which adapters act in a module, as the libraries that add them tell."""
    found = module.__dict__
    names = ("_active_adapter", "_disable_adapters", "merged_adapters")
    return repr([found[name] for name in names]) if names[0] in found else ""


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
