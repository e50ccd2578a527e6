"""Transfers between an engine's blocks and chunks in host memory, of whichever version of vLLM asks for them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aatc_cli.console import say
from aatc_cli.core import SIDES
from aatc_cli.errors import AatcError
from aatc_cli.runtime.stored.codec import StoredCodec
from aatc_cli.runtime.stored.pages import Pages

Blocks = NDArray[np.int64]
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Places:
    """Slots of chunks, the position of the first token of each, and its key."""

    slots: Sequence[int]
    firsts: Sequence[int]
    keys: Sequence[bytes]

    @property
    def names(self) -> list[bytes]:
        """32 bytes that name every chunk in its head."""
        return [hashlib.sha256(key).digest() for key in self.keys]

    def neighbours(self, tokens: int) -> bool:
        """Whether they follow one another in a text, in chunks of so many tokens."""
        return list(self.firsts) == [self.firsts[0] + index * tokens for index in range(len(self.firsts))]


class ChunkTransfers:
    """Chunks by slot. One thread codes and decodes, so that the model goes on; jobs are done in their order.

    orders: how the numbers of a block lie in a layer's own tensor, and in one of all layers: K keys and values, N
    tokens, H heads, D numbers of a head, L layers; none where the engine has no such tensors. Raises `AatcError` for
    blocks of another size. What the codec does not take is kept as it is.
    """

    def __init__(
        self, codec: StoredCodec, kv_caches: Any, tokens_per_block: int, dtype: str, orders: tuple[str, str]
    ) -> None:
        self.codec, self.block = codec, tokens_per_block
        if dtype not in _DTYPES:
            raise AatcError(f"a cache of {dtype} is not stored by this plugin", "serve with a cache of 16 bits")
        self.dtype = _DTYPES[dtype]
        self.views = self._views(kv_caches, orders)
        self.slots: dict[int, bytes | Pages] = {}
        self.jobs: dict[int, Future[bool]] = {}
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="aatc-vllm")
        self.device = self.views[0].device
        cuda: Any = torch.cuda
        self.stream = cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.moved = {"stored": 0, "loaded": 0}

    def store(self, job: int, block_ids: Blocks, held: Places) -> None:
        """Code whole chunks of blocks into their slots."""
        # a copy in the order of the stream: the blocks are written again before the thread has read them
        pages = [self._read(ids) for ids in self._chunks(block_ids)]
        self._submit(job, lambda: self._store(pages, held))

    def load(self, job: int, block_ids: Blocks, skipped: int, held: Places) -> None:
        """Decode chunks from their slots into blocks; ``skipped`` blocks of the first chunk are there already."""
        ids = np.array(block_ids, dtype=np.int64)
        self._submit(job, lambda: self._load(ids, skipped, held))

    def finished(self) -> Iterator[tuple[int, BaseException | None]]:
        """Jobs that ended since the last call, and what went wrong."""
        for job in [job for job, future in self.jobs.items() if future.done()]:
            yield job, self.jobs.pop(job).exception()

    def wait(self, jobs: set[int]) -> None:
        """Wait for jobs."""
        for job in jobs:
            if job in self.jobs:
                self.jobs[job].exception()

    def shutdown(self) -> None:
        """End the thread."""
        self.pool.shutdown(wait=True)

    def _submit(self, job: int, work: Callable[[], None]) -> None:
        event = None
        if self.stream is not None:
            event = torch.cuda.current_stream(self.device).record_event()

        def run() -> bool:
            # blocks may have been made in that mode, in which alone they can then be written
            with torch.inference_mode(), self._on_stream(event):
                work()
            return True

        self.jobs[job] = self.pool.submit(run)

    @contextmanager
    def _on_stream(self, event: Any) -> Iterator[None]:
        """The thread's own stream, behind what the model had been told to do; at the end all of it is done."""
        if self.stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            self.stream.wait_event(event)
            try:
                yield
            finally:
                self.stream.synchronize()

    def _store(self, pages: list[Pages], held: Places) -> None:
        try:
            chunks: list[bytes] | list[Pages] = self._coded(pages, held)
        except AatcError as error:
            say(f"aatc: {error}; its pages are kept as they are")
            chunks = [Pages(page.keys.cpu(), page.values.cpu()) for page in pages]
        self.slots |= dict(zip(held.slots, chunks, strict=True))
        self.moved["stored"] += len(pages)

    def _coded(self, pages: list[Pages], held: Places) -> list[bytes]:
        """Chunks of pages, together where they are neighbours."""
        names = held.names
        if pages and held.neighbours(self.codec.tokens):
            both = (torch.cat([page.of(side) for page in pages], 1) for side in SIDES)
            return self.codec.encode_run(Pages(*both), held.firsts[0], names=names)
        found = zip(pages, held.firsts, names, strict=True)
        return [self.codec.encode(page, first, name=name) for page, first, name in found]

    def _load(self, block_ids: Blocks, skipped: int, held: Places) -> None:
        start, per_chunk = -skipped, self.codec.tokens // self.block
        for pages in self._decoded(held):
            count = pages.shape[1] // self.block
            mine = np.arange(max(start, 0), min(start + count, len(block_ids)))
            self._write(pages, block_ids[mine], mine - start)
            self.moved["loaded"] += count // per_chunk
            start += count

    def _decoded(self, held: Places) -> Iterator[Pages]:
        """Pages of chunks, together where they are neighbours in the code."""
        kept = [self.slots[slot] for slot in held.slots]
        chunks = [data for data in kept if isinstance(data, bytes)]
        if chunks and len(chunks) == len(kept) and held.neighbours(self.codec.tokens):
            yield self.codec.decode_run(chunks, held.firsts[0], self.dtype, held.names)
            return
        for data, first, name in zip(kept, held.firsts, held.names, strict=True):
            yield self.codec.decode(data, first, self.dtype, name) if isinstance(data, bytes) else data

    def _views(self, kv_caches: Any, orders: tuple[str, str]) -> list[Tensor]:
        """Every layer's blocks as numbers [blocks, 2, tokens, H, D], however they lie."""
        [refs], g = kv_caches.group_data_refs, self.codec.geometry
        wanted = 2 * self.block * g.channels * self.dtype.itemsize
        found = {ref.page_size_bytes for ref in refs}
        together = len(refs) == 1 and g.layers > 1 and found == {wanted * g.layers}
        order = orders[1] if together else orders[0]
        if not order or not (together or (len(refs) == g.layers and found == {wanted})):
            raise AatcError(
                f"{len(refs)} layers with pages of {sorted(found)} bytes are not the plan's {g.layers} of {wanted}",
                "serve the plan's model with one tensor of keys and values for every layer",
            )
        sizes = {"L": g.layers, "K": 2, "N": self.block, "H": g.kv_heads, "D": g.head_dim}
        axes = [1 + order.index(axis) for axis in "LKNHD" if axis in order]
        views = []
        for ref in refs:
            flat = kv_caches.tensors[ref.tensor_idx].tensor.view(torch.int8).flatten(1)
            numbers = flat[:, : ref.page_size_bytes].view(self.dtype)
            views.append(torch.unflatten(numbers, 1, [sizes[axis] for axis in order]).permute(0, *axes))
        return list(views[0].unbind(1)) if together else views

    def _chunks(self, block_ids: Blocks) -> list[Blocks]:
        per_chunk = self.codec.tokens // self.block
        if len(block_ids) % per_chunk:
            raise AatcError(f"{len(block_ids)} blocks are not whole chunks of {per_chunk}", "set block_size to a chunk")
        return list(np.array(block_ids, dtype=np.int64).reshape(-1, per_chunk))

    def _read(self, block_ids: Blocks) -> Pages:
        """Pages of the tokens of some blocks, copied."""
        ids = torch.from_numpy(block_ids).to(self.device)
        both = torch.stack([layer.index_select(0, ids) for layer in self.views])
        return Pages(both[:, :, 0].flatten(1, 2), both[:, :, 1].flatten(1, 2))

    def _write(self, pages: Pages, block_ids: Blocks, places: Blocks) -> None:
        """Write the blocks at ``places`` of a chunk."""
        ids, rows = (torch.from_numpy(x).to(self.device) for x in (block_ids, places))
        for index, layer in enumerate(self.views):
            both = torch.stack((pages.keys[index], pages.values[index])).to(self.device)
            layer[ids] = torch.unflatten(both, 1, (-1, self.block)).transpose(0, 1).index_select(0, rows)
