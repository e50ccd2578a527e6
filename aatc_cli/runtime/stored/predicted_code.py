"""The code of chunks that predicts a layer from those below it: of fixed size, or entropy-coded."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from aatc_cli.core import SIDES, Side
from aatc_cli.core.entropy_coder import tables_digest
from aatc_cli.core.stored_chunk import StoredCode
from aatc_cli.core.stored_layer import StoredLayer
from aatc_cli.core.stored_planes import LayerPlanes
from aatc_cli.errors import AatcError
from aatc_cli.models.adapter import debias, rebias
from aatc_cli.runtime.stored.code import Biases, Rows
from aatc_cli.runtime.stored.compiled_chunk import CompiledChunk
from aatc_cli.runtime.stored.compiled_layer import loops_available
from aatc_cli.runtime.tiles.layer import TileLayer

_DIGEST = struct.Struct("<I")


class _Nothing:
    """The form of tiles that are only ranked here."""

    nbytes = 0

    def pack(self, latents: Mapping[Side, Tensor], classes: Tensor) -> Tensor:
        """Never."""
        raise NotImplementedError

    def unpack(self, data: Tensor) -> tuple[dict[Side, Tensor], Tensor]:
        """Never."""
        raise NotImplementedError


class PredictedCode:
    """Chunks of the layers of a storage code. layers: by what tokens are ranked where nobody saw what they received.

    Codes of variable length have a checksum of their tables in front of the first layer. On a CPU with numba they are
    written and read in machine code.
    """

    by_tile = False

    def __init__(self, stored: Sequence[StoredLayer], biases: Biases, heads: int) -> None:
        self.code, self.heads, self.biases = StoredCode(stored, heads), heads, list(biases)
        self.chunks: StoredCode | CompiledChunk = self.code
        if self.code.variable and loops_available() and stored[0].codes[0].encode.device.type == "cpu":
            self.chunks = CompiledChunk(stored, heads)
        self.layers: Sequence[TileLayer] = [
            TileLayer(place, layer.codecs, bias, layer.rule, heads, _Nothing())
            for place, (layer, bias) in enumerate(zip(stored, biases, strict=True))
        ]
        if any(layer.hides for layer in stored):
            raise AatcError(
                "a code that reads no layer below leaves tokens out of attention, which pages cannot say",
                "store caches of a plan that predicts from layers below, or of one without prediction",
            )

    @property
    def orders(self) -> int:
        """Orders of a layer, 0 in a plan of one class."""
        rule = self.code.rule
        return rule.orders(self.heads) if rule.classes > 1 else 0

    def sizes(self, tokens: int) -> list[int] | None:
        """Bytes of every layer; None of codes of variable length."""
        if self.code.variable:
            return None
        return [packing.nbytes(tokens) for packing in self.code.packings if isinstance(packing, LayerPlanes)]

    def encode(self, rows: Rows, received: Tensor, first: int) -> list[Tensor]:
        """Bytes of every layer, coded one after another from the lowest up; variable codes take those of the plan."""
        self.code.check(rows["k"].shape[1])
        mine, classes = [], []
        for place, layer in enumerate(self.code.layers):
            mine.append(torch.cat([debias(rows[side][place], self.biases[place][side]) for side in SIDES], -1))
            classes.append(layer.rule.classes_of(received[place], first, place))
        parts = self.chunks.parts(mine, classes)
        if self.code.variable:
            parts[0] = _DIGEST.pack(tables_digest()) + parts[0]
        return [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in parts]

    def decode(self, parts: Sequence[Tensor], tokens: int) -> dict[Side, Tensor]:
        """Rows as attention would read them, but for the rotation."""
        data = [part.cpu().numpy().tobytes() for part in parts]
        if self.code.variable:
            if data[0][: _DIGEST.size] != _DIGEST.pack(tables_digest()):
                raise AatcError("these codes were written under other likelihoods", "compute the tokens again")
            data[0] = data[0][_DIGEST.size :]
        rows, _ = self.chunks.read(data, tokens)
        made: dict[Side, list[Tensor]] = {side: [] for side in SIDES}
        for decoded, bias in zip(rows, self.biases, strict=True):
            for side, part in zip(SIDES, decoded.chunk(2, -1), strict=True):
                made[side].append(rebias(part, bias[side]))
        return {side: torch.stack(made[side]) for side in SIDES}
