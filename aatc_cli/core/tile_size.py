"""Size of a tile in tokens, and of the parts in which its ranks are counted."""

from __future__ import annotations

TILE = 64
# a row block of a matrix instruction: quotas are multiples of it
ROWS = 16
# groups of neighbouring ranks in which costs are measured: the finest that quotas can part
RANKS = TILE // ROWS
