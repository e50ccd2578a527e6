"""What the objects of the axes are handed: tensors to read, a site to make a codec of, widths to count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from aatc_cli.config import Geometry, HeadGroups
    from aatc_cli.core import Side
    from aatc_cli.core.layout import Widths


class Tensors(Protocol):
    """Tensors of a Transform by name, each checked as it is read (`artifacts.artifact.Artifact` is one)."""

    @property
    def path(self) -> Path:
        """Where they lie."""
        ...

    def holds(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        ...

    def floats(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """Finite floats of ``shape`` (-1: any length); raises `ArtifactError` when they are something else."""
        ...

    def numbers(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
        """Floats of ``shape`` in float64, of which some may be infinite; raises `ArtifactError` as `floats`."""
        ...

    def damaged(self, reason: str) -> Exception:
        """The error for tensors that must not be used."""
        ...


# makes the codec of a library's quantizer at a width for so many heads, coded so many tokens at a time
Library = Callable[[Any, int, int, int], Any]


@dataclass(frozen=True)
class Site:
    """One site of a Plan and the tensors of its Transform: what a codec is made of.

    widths [C]; groups: head groups of this side. starts [C]: 1 where a block of one precision begins, where there are
    such. group: members of a quantizer's group where the allocator decides. packaged: makes codecs of other packages.
    """

    tensors: Tensors
    layer: int
    side: Side
    geometry: Geometry
    groups: int
    widths: Sequence[int]
    starts: Sequence[int] | None = None
    group: int | None = None
    packaged: Library | None = None

    def read(self, part: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor ``part`` of this site; raises `ArtifactError` as `Tensors.floats`."""
        import torch

        return torch.from_numpy(self.tensors.floats(f"layers.{self.layer}.{self.side}.{part}", shape))

    def matrices(self) -> tuple[Tensor, Tensor]:
        """Encode and decode of every head group, [groups, E, E]."""
        size = self.geometry.channels // self.groups
        shape = (self.groups, size, size)
        return self.read("encode", shape), self.read("decode", shape)


@dataclass(frozen=True)
class PlannedWidths:
    """What a plan says: bits[class][layer][side] [C], blocks of one precision over all sites, share of tokens kept."""

    bits: Sequence[Widths]
    blocks: int = 0
    keep: float = 1.0


@dataclass(frozen=True)
class Sites:
    """All sites of a Plan: bits[layer][side] [C] of one class of tokens, and where blocks of one precision begin."""

    tensors: Tensors
    geometry: Geometry
    groups: HeadGroups
    bits: Widths
    starts: Widths | None = None
    packaged: Library | None = None

    def of(self, layer: int, side: Side) -> Site:
        """One of them."""
        return Site(
            self.tensors,
            layer,
            side,
            self.geometry,
            self.groups.of(side),
            self.bits[layer][side],
            None if self.starts is None else self.starts[layer][side],
            packaged=self.packaged,
        )
