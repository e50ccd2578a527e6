"""The attention backend CUSTOM of vLLM: blocks of a plan's tiles. Imported inside of vLLM alone, when it is chosen.

Writing and attention are one operator, so that a layer's prompt is attended to before it is packed.
"""

from __future__ import annotations

from importlib import import_module
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from aatc_cli.core.tiles import TILE
from aatc_cli.errors import AatcError
from aatc_cli.serve.vllm_backend import version_0_23
from aatc_cli.serve.vllm_backend.served import Served, served_of
from aatc_cli.serve.vllm_backend.start import check_blocks
from aatc_cli.serve.vllm_backend.step import Step

_base: Any = import_module("vllm.v1.attention.backend")
_config: Any = import_module("vllm.config")

# what a layer may be made with beside its heads, in the engine's order, and what this backend has
_PLAIN = {
    "alibi_slopes": None,
    "sliding_window": None,
    "kv_cache_dtype": "auto",
    "logits_soft_cap": None,
    "attn_type": "decoder",
    "kv_sharing_target_layer_name": None,
}


class TileImpl(_base.AttentionImpl):  # type: ignore[misc]
    """Attention of one layer; raises `AatcError` for a layer that is more than full causal attention."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None, *others: Any, **extra: Any
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = num_kv_heads or num_heads
        given = dict(zip(_PLAIN, others, strict=False)) | extra
        for name, value in given.items():
            if value is not None and value != _PLAIN.get(name):
                raise AatcError(f"a layer of the model has {name} = {value}", "plans of tiles serve plain attention")
        self.kv_cache_dtype = "auto"
        self.config = _config.get_current_vllm_config()
        self.layer: int | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Open the plan with the first layer, while the engine counts memory as that of the model."""
        served_of(self.config)

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any, **named: Any
    ) -> Tensor:
        """Attention of the batch into ``output``: query [n, Hq, D], key and value [n, H, D], all of them rotated."""
        output: Tensor = named["output"]
        if attn_metadata is None:
            return output.fill_(0)
        served = served_of(self.config)
        if self.layer is None:
            self.layer = served.names.index(layer.layer_name)
        keys, values = (x.view(-1, self.num_kv_heads, self.head_size) for x in (key, value))
        rows = query.view(-1, self.num_heads, self.head_size), keys, values
        served.engine.attend(self.layer, rows, kv_cache, attn_metadata, output.view(-1, self.num_heads, self.head_size))
        return output


class TileBuilder(_base.AttentionMetadataBuilder):  # type: ignore[misc]
    """Steps of the batch; layers have blocks of their own sizes, so there is a builder for each, and one step."""

    _cudagraph_support: ClassVar[Any] = _base.AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        check_blocks(served_of(vllm_config).engine.name, vllm_config)
        self._init_reorder_batch_threshold(1)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Step:
        """The step of a batch; the first builder of a step begins it."""
        found: Step | None = getattr(common_attn_metadata, "aatc_step", None)
        if found is None:
            found = common_attn_metadata.aatc_step = self._begin(served_of(self.vllm_config), common_attn_metadata)
        return found

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Step:
        """The step that a graph is captured of: single tokens of nobody."""
        served = served_of(self.vllm_config)
        served.bind()
        served.engine.warm_up()
        return served.engine.idle(common_attn_metadata.num_reqs, common_attn_metadata.block_table_tensor)

    def _begin(self, served: Served, given: Any) -> Step:
        batch, blocks = served.runner.input_batch if served.runner is not None else None, given.block_table_tensor
        if batch is None or not batch.num_reqs:
            return served.engine.idle(given.num_reqs if given.max_query_len == 1 else 0, blocks)
        count = batch.num_reqs
        starts = given.query_start_loc_cpu[: count + 1].tolist()
        cached = batch.num_computed_tokens_cpu[:count].tolist()
        new = [after - before for before, after in pairwise(starts)]
        requests = list(zip(batch.req_ids, cached, new, strict=True))
        served.bind()
        return served.engine.begin(requests, blocks, batch.block_table[0].block_table.np)


class TileBackend(_base.AttentionBackend):  # type: ignore[misc]
    """Blocks of `TILE` tokens, whose bytes the layer's spec gives as one head of so many bytes a token."""

    accept_output_buffer = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int]:
        """One tile."""
        return [TILE]

    @staticmethod
    def get_name() -> str:
        """The name that vLLM keeps for backends of others."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TileImpl]:
        """The implementation."""
        return TileImpl

    @staticmethod
    def get_builder_cls() -> type[TileBuilder]:
        """The builder of steps."""
        return TileBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Blocks by bytes."""
        return num_blocks, block_size * num_kv_heads * head_size


version_0_23.install(TileBackend)
