"""A Llama-like model of a given geometry with random weights: true to size, for measuring memory and speed."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from aatc_cli.config import Geometry

# what a cache geometry does not say, as in Llama 3.1
_MLP_RATIO = 3.5
_VOCABULARY = 128_256


def random_llama(geometry: Geometry, context: int, theta: float, device: torch.device, dtype: torch.dtype) -> Any:
    """A LlamaForCausalLM with weights drawn on ``device``; its MLP is 3.5 times as wide as the model."""
    config = LlamaConfig(
        hidden_size=geometry.hidden_size,
        intermediate_size=int(_MLP_RATIO * geometry.hidden_size),
        num_hidden_layers=geometry.layers,
        num_attention_heads=geometry.heads,
        num_key_value_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        vocab_size=_VOCABULARY,
        max_position_embeddings=context,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        tie_word_embeddings=False,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
