"""The worker's side of the tier for vLLM: pages of the GPU to chunks in host memory, and back."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aatc_cli.console import say
from aatc_cli.errors import AatcError
from aatc_cli.runtime.stored.codec import StoredCodec
from aatc_cli.runtime.stored.pages import Pages

_base: Any = import_module("vllm.v1.kv_offload.base")
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


class AatcWorker(_base.OffloadingWorker):  # type: ignore[misc]
    """Chunks by slot. One thread codes and decodes, so that the model goes on.

    A layer's page of a block is its keys, then its values, [2, tokens, H, D]; raises `AatcError` for pages of another
    size or an order of their own.
    """

    def __init__(self, codec: StoredCodec, kv_caches: Any, tokens_per_block: int, dtype: str) -> None:
        self.codec, self.block = codec, tokens_per_block
        if dtype not in _DTYPES:
            raise AatcError(f"a cache of {dtype} is not stored by this plugin", "serve with a cache of 16 bits")
        self.dtype = _DTYPES[dtype]
        refs, g = kv_caches.group_data_refs[0], codec.geometry
        wanted = 2 * self.block * g.channels * self.dtype.itemsize
        sizes = {ref.page_size_bytes for ref in refs}
        if len(refs) != g.layers or sizes != {wanted}:
            raise AatcError(
                f"{len(refs)} layers with pages of {sorted(sizes)} bytes are not the plan's {g.layers} of {wanted}",
                "serve the plan's model with one tensor of keys and values for every layer",
            )
        self.layers = [kv_caches.tensors[ref.tensor_idx].tensor for ref in refs]
        self.page_bytes = wanted
        self.slots: dict[int, bytes] = {}
        self.jobs: dict[int, Future[bool]] = {}
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="aatc-vllm")

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Code whole chunks of blocks into their slots."""
        blocks = self._chunks(src_spec.block_ids)
        # a copy in the order of the stream: the blocks are written again before the thread has read them
        pages = [self._read(ids) for ids in blocks]
        self._synchronize()
        self.jobs[job_id] = self.pool.submit(self._store, pages, dst_spec)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        """Decode chunks from their slots into blocks; of the first chunk a part may be there already."""
        per_chunk = self.codec.tokens // self.block
        skipped = int(dst_spec.block_indices[0]) % per_chunk
        self.jobs[job_id] = self.pool.submit(self._load, src_spec, np.array(dst_spec.block_ids), skipped)
        return True

    def get_finished(self) -> list[Any]:
        """Jobs that ended since the last call."""
        done = [job for job, future in self.jobs.items() if future.done()]
        return [_base.TransferResult(job_id=job, success=self._outcome(self.jobs.pop(job))) for job in done]

    def wait(self, job_ids: set[int]) -> None:
        """Wait for jobs."""
        for job in job_ids:
            if job in self.jobs:
                self.jobs[job].exception()

    def shutdown(self) -> None:
        """End the thread."""
        self.pool.shutdown(wait=True)

    def _store(self, pages: list[Pages], spec: Any) -> bool:
        for page, slot, first, key in zip(pages, spec.slots, spec.firsts, spec.keys, strict=True):
            self.slots[slot] = self.codec.encode(page, first, name=_name(key))
        return True

    def _load(self, spec: Any, block_ids: Any, skipped: int) -> bool:
        start, per_chunk = -skipped, self.codec.tokens // self.block
        for slot, first, key in zip(spec.slots, spec.firsts, spec.keys, strict=True):
            pages = self.codec.decode(self.slots[slot], first, self.dtype, _name(key))
            mine = np.arange(max(start, 0), min(start + per_chunk, len(block_ids)))
            self._write(pages, block_ids[mine], mine - start)
            start += per_chunk
        self._synchronize()
        return True

    def _chunks(self, block_ids: Any) -> list[Any]:
        per_chunk = self.codec.tokens // self.block
        if len(block_ids) % per_chunk:
            raise AatcError(f"{len(block_ids)} blocks are not whole chunks of {per_chunk}", "set block_size to a chunk")
        return list(np.array(block_ids).reshape(-1, per_chunk))

    def _view(self, layer: Tensor) -> Tensor:
        """A layer's pages as numbers [blocks, 2, tokens, H, D]."""
        g = self.codec.geometry
        flat = layer.view(torch.int8).flatten(1)[:, : self.page_bytes]
        return torch.unflatten(flat.view(self.dtype), 1, (2, self.block, g.kv_heads, g.head_dim))

    def _read(self, block_ids: Any) -> Pages:
        """Pages of the tokens of some blocks, copied."""
        ids = torch.from_numpy(np.array(block_ids, dtype=np.int64)).to(self.layers[0].device)
        both = torch.stack([self._view(layer).index_select(0, ids) for layer in self.layers])
        keys, values = both[:, :, 0].flatten(1, 2), both[:, :, 1].flatten(1, 2)
        return Pages(keys, values)

    def _write(self, pages: Pages, block_ids: Any, places: Any) -> None:
        """Write the blocks at ``places`` of a chunk."""
        device = self.layers[0].device
        ids, rows = (torch.from_numpy(np.array(x, dtype=np.int64)).to(device) for x in (block_ids, places))
        for index, layer in enumerate(self.layers):
            both = torch.stack((pages.keys[index], pages.values[index])).to(device)
            blocks = torch.unflatten(both, 1, (-1, self.block)).transpose(0, 1).index_select(0, rows)
            self._view(layer)[ids] = blocks

    def _synchronize(self) -> None:
        if self.layers[0].is_cuda:
            torch.cuda.current_stream(self.layers[0].device).synchronize()

    def _outcome(self, future: Future[bool]) -> bool:
        """Whether a job succeeded; what went wrong is said, and the engine computes those tokens."""
        error = future.exception()
        if error is not None:
            say(f"aatc: {error}; its tokens are computed again")
        return error is None


def _name(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
