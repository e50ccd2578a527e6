"""The worker's side of the tier for vLLM 0.33: pages of the GPU to chunks in host memory, and back."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from aatc_cli.console import say
from aatc_cli.errors import AatcError
from aatc_cli.runtime.stored.codec import StoredCodec
from aatc_cli.serve.vllm_transfers import ChunkTransfers, Places

# how the numbers of a block lie by the layout of the cache (L layers, B blocks, H heads, N tokens, C keys beside
# values): of one layer, and of all layers in one tensor
_LAYOUTS = {
    "LBHNC": ("HNKD", ""),
    "LBNHC": ("NHKD", ""),
    "BLHNC": ("HNKD", "LHNKD"),
    "BLNHC": ("NHKD", "LNHKD"),
    "BHLNC": ("", "HLNKD"),
}

_base: Any = import_module("vllm.v1.kv_offload.base")


class AatcWorker(_base.OffloadingWorker):  # type: ignore[misc]
    """What moves chunks, as 0.33 asks for it; raises as `ChunkTransfers`."""

    def __init__(
        self, codec: StoredCodec, kv_caches: Any, tokens_per_block: int, dtype: str, layout: str | None
    ) -> None:
        if layout not in _LAYOUTS:
            raise AatcError(f"the cache has the layout {layout}", f"serve with one of {', '.join(_LAYOUTS)}")
        self.transfers = ChunkTransfers(codec, kv_caches, tokens_per_block, dtype, _LAYOUTS[layout])

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Code whole chunks of blocks into their slots."""
        self.transfers.store(job_id, src_spec.block_ids, Places(dst_spec.slots, dst_spec.firsts, dst_spec.keys))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        """Decode chunks from their slots into blocks; of the first chunk a part may be there already."""
        per_chunk = self.transfers.codec.tokens // self.transfers.block
        skipped = int(dst_spec.block_indices[0]) % per_chunk
        held = Places(src_spec.slots, src_spec.firsts, src_spec.keys)
        self.transfers.load(job_id, dst_spec.block_ids, skipped, held)
        return True

    def get_finished(self) -> list[Any]:
        """Jobs that ended since the last call; what went wrong is said, and the engine computes those tokens."""
        found = []
        for job, error in self.transfers.finished():
            if error is not None:
                say(f"aatc: {error}; its tokens are computed again")
            found.append(_base.TransferResult(job_id=job, success=error is None))
        return found

    def wait(self, job_ids: set[int]) -> None:
        """Wait for jobs."""
        self.transfers.wait(job_ids)

    def shutdown(self) -> None:
        """End the thread."""
        self.transfers.shutdown()
