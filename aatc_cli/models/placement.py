"""Where the parts of a model lie that accelerate has spread over devices, or keeps in main memory or on disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from aatc_cli.errors import AatcError


@contextmanager
def at_hand(module: nn.Module) -> Iterator[None]:
    """While the block lasts, the module's own parameters are on the device it computes on.

    accelerate brings those that it keeps elsewhere for the length of a forward pass alone. Tensors taken from them in
    the block stay as they are after it.
    """
    if getattr(module, "_hf_hook", None) is None:
        yield
        return
    from accelerate.utils.modeling import align_module_device

    with align_module_device(module):
        yield


def find_device(name: str) -> torch.device:
    """The device named by ``--device``; raises `AatcError` for one that is not there."""
    try:
        wanted = torch.device(name)
    except RuntimeError:
        wanted = torch.device("meta")
    if wanted.type not in ("cpu", "cuda"):
        raise AatcError(f"device {name!r} is neither a CPU nor a CUDA device", "use --device cpu, cuda or cuda:1")
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        problem = f"device {name} was asked for, but the CUDA devices that torch sees are {torch.cuda.device_count()}"
        raise AatcError(problem, "use --device cpu")
    return wanted


def device_of(module: nn.Module) -> torch.device:
    """The device on which a module that has parameters of its own computes."""
    device = next(module.parameters(recurse=False)).device
    if device.type != "meta":
        return device
    hook: Any = getattr(module, "_hf_hook", None)
    return torch.device(getattr(hook, "execution_device", None) or "cpu")


def input_device(model: Any) -> torch.device:
    """The device that takes a model's tokens."""
    return device_of(model.get_input_embeddings())
