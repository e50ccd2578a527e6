"""Sizes of a tile, which bytes and memory are counted from without torch."""

from __future__ import annotations

# tokens of a tile
TILE = 64
# a row block of a matrix instruction: quotas are multiples of it
ROWS = 16
# groups of neighbouring ranks in which costs are measured: the finest that quotas can part
RANKS = TILE // ROWS
