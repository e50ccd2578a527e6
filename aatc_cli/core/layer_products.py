"""What decoding and encoding a layer of the storage code takes, as few products of matrices in bfloat16.

Units are predicted from units, so a layer reads y = z W_below + y W + h D: rows h of its latents in units of their
size, D their decoding. W has no loops, so with G = (I - W)^-1

    y = [decoded layers below, h] M,   M = [W_below G; D G]        one product a layer

and what is coded of a layer x, the latents of every unit less what is told, is with A the encoding of coded channels

    t = x A - [decoded layers below] W_below G A - h S,   S = D G A without its blocks of one unit

where h goes unit by unit. Decoded layers are rounded to bfloat16, in the encoder as in a reader.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aatc_cli.core.cell_code import CellCode
from aatc_cli.core.stored_layer import StoredLayer

HELD = torch.bfloat16


class LayerProducts:
    """Matrices of one layer. columns [E]: of the 2 C numbers those with bits in any class; spans: of every unit."""

    def __init__(self, layer: StoredLayer) -> None:
        size, maps = 2 * layer.channels, layer.maps
        device = layer.codes[0].encode.device
        eye = torch.eye(size, dtype=torch.float64, device=device)
        encode, decode = torch.zeros_like(eye), torch.zeros_like(eye)
        columns, self.spans, at = [], [], 0
        for unit, code in zip(layer.units, layer.codes, strict=True):
            assert isinstance(code, CellCode)
            coded = (code.bits > 0).any(0)
            sigma = code.sigma.double()
            encode[unit.columns, unit.columns] = code.encode.double() / torch.where(
                sigma > 0, sigma, torch.ones_like(sigma)
            )
            decode[unit.columns, unit.columns] = code.decode.double() * sigma[:, None]
            columns.append(unit.columns.start + coded.nonzero()[:, 0])
            self.spans.append(slice(at, at + columns[-1].numel()))
            at += columns[-1].numel()
        self.columns = torch.cat(columns)
        within = maps.within.double() if maps.within.shape[0] else torch.zeros_like(eye)
        through = torch.linalg.inv(eye - within)
        encode, decode = encode[:, self.columns], decode[self.columns]
        told = maps.below.double() @ through
        self.layers = maps.layers
        self.squeeze = None if maps.squeeze is None else maps.squeeze.to(HELD)
        self.read = torch.cat((told, decode @ through)).to(HELD)
        self.take = torch.cat((encode, -(told @ encode))).to(HELD)
        across = decode @ through @ encode
        self.across = [across[: span.start, span].to(HELD).contiguous() for span in self.spans]

    def decode(self, below: Sequence[Tensor], latents: Tensor) -> Tensor:
        """The layer [T, 2 C] from decoded layers below, the nearest first, and latents [T, E] in units of their size.

        Without its mean, as those below, and in bfloat16.
        """
        found: Tensor = torch.cat((*self._seen(below), latents.to(HELD)), -1) @ self.read
        return found

    def targets(self, rows: Tensor, below: Sequence[Tensor]) -> Tensor:
        """What is coded of rows [T, 2 C], but for what units before each tell: [T, E]."""
        found: Tensor = torch.cat((rows.to(HELD), *self._seen(below)), -1) @ self.take
        return found

    def _seen(self, below: Sequence[Tensor]) -> Sequence[Tensor]:
        """Numbers that are read of the layers below."""
        read = list(below[: self.layers])
        return read if self.squeeze is None else [torch.cat(read, -1) @ self.squeeze]
