"""Pure mathematics: tensors in, tensors out; nothing here knows files, models or the command line.

Dimension letters used everywhere: B batch, L layer, H kv head, G query heads per kv head, T token, D head dim,
C = H * D channels of a site, N calibration tokens, E channels of one head group (C / groups).
A site is one cached stream, (layer, "k" or "v"). Shapes are written [B, H, T, D]; a row vector x maps to x @ M.
"""

from typing import Literal

Side = Literal["k", "v"]
SIDES: tuple[Side, Side] = ("k", "v")
