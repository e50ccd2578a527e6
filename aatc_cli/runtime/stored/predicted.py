"""The storage code as a code of chunks: layers predicted from those below, under an entropy code or of fixed size.

All of a chunk is one part, the first layer's: a layer is decoded from those below it, so no part of it stands alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from aatc_cli.core import SIDES, Side
from aatc_cli.core.stored_chunk import StoredCode
from aatc_cli.core.stored_layer import StoredLayer
from aatc_cli.models.adapter import debias, rebias
from aatc_cli.runtime.stored.code import Biases, Rows


class PredictedCode:
    """The storage code of a plan with prediction; of no fixed size, as far as chunks are concerned."""

    def __init__(self, layers: Sequence[StoredLayer], biases: Biases, heads: int) -> None:
        self.code, self.biases, self.heads = StoredCode(layers, heads), biases, heads
        self.rule = self.code.rule

    @classmethod
    def of(cls, codecs: Sequence[Mapping[Side, object]], biases: Biases, heads: int) -> PredictedCode | None:
        """Of the codecs of a plan; None where they are of another kind."""
        layers = [pair["k"] for pair in codecs]
        found = [layer for layer in layers if isinstance(layer, StoredLayer)]
        return cls(found, biases, heads) if len(found) == len(layers) else None

    @property
    def orders(self) -> int:
        """Orders of a layer, 0 in a plan of one class."""
        return self.rule.orders(self.heads) if self.rule.classes > 1 else 0

    def sizes(self, tokens: int) -> None:
        """Nothing is known before the tokens are."""

    def encode(self, rows: Rows, received: Tensor, first: int) -> list[Tensor]:
        """The bytes of the chunk, and nothing for the layers behind the first."""
        joined, classes = [], []
        for layer, bias in enumerate(self.biases):
            joined.append(torch.cat([debias(rows[side][layer], bias[side]) for side in SIDES], -1))
            classes.append(self.rule.classes_of(received[layer], first, layer))
        data = torch.frombuffer(bytearray(self.code.encode(joined, classes)), dtype=torch.uint8)
        return [data, *(data[:0] for _ in self.biases[1:])]

    def decode(self, parts: Sequence[Tensor], tokens: int) -> dict[Side, Tensor]:
        """The rows of a chunk."""
        joined, _ = self.code.decode(parts[0].cpu().numpy().tobytes())
        made: dict[Side, list[Tensor]] = {side: [] for side in SIDES}
        for rows, bias in zip(joined, self.biases, strict=True):
            for side, part in zip(SIDES, rows.chunk(2, -1), strict=True):
                made[side].append(rebias(part, bias[side]))
        return {side: torch.stack(made[side]) for side in SIDES}
