"""The codec of stored caches: whole chunks of an engine's pages as bytes, and back.

    encode(pages, positions) -> bytes        decode(bytes, positions) -> pages

A chunk is a function of its tokens' keys and values, of nothing before or after it. It has no exact window: all its
tokens are coded, but for the first tokens of a text (the plan's sinks), which the chunk at position 0 keeps exact. What
the codec was not made for it refuses with a `ChunkError`: another plan, model, version, position or name, and anything
that a checksum does not cover.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from aatc_cli.artifacts.manifest import digest_of
from aatc_cli.artifacts.plan import Plan
from aatc_cli.config import Geometry
from aatc_cli.core import SIDES, Side
from aatc_cli.errors import AatcError, UsageError
from aatc_cli.runtime.stored.code import Biases, ChunkCode, Rows, TileCode
from aatc_cli.runtime.stored.header import (
    NO_NAME,
    VERSION,
    ChunkError,
    ChunkHeader,
    aligned,
    assemble,
    head_bytes,
    measured,
)
from aatc_cli.runtime.stored.order import STAND_INS, StandIn
from aatc_cli.runtime.stored.pages import CODES, TYPES, Pages, Scales
from aatc_cli.runtime.stored.predicted_code import PredictedCode
from aatc_cli.runtime.stored.rotation import UNTURNED, Rotation, keys_off

CHUNK = 256
# of a chunk: whole tiles, at least one and at most four
CHUNKS = (64, 128, 192, 256)
Decode = Callable[[list[Tensor], Tensor, torch.dtype, Scales | None], Pages]
DecodeRun = Callable[[Tensor, Tensor, Tensor, torch.dtype, Scales | None], Pages]
Encode = Callable[[Rows, Tensor, int], list[Tensor]]
# threads that look after checksums of many chunks
_CHECKERS = 16


@dataclass(frozen=True)
class StoredCodec:
    """The codec of one plan, for chunks of ``tokens`` tokens.

    plan, model: 32 bytes that name them in every chunk. sinks: first tokens of a text that are kept exact. stand_in
    ranks the tokens of a tile where the caller has not seen what attention they received (`order`). scales: what
    numbers of 8-bit pages are worth. fast, run, coder: other ways to the pages of a chunk, to those of many, and to
    the bytes, the same but for rounding, where there are any.
    """

    geometry: Geometry
    code: ChunkCode
    rotation: Rotation
    plan: bytes
    model: bytes
    sinks: int
    tokens: int = CHUNK
    stand_in: StandIn = "key-norm"
    scales: Scales | None = None
    device: str = "cpu"
    fast: Decode | None = None
    run: DecodeRun | None = None
    coder: Encode | None = None

    @classmethod
    def of(cls, plan: Plan, rotation: Rotation, biases: Biases, *, tokens: int = CHUNK, device: str = "cpu") -> Self:
        """The codec of a plan for a model with this rotation and these biases by layer and side.

        Raises `AatcError` for a plan that has no packed form, `UsageError` for a chunk that is not 64 to 256 tokens.
        """
        if tokens not in CHUNKS:
            raise UsageError(f"chunks have {', '.join(map(str, CHUNKS))} tokens, not {tokens}", "choose one of these")
        geometry = plan.geometry
        before = {"pre-rope": True, "post-rope": False}[plan.recipe.coordinates]
        held: Biases = [dict.fromkeys(SIDES) if not before else one for one in biases]
        moved = [{side: None if bias is None else bias.to(device) for side, bias in one.items()} for one in held]
        return cls(
            geometry,
            _code_of(plan, moved, device),
            rotation if before else UNTURNED,
            bytes.fromhex(plan.digest),
            bytes.fromhex(digest_of([plan.model.config_hash, plan.model.weights_fingerprint])),
            plan.recipe.window.sinks,
            tokens,
            device=device,
        )

    @property
    def digest(self) -> str:
        """What two codecs that read each other's chunks share: plan, model, version, tokens of a chunk."""
        return digest_of([self.plan.hex(), self.model.hex(), VERSION, self.tokens, self.sinks])

    @property
    def raw_bytes(self) -> int:
        """Bytes of the pages of a chunk in numbers of 16 bits."""
        return 4 * self.geometry.layers * self.tokens * self.geometry.channels

    def nbytes(self, first: int = CHUNK, dtype: torch.dtype = torch.float16) -> int | None:
        """Bytes of the chunk that begins at position ``first``; None of a code of variable rate."""
        sizes = self.code.sizes(self.tokens)
        if sizes is None:
            return None
        exact = 2 * self._sinks(first) * self.geometry.layers * self.geometry.channels * dtype.itemsize
        return head_bytes(len(sizes) + 1) + sum(aligned(size) for size in (exact, *sizes))

    @torch.no_grad()
    def encode(
        self, pages: Pages, positions: Tensor | int, received: Tensor | None = None, name: bytes = NO_NAME
    ) -> bytes:
        """The chunk of whole ``pages`` [L, n, H, D] at ``positions`` [n], or from a first position on.

        received [L, orders, n]: attention that the tokens received, by which they are ranked; the stand-in without it.
        name: 32 bytes of the caller's own, which a reader can ask for. Raises `AatcError` for pages of another shape or
        type, or numbers that are not finite.
        """
        first = first_position(positions, self.tokens)
        return self.encode_run(pages, first, received, [name])[0]

    @torch.no_grad()
    def encode_run(
        self, pages: Pages, first: int, received: Tensor | None = None, names: Sequence[bytes] | None = None
    ) -> list[bytes]:
        """The chunks of neighbouring tokens from position ``first`` on, coded together; otherwise as `encode`."""
        geometry = self.geometry
        count = max(pages.shape[1] // self.tokens, 1)
        pages.check(geometry.layers, count * self.tokens, geometry.kv_heads, geometry.head_dim)
        places = torch.arange(first, first + count * self.tokens, device=self.device)
        moved = Pages(pages.keys.to(self.device), pages.values.to(self.device))
        rows = keys_off(moved.rows(self.scales), self.rotation, places, geometry.kv_heads)
        sinks = self._sinks(first)
        ranked = self._ranked(rows, received)
        # kept exact beside the tile: in it they must not take the place of a token that is not
        if sinks:
            rows = {side: part.index_fill(1, places[:sinks] - first, 0) for side, part in rows.items()}
            ranked[..., :sinks] = -torch.inf
        exact = memoryview(moved.exact(sinks))
        coded = [memoryview(part.cpu().numpy().tobytes()) for part in self._coded(rows, ranked, first, count)]
        layers, chunks = geometry.layers, []
        for index in range(count):
            parts = [exact if index == 0 else memoryview(b""), *coded[index * layers : (index + 1) * layers]]
            header = ChunkHeader(
                self.plan,
                self.model,
                NO_NAME if names is None else names[index],
                first + index * self.tokens,
                self.tokens,
                sinks if index == 0 else 0,
                CODES[pages.keys.dtype],
                measured(parts),
            )
            chunks.append(assemble(header, parts))
        return chunks

    def _coded(self, rows: Mapping[Side, Tensor], ranked: Tensor, first: int, count: int) -> list[Tensor]:
        """Bytes of every chunk and layer, chunk by chunk; tiles are coded together and cut."""
        if self.code.by_tile:
            coder = self.code.encode if self.coder is None else self.coder
            parts = [torch.chunk(part.cpu(), count) for part in coder(rows, ranked, first)]
            return [part[index] for index in range(count) for part in parts]
        found: list[Tensor] = []
        for index in range(count):
            span = slice(index * self.tokens, (index + 1) * self.tokens)
            mine = {side: part[:, span] for side, part in rows.items()}
            found += self.code.encode(mine, ranked[..., span], first + index * self.tokens)
        return found

    @torch.no_grad()
    def decode(
        self,
        data: bytes | memoryview,
        positions: Tensor | int,
        dtype: torch.dtype = torch.float16,
        name: bytes | None = None,
    ) -> Pages:
        """The pages [L, n, H, D] of a chunk at ``positions``, in numbers of ``dtype`` on the codec's device.

        Raises `ChunkError` for a chunk of anything else, or one that is damaged; ``name`` where it has another name.
        """
        view = memoryview(data).cast("B") if not isinstance(data, memoryview) else data
        first = first_position(positions, self.tokens)
        header = self.checked(view, first, name)
        starts = header.starts
        whole = torch.frombuffer(bytearray(view), dtype=torch.uint8).to(self.device)
        parts = [
            whole[start : start + length] for start, (length, _) in zip(starts[1:-1], header.parts[1:], strict=True)
        ]
        places = torch.arange(first, first + self.tokens, device=self.device)
        read = self._read if self.fast is None else self.fast
        pages = read(parts, places, dtype, self.scales)
        if header.sinks:
            pages.put_exact(view[starts[0] : starts[0] + header.parts[0][0]], TYPES[header.dtype], self.scales)
        return pages

    @torch.no_grad()
    def decode_run(
        self,
        chunks: Sequence[bytes | memoryview],
        first: int,
        dtype: torch.dtype = torch.float16,
        names: Sequence[bytes] | None = None,
    ) -> Pages:
        """The pages of neighbouring chunks from position ``first`` on, together; otherwise as `decode`."""
        views = [memoryview(data).cast("B") for data in chunks]
        firsts = [first + index * self.tokens for index in range(len(views))]
        asked = [None] * len(views) if names is None else list(names)
        if self.run is None or not views:
            pages = [self.decode(*each) for each in zip(views, firsts, [dtype] * len(views), asked, strict=True)]
            return Pages(torch.cat([one.keys for one in pages], 1), torch.cat([one.values for one in pages], 1))
        starts = torch.tensor([0, *map(len, views)]).cumsum(0)
        whole = torch.empty(int(starts[-1]), dtype=torch.uint8, pin_memory=self.device.startswith("cuda"))
        flat = whole.numpy()

        def taken(view: memoryview, place: int, name: bytes | None, start: int) -> ChunkHeader:
            header = self.checked(view, place, name)
            flat[start : start + len(view)] = np.frombuffer(view, dtype=np.uint8)
            return header

        with ThreadPoolExecutor(min(_CHECKERS, os.cpu_count() or 1)) as pool:
            headers = list(pool.map(taken, views, firsts, asked, starts[:-1].tolist()))
        begins = starts[:-1] + torch.tensor([header.starts[1] for header in headers])
        places = torch.arange(first, first + len(views) * self.tokens, device=self.device)
        found = self.run(whole.to(self.device, non_blocking=True), begins, places, dtype, self.scales)
        for view, header, index in zip(views, headers, range(0, len(views) * self.tokens, self.tokens), strict=True):
            if header.sinks:
                span = slice(index, index + self.tokens)
                mine = Pages(found.keys[:, span], found.values[:, span])
                start = header.starts[0]
                mine.put_exact(view[start : start + header.parts[0][0]], TYPES[header.dtype], self.scales)
        return found

    def checked(self, view: memoryview, first: int, name: bytes | None = None) -> ChunkHeader:
        """The head of a chunk that this codec can decode at position ``first``; raises `ChunkError`."""
        header = ChunkHeader.read(view)
        pairs: tuple[tuple[str, bytes | int, bytes | int], ...] = (
            ("plan", header.plan, self.plan),
            ("model", header.model, self.model),
            ("name", header.name, header.name if name is None else name),
            ("length", header.tokens, self.tokens),
            ("position", header.first, first),
            ("number of sinks", header.sinks, self._sinks(first)),
        )
        for what, found, wanted in pairs:
            if found != wanted:
                shown = f": {found:d}, not {wanted:d}" if isinstance(found, int) and isinstance(wanted, int) else ""
                raise ChunkError(f"a stored chunk is of another {what}{shown}", "compute its tokens again")
        sizes = self.code.sizes(self.tokens)
        lengths = [length for length, _ in header.parts]
        exact = 2 * header.sinks * self.geometry.layers * self.geometry.channels
        kind = TYPES.get(header.dtype)
        if (
            kind is None
            or len(lengths) != self.geometry.layers + 1
            or lengths[0] != exact * kind.itemsize
            or (sizes is not None and lengths[1:] != sizes)
        ):
            raise ChunkError("a stored chunk has parts of another size than its plan", "compute its tokens again")
        header.require_parts(view)
        return header

    def _read(self, parts: list[Tensor], places: Tensor, dtype: torch.dtype, scales: Scales | None) -> Pages:
        """Pages by way of the code itself, in torch."""
        rows = self.code.decode(parts, self.tokens)
        heads = self.geometry.kv_heads
        keys = self.rotation.put_on(torch.unflatten(rows["k"], -1, (heads, -1)), places)
        return Pages.of_rows({"k": keys.flatten(2), "v": rows["v"]}, heads, dtype, scales)

    def _ranked(self, rows: Mapping[Side, Tensor], received: Tensor | None) -> Tensor:
        """What the tokens are ranked by: [L, orders, n]."""
        layers, orders, tokens = self.geometry.layers, self.code.orders, rows["k"].shape[1]
        if not orders:
            return torch.zeros(layers, 1, tokens, device=self.device)
        if received is None:
            found = [
                STAND_INS[self.stand_in](layer, {side: rows[side][layer.layer] for side in SIDES})
                for layer in self.code.layers
            ]
            return torch.stack(found).clone()
        if tuple(received.shape) != (layers, orders, tokens):
            raise AatcError(
                f"attention received is {list(received.shape)}, a chunk has {[layers, orders, tokens]}",
                "give it for every layer, order and token, or leave it out",
            )
        return received.to(self.device, torch.float32, copy=True)

    def _sinks(self, first: int) -> int:
        return min(max(self.sinks - first, 0), self.tokens)


def _code_of(plan: Plan, biases: Biases, device: str) -> ChunkCode:
    """The code of a plan's chunks: layer by layer where layers are predicted, else tiles."""
    if not plan.recipe.choices.prediction.predicts:
        return TileCode.of(plan.codecs(device), biases, plan.geometry.kv_heads)
    codecs = plan.simulated_codecs(device)
    return PredictedCode([layer["k"] for layer in codecs], biases, plan.geometry.kv_heads)


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
