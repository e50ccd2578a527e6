"""vLLM: the host tier of its prefix cache in chunks, by `OffloadingSpec` of the offloading connector.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config":
    {"spec_name": "AatcOffloadingSpec", "spec_module_path": "aatc_cli.serve.vllm", "block_size": 256,
    "cpu_bytes_to_use": 30000000000, "aatc": {"plan": ..., "model": ..., "device": "cuda"}}}'

The tier holds as many chunks as fit in ``cpu_bytes_to_use`` as they are coded. Imported inside of vLLM alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from aatc_cli.config import parse_size
from aatc_cli.errors import AatcError
from aatc_cli.serve.opening import codec_of, require_version, settings_of
from aatc_cli.serve.vllm_manager import AatcManager
from aatc_cli.serve.vllm_worker import AatcWorker

VERSIONS = ("0.33.",)

_base: Any = import_module("vllm.v1.kv_offload.base")


class AatcOffloadingSpec(_base.OffloadingSpec):  # type: ignore[misc]
    """One rank of a model with one group of full layers; see the module for how it is configured."""

    def __init__(self, config: Any) -> None:
        require_version("vllm", VERSIONS)
        super().__init__(config)
        if config.parallel.world_size != 1 or len(config.groups) != 1:
            raise AatcError(
                f"this plugin stores pages of whole models with full layers alone; this one has {len(config.groups)} "
                f"groups of layers over {config.parallel.world_size} workers",
                "run one worker of a model without sliding or recurrent layers",
            )
        self.codec = codec_of(settings_of(self.extra_config), self.tokens_per_block[0] * self.blocks_per_chunk)
        # the chunk at position 0, with its exact sinks, is the largest
        size = self.codec.nbytes(0)
        room = self.extra_config.get("cpu_bytes_to_use")
        if size is None or not room:
            raise AatcError("the tier has no size", 'give "cpu_bytes_to_use", and a plan whose chunks have one size')
        self.slots = (parse_size(str(room))) // size
        self._manager: AatcManager | None = None
        self._worker: AatcWorker | None = None

    def get_manager(self) -> Any:
        """Which chunks are there, for the scheduler."""
        if self._manager is None:
            self._manager = AatcManager(self.slots, self.codec.tokens)
        return self._manager

    def get_worker(self, kv_caches: Any) -> Any:
        """What codes and decodes them, beside the model."""
        if self._worker is None:
            self._worker = AatcWorker(
                self.codec, kv_caches, self.tokens_per_block[0], self.config.model.dtype, self.config.kv_cache_layout
            )
        return self._worker
