"""What the fused stores of all layers of one group of sequences share: counters, angles and kernels on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from aatc_cli.core.tiles import TILE
from aatc_cli.runtime.fused.static import FusedStatic
from aatc_cli.runtime.kernels.angles import slot_angles, tile_angles
from aatc_cli.runtime.kernels.append import Appender
from aatc_cli.runtime.kernels.decode import DecodeCall, Decoder, DecodeShape, Turns


class FusedShared:
    """Counters of a group as its kernels read them. Layers move them in turn; the first one there does the work.

    tokens, tiles, hidden int32 [B]: cached tokens, packed tiles, first visible token. ``count`` and ``packed`` are what
    they hold, on the host; ``offset`` is the position of the first token.
    """

    def __init__(self, form: FusedStatic, batch: int, max_tiles: int) -> None:
        self.form, self.batch, self.max_tiles = form, batch, max_tiles
        self.count = self.packed = self.offset = 0
        device = form.frequencies.device
        self.tokens, self.tiles, self.hidden = (torch.zeros(batch, dtype=torch.int32, device=device) for _ in range(3))
        self.slot_angles = slot_angles(form.frequencies, torch.zeros(form.slots, device=device))
        self.tile_angles = tile_angles(form.frequencies, form.window.sinks, max_tiles)
        self.token_angles = [layer.tables.token_angles(form.frequencies) for layer in form.layers]
        self.kernels = FusedKernels(form, batch, max_tiles) if device.type == "cuda" else None

    def move(self, tokens: int, packed: int) -> None:
        """Bring the counters and the angles of exact tokens to ``tokens`` cached tokens, ``packed`` of them in tiles.

        To the next token it is the same work on the device every time, so that a step can be captured.
        """
        if (tokens, packed) == (self.count, self.packed):
            return
        if tokens == self.count + 1 and packed >= self.packed:
            sinks, ring = self.form.window.sinks, self.form.window.recent
            index = self.tokens[:1].to(torch.int64)
            slot = torch.where(index < sinks, index, sinks + (index - sinks) % ring)
            self.slot_angles.index_copy_(0, slot, slot_angles(self.form.frequencies, index + self.offset))
            self.tokens += 1
            excess = (self.tokens - (sinks + ring)).clamp_min(0)
            # what a step back has left packed stays so
            self.tiles.copy_(torch.maximum(self.tiles, (excess + TILE - 1) // TILE))
            self.count, self.packed = tokens, packed
        else:
            self._jump(tokens, packed)

    def turn(self, offset: int) -> None:
        """Let the first token be at position ``offset``."""
        if offset != self.offset:
            self.offset = offset
            self.tile_angles = tile_angles(self.form.frequencies, self.form.window.sinks + offset, self.max_tiles)
            self._jump(self.count, self.packed)

    def grow(self, max_tiles: int) -> None:
        """Make angles and kernels for ``max_tiles`` tiles."""
        if max_tiles != self.max_tiles:
            self.max_tiles = max_tiles
            self.tile_angles = tile_angles(self.form.frequencies, self.form.window.sinks + self.offset, max_tiles)
            if self.kernels is not None:
                self.kernels = FusedKernels(self.form, self.batch, max_tiles)

    @property
    def counters(self) -> tuple[Tensor, Tensor, Tensor]:
        """Cached tokens, packed tiles and the first visible token of every sequence, int32 [B] each."""
        return self.tokens, self.tiles, self.hidden

    def turns(self, place: int) -> Turns:
        """Angles for the layer at ``place``."""
        return Turns(self.form.frequencies, self.tile_angles, self.token_angles[place], self.slot_angles)

    def _jump(self, tokens: int, packed: int) -> None:
        window, device = self.form.window, self.tokens.device
        self.count, self.packed = tokens, packed
        self.tokens.fill_(tokens)
        self.tiles.fill_(packed // TILE)
        recent = torch.arange(min(window.sinks + packed, tokens), tokens, device=device)
        index = torch.cat((torch.arange(min(window.sinks, tokens), device=device), recent))
        slots = torch.where(index < window.sinks, index, window.sinks + (index - window.sinks) % window.recent)
        self.slot_angles[slots] = slot_angles(self.form.frequencies, index + self.offset)


class FusedKernels:
    """The compiled kernels of one cache shape."""

    def __init__(self, form: FusedStatic, batch: int, max_tiles: int) -> None:
        device, tables = form.frequencies.device, [layer.tables for layer in form.layers]
        self.append = Appender(form.dim, form.window.sinks, form.dtype, device)
        head = max(int((table.offsets[1:] - table.offsets[:-1]).max()) for table in tables)
        self.by_shape: dict[tuple[int, int, int], Decoder] = {}
        for table in tables:
            kind = table.tile_bytes, table.key.steps, table.key.kinds
            if kind not in self.by_shape:
                shape = DecodeShape(
                    batch,
                    form.kv_heads,
                    form.heads // form.kv_heads,
                    form.dim,
                    form.slots,
                    form.window.sinks,
                    max_tiles,
                    table.tile_bytes,
                    head,
                    table.fast,
                    table.key.halves,
                    table.key.steps,
                    table.key.kinds,
                    form.scaling,
                )
                self.by_shape[kind] = Decoder(shape, form.dtype, device)

    def decode(self, call: DecodeCall, out: Tensor) -> Tensor:
        """Decode attention into ``out`` with the launch made for this layer's tile size."""
        tables = call.tables
        return self.by_shape[tables.tile_bytes, tables.key.steps, tables.key.kinds](call, out)
