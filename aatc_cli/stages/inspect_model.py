"""inspect --model: what a model looks like and what will be compressed, from its configuration alone."""

from __future__ import annotations

from collections import Counter

import torch
from transformers import AutoModelForCausalLM

from aatc_cli.core.layout import fp16_bytes
from aatc_cli.models.adapter import attention_sites, geometry_of
from aatc_cli.models.loading import ModelSource, load_config
from aatc_cli.profiles import ModelProfile
from aatc_cli.stages.inspect import Inspection, Table


def inspect_model(source: ModelSource, profile: ModelProfile | None = None) -> Inspection:
    """Where a model's q, k, v, o and RoPE are and what will be compressed, from its configuration alone."""
    config = load_config(source)
    geometry = geometry_of(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    sites = attention_sites(model)
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    layers = [
        {
            "layer": site.layer, "module": site.name, "keys_from": "k_norm" if site.normed else "k_proj",
            "biases": [n for n, m in (("q", site.module.q_proj), ("k", site.module.k_proj), ("v", site.module.v_proj)) if m.bias is not None],
            "sliding_window": site.sliding_window,
        }
        for site in sites
    ]  # fmt: skip
    bytes_token = fp16_bytes(geometry, 1)
    data = {
        "model": source.name, "architecture": config.model_type, "supported": True,
        "geometry": geometry.model_dump(), "channels_per_site": geometry.channels,
        "sites_compressed": 2 * geometry.layers, "context": getattr(text, "max_position_embeddings", None),
        "rope": {key: value for key, value in dict(rope).items() if isinstance(value, int | float | str)},
        "fp16_bytes_per_token": bytes_token, "layers": layers,
        "profile": profile.name if profile else None,
    }  # fmt: skip
    kinds = Counter((row["keys_from"], tuple(row["biases"]), row["sliding_window"]) for row in layers)
    facts = [
        ["architecture", config.model_type],
        ["layers", str(geometry.layers)],
        ["query heads / kv heads / head dim", f"{geometry.heads} / {geometry.kv_heads} / {geometry.head_dim}"],
        ["channels per site", str(geometry.channels)],
        ["context", str(data["context"])],
        ["rope", ", ".join(f"{k} {v}" for k, v in data["rope"].items()) or "default"],
        ["compressed", f"K and V of all {geometry.layers} layers, keys before RoPE"],
        ["FP16 cache", f"{bytes_token:,} bytes per token"],
    ]
    facts += [
        [f"{count} layers", f"keys from {keys}; biases on {', '.join(biases) or 'none'}; sliding window {window or 'none'}"]
        for (keys, biases, window), count in kinds.items()
    ]
    return Inspection(data, [Table(f"model {source.name}", ["fact", "value"], facts)])
