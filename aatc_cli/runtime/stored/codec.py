"""The codec of stored caches: whole chunks of an engine's pages as bytes, and back.

    encode(pages, positions) -> bytes        decode(bytes, positions) -> pages

A chunk is a function of its tokens' keys and values, of nothing before or after it. It has no exact window: all its
tokens are coded, but for the first tokens of a text (the plan's sinks), which the chunk at position 0 keeps exact. What
the codec was not made for it refuses with a `ChunkError`: another plan, model, version, position or name, and anything
that a checksum does not cover.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from aatc_cli.artifacts.manifest import digest_of
from aatc_cli.artifacts.plan import Plan
from aatc_cli.config import Geometry
from aatc_cli.core import SIDES, Side
from aatc_cli.errors import UsageError
from aatc_cli.runtime.stored.code import Biases, ChunkCode
from aatc_cli.runtime.stored.header import NO_NAME, VERSION, ChunkHeader, aligned, assemble, head_bytes, measured
from aatc_cli.runtime.stored.order import STAND_INS, StandIn, ranked_by
from aatc_cli.runtime.stored.pages import CODES, TYPES, Pages, Scales
from aatc_cli.runtime.stored.plan_code import code_of
from aatc_cli.runtime.stored.rotation import UNTURNED, Rotation, keys_off
from aatc_cli.runtime.stored.runs import first_position, mapped
from aatc_cli.runtime.stored.ways import Decode, Encode, Opener

CHUNK = 256
# of a chunk: whole tiles, at least one and at most four
CHUNKS = (64, 128, 192, 256)


@dataclass(frozen=True)
class StoredCodec:
    """The codec of one plan, for chunks of ``tokens`` tokens.

    plan, model: 32 bytes that name them in every chunk. sinks: first tokens of a text that are kept exact. stand_in
    ranks the tokens of a tile where the caller has not seen what attention they received (`order`). scales: what
    numbers of 8-bit pages are worth. fast, coder, opener: other ways to the pages of chunks, to their bytes, and from
    pages to rows, the same but for rounding, where there are any.
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
    coder: Encode | None = None
    opener: Opener | None = None

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
            code_of(plan, moved, device),
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
        rows = self._rows(moved, places)
        sinks = self._sinks(first)
        ranked = ranked_by(self.code, rows, received, STAND_INS[self.stand_in])
        # kept exact beside the tile: in it they must not take the place of a token that is not
        if sinks:
            for part in rows.values():
                part[:, :sinks] = 0
            ranked[..., :sinks] = -torch.inf
        exact = memoryview(moved.exact(sinks))

        def chunk(index: int, coded: Sequence[memoryview]) -> bytes:
            parts = [exact if index == 0 else memoryview(b""), *coded]
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
            return assemble(header, parts)

        coded = self._coded(rows, ranked, first, count)
        return mapped(chunk, sum(len(part) for parts in coded for part in parts), range(count), coded)

    def _rows(self, pages: Pages, places: Tensor) -> dict[Side, Tensor]:
        """Rows of pages without rotation, which may be written to."""
        if self.opener is not None and self.scales is None and self.opener.takes(pages.keys.dtype):
            return self.opener(pages, places)
        rows = keys_off(pages.rows(self.scales), self.rotation, places, self.geometry.kv_heads)
        alike = pages.keys.dtype == torch.float32 and self.scales is None
        return {side: part.clone() for side, part in rows.items()} if alike else rows

    def _coded(self, rows: Mapping[Side, Tensor], ranked: Tensor, first: int, count: int) -> list[list[memoryview]]:
        """Bytes of the layers of every chunk; tiles are coded together and cut."""
        if self.code.by_tile:
            coder = self.code.encode if self.coder is None else self.coder
            layers: list[Any] = [part.cpu().view(count, -1).numpy() for part in coder(rows, ranked, first)]
            return [[memoryview(layer[index]) for layer in layers] for index in range(count)]
        found = []
        for index in range(count):
            span = slice(index * self.tokens, (index + 1) * self.tokens)
            mine = {side: part[:, span] for side, part in rows.items()}
            parts = self.code.encode(mine, ranked[..., span], first + index * self.tokens)
            whole: list[Any] = [part.cpu().numpy() for part in parts]
            found.append([memoryview(part) for part in whole])
        return found

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
        return self.decode_run([data], first_position(positions, self.tokens), dtype, None if name is None else [name])

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
        headers = mapped(self.checked, sum(map(len, views)), views, firsts, asked)
        starts = [header.starts for header in headers]
        places = torch.arange(first, first + len(views) * self.tokens, device=self.device)
        if self.fast is not None:
            found = self.fast(views, [begins[1:-1] for begins in starts], places, dtype, self.scales)
        else:
            parts = [
                self._read(*each, dtype) for each in zip(views, headers, torch.split(places, self.tokens), strict=True)
            ]
            found = parts[0] if len(parts) == 1 else Pages.joined(parts)
        for index, (view, header) in enumerate(zip(views, headers, strict=True)):
            if header.sinks:
                exact = view[header.nbytes : header.nbytes + header.parts[0][0]]
                found.part(index * self.tokens, self.tokens).put_exact(exact, TYPES[header.dtype], self.scales)
        return found

    def checked(self, view: memoryview, first: int, name: bytes | None = None) -> ChunkHeader:
        """The head of a chunk that this codec can decode at position ``first``; raises `ChunkError`."""
        header = ChunkHeader.read(view)
        header.require(
            plan=self.plan, model=self.model, name=name, tokens=self.tokens, first=first, sinks=self._sinks(first)
        )
        kind, exact = TYPES.get(header.dtype), 2 * header.sinks * self.geometry.layers * self.geometry.channels
        sinks = None if kind is None else exact * kind.itemsize
        header.require_sizes(self.geometry.layers, sinks, self.code.sizes(self.tokens))
        header.require_parts(view)
        return header

    def _read(self, view: memoryview, header: ChunkHeader, places: Tensor, dtype: torch.dtype) -> Pages:
        whole = torch.frombuffer(bytearray(view), dtype=torch.uint8).to(self.device)
        spans = zip(header.starts[1:-1], header.parts[1:], strict=True)
        parts = [whole[start : start + length] for start, (length, _) in spans]
        rows = self.code.decode(parts, self.tokens)
        keys = self.rotation.put_on(torch.unflatten(rows["k"], -1, (self.geometry.kv_heads, -1)), places)
        return Pages.of_rows({"k": keys.flatten(2), "v": rows["v"]}, self.geometry.kv_heads, dtype, self.scales)

    def _sinks(self, first: int) -> int:
        return min(max(self.sinks - first, 0), self.tokens)
