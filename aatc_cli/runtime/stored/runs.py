"""Runs of neighbouring chunks: where they begin, and work that is done for many of them at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from aatc_cli.errors import AatcError

Found = TypeVar("Found")


# threads that look after checksums of many chunks, and bytes below which one does
_CHECKERS, _ALONE = 16, 1 << 23


def mapped(work: Callable[..., Found], nbytes: int, *arguments: Iterable[Any]) -> list[Found]:
    """What ``work`` gives for every chunk; many at once where there is much to read.

    Checksums are taken and bytes copied without the interpreter's lock.
    """
    if nbytes < _ALONE:
        return list(map(work, *arguments))
    with ThreadPoolExecutor(min(_CHECKERS, os.cpu_count() or 1)) as pool:
        return list(pool.map(work, *arguments))


def first_position(positions: Tensor | int, tokens: int) -> int:
    """The first of ``tokens`` positions; raises `AatcError` unless they follow one another."""
    if isinstance(positions, int):
        first = positions
    else:
        if positions.dim() != 1 or positions.numel() != tokens:
            raise AatcError(f"a chunk has {tokens} positions, not {list(positions.shape)}", "give whole chunks")
        first = int(positions[0])
        if not torch.equal(positions.cpu().to(torch.int64), first + torch.arange(tokens)):
            raise AatcError("the positions of a chunk do not follow one another", "give neighbouring tokens")
    if not 0 <= first < 1 << 62:
        raise AatcError(f"{first} is no position", "count positions from 0")
    return first
