"""vLLM 0.23: the host tier of its prefix cache in chunks, by the `OffloadingSpec` of that version.

Configured as `aatc_cli.serve.vllm` says, with "spec_module_path": "aatc_cli.serve.vllm_0_23". This version does not
tell the scheduler's side where in its text a block is. But the keys it is asked to store follow one another, and the
worker is told the index of the first block of a job (`GPULoadStoreSpec.block_indices`): so the scheduler's side counts
how far behind the first chunk of its job each chunk is, and the worker adds the two. A load is told the same, and a
chunk says where it begins.

This version knows no transfer that failed. A chunk that cannot be coded is kept as it is; one that cannot be decoded
stops the engine.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from importlib import import_module
from typing import Any

from aatc_cli.config import parse_size
from aatc_cli.errors import AatcError
from aatc_cli.serve.opening import codec_of, require_version, settings_of
from aatc_cli.serve.vllm_manager import AatcManager, ChunkSlots
from aatc_cli.serve.vllm_transfers import ChunkTransfers, Places

VERSIONS = ("0.23.",)
# how the numbers of a block lie by the layout of the cache: of one layer, and of all layers in one tensor
_LAYOUTS = {"NHD": ("KNHD", "LKNHD"), "HND": ("KHND", "HLKND")}

_base: Any = import_module("vllm.v1.kv_offload.base")
_worker: Any = import_module("vllm.v1.kv_offload.worker.worker")


class Manager23(AatcManager):
    """The same for 0.23: positions count from the first chunk of a job, and answers have other names."""

    def lookup(self, key: bytes, req_context: Any) -> bool | None:
        """Whether a chunk can be read; None while it is written."""
        entry = self.entries.get(key)
        return False if entry is None else entry.ready or None

    def firsts_of(self, keys: Collection[bytes], req_context: Any) -> dict[bytes, int]:
        """How far behind the first chunk that is new each chunk is, in tokens: ``keys`` are neighbours, in order."""
        new = [index for index, key in enumerate(keys) if key not in self.entries]
        first = new[0] if new else 0
        return {key: (index - first) * self.tokens for index, key in enumerate(keys) if key not in self.entries}

    def reset_cache(self) -> None:
        """Forget all chunks: nothing is told any more of jobs from before."""
        self.entries.clear()
        self.free = list(range(self.capacity - 1, -1, -1))


class Handler(_worker.OffloadingHandler):  # type: ignore[misc]
    """Transfers both ways."""

    def __init__(self, transfers: ChunkTransfers) -> None:
        self.transfers = transfers
        self.per_chunk = transfers.codec.tokens // transfers.block

    def transfer_async(self, job_id: int, spec: Any) -> bool:
        """Begin a transfer (source, destination), of which one is blocks and the other chunks."""
        source, destination = spec
        if isinstance(destination, ChunkSlots):
            self.transfers.store(job_id, source.block_ids, self._places(destination, self._chunk(source)))
            return True
        first, skipped = self._chunk(destination), int(destination.block_indices[0]) % self.per_chunk
        neighbours = ChunkSlots(source.slots, self._steps(len(source.slots)), source.keys)
        self.transfers.load(job_id, destination.block_ids, skipped, self._places(neighbours, first))
        return True

    def get_finished(self) -> list[Any]:
        """Jobs that ended since the last call; raises what a load met: tokens that are not there cannot be told of."""
        found = []
        for job, error in self.transfers.finished():
            if error is not None:
                raise AatcError(f"a chunk cannot be read: {error}", "start the engine again: its tier begins empty")
            found.append(_worker.TransferResult(job_id=job, success=True))
        return found

    def wait(self, job_ids: set[int]) -> None:
        """Wait for jobs."""
        self.transfers.wait(job_ids)

    def shutdown(self) -> None:
        """End the thread."""
        self.transfers.shutdown()

    def _chunk(self, blocks: Any) -> int:
        """Position of the first token of the chunk in which the first of some blocks lies."""
        return int(blocks.block_indices[0]) // self.per_chunk * self.transfers.codec.tokens

    def _steps(self, count: int) -> list[int]:
        return [index * self.transfers.codec.tokens for index in range(count)]

    def _places(self, held: ChunkSlots, first: int) -> Places:
        return Places(held.slots, [first + step for step in held.firsts], held.keys)


class AatcOffloadingSpec(_base.OffloadingSpec):  # type: ignore[misc]
    """One rank of a model with one group of full layers; see the module for how it is configured."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        require_version("vllm", VERSIONS)
        super().__init__(vllm_config, kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        if vllm_config.parallel_config.world_size != 1 or len(groups) != 1:
            raise AatcError(
                f"this plugin stores pages of whole models with full layers alone; this one has {len(groups)} groups "
                f"of layers over {vllm_config.parallel_config.world_size} workers",
                "run one worker of a model without sliding or recurrent layers",
            )
        _check_order(groups[0].layer_names)
        self.codec = codec_of(settings_of(self.extra_config), self.gpu_block_size[0] * self.block_size_factor)
        # the chunk at position 0, with its exact sinks, is the largest
        size, room = self.codec.nbytes(0), self.extra_config.get("cpu_bytes_to_use")
        if size is None or not room:
            raise AatcError("the tier has no size", 'give "cpu_bytes_to_use", and a plan whose chunks have one size')
        self.slots = parse_size(str(room)) // size
        self._manager: Manager23 | None = None
        self.transfers: ChunkTransfers | None = None

    def get_manager(self) -> Any:
        """Which chunks are there, for the scheduler."""
        if self._manager is None:
            self._manager = Manager23(self.slots, self.codec.tokens)
        return self._manager

    def get_handlers(self, kv_caches: Any) -> Iterator[tuple[type, type, Any]]:
        """What codes and decodes them, beside the model: one that serves both ways."""
        if self.transfers is None:
            dtype = str(self.vllm_config.model_config.dtype).removeprefix("torch.")
            with import_module("vllm.config").set_current_vllm_config(self.vllm_config):
                layout = import_module("vllm.v1.attention.backends.utils").get_kv_cache_layout()
            self.transfers = ChunkTransfers(self.codec, kv_caches, self.gpu_block_size[0], dtype, _orders(layout))
        handler = Handler(self.transfers)
        yield _base.GPULoadStoreSpec, ChunkSlots, handler
        yield ChunkSlots, _base.GPULoadStoreSpec, handler


def _orders(layout: str) -> tuple[str, str]:
    """How blocks lie in a layout of the cache; raises `AatcError` for one that is not known."""
    if layout not in _LAYOUTS:
        raise AatcError(f"the cache has the layout {layout}", f"serve with {' or '.join(_LAYOUTS)}")
    return _LAYOUTS[layout]


def _check_order(names: list[str]) -> None:
    """Raise `AatcError` unless layers are in their order."""
    numbers = [int(match[1]) for name in names if (match := re.search(r"\.(\d+)\.", name))]
    if numbers != list(range(len(names))):
        raise AatcError("the layers of the cache are in no order that is known", "serve another model")
