"""Other ways between pages, rows and bytes of stored chunks, which a device may be quicker at than torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from aatc_cli.core import Side
from aatc_cli.runtime.stored.code import Rows
from aatc_cli.runtime.stored.pages import Pages, Scales

# chunks, where the layers of each begin, positions of all tokens
Decode = Callable[[Sequence[memoryview], Sequence[Sequence[int]], Tensor, torch.dtype, Scales | None], Pages]
Encode = Callable[[Rows, Tensor, int], list[Tensor]]


class Opener(Protocol):
    """A way from pages to rows without rotation, of numbers of some types."""

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether it reads numbers of this type."""
        ...

    def __call__(self, pages: Pages, places: Tensor) -> dict[Side, Tensor]:
        """Rows [L, n, C] in float32 of pages at ``places``; raises `AatcError` for one that is not finite."""
        ...
