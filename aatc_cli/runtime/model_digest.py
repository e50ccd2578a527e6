"""Digest of a live model: of every number of its weights, quick enough to be taken whenever a cache is saved."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from aatc_cli.artifacts.manifest import digest_of
from aatc_cli.runtime.watch import MOVING

# words of eight bytes that are summed at once, which bounds the memory it takes
_WORDS = 1 << 22


def model_digest(model: nn.Module) -> str:
    """sha256 over name, shape, dtype and two sums of every parameter and buffer.

    The sums are of all bytes, as words of eight, once as they are and once each times an odd number of its own: any
    change of one number changes the second. Frequencies that move with the length are left out.
    """
    found = []
    for name, module in model.named_modules():
        moving = getattr(module, "rope_type", None) in MOVING
        for place in (module._parameters, {} if moving else module._buffers):
            for label, tensor in place.items():
                if tensor is not None:
                    shape, dtype = list(tensor.shape), str(tensor.dtype)
                    found.append([f"{name}.{label}", shape, dtype, *byte_sums(tensor.detach())])
    return digest_of(sorted(found, key=lambda one: str(one[0])))


def byte_sums(tensor: Tensor) -> tuple[int, int]:
    """Sums modulo 2^64 of the words of a tensor's bytes, plain and times 1, 3, 5, ..."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    words = torch.nn.functional.pad(data, (0, -data.numel() % 8)).view(torch.int64)
    plain, weighted = 0, 0
    for start in range(0, words.numel(), _WORDS):
        part = words[start : start + _WORDS]
        odd = 2 * torch.arange(start, start + part.numel(), device=part.device) + 1
        plain, weighted = plain + int(part.sum()), weighted + int((part * odd).sum())
    return plain % (1 << 64), weighted % (1 << 64)
