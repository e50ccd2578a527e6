"""inspect --model: what a model looks like and what will be compressed, from its configuration alone."""

from __future__ import annotations

from collections import Counter

from aatc_cli.core.layout import fp16_bytes
from aatc_cli.models.adapter import AttentionSite, attention_sites, geometry_of
from aatc_cli.models.loading import ModelSource, empty_model, load_config
from aatc_cli.profiles import ModelProfile
from aatc_cli.stages.inspect import Inspection, Table


def inspect_model(source: ModelSource, profile: ModelProfile | None = None) -> Inspection:
    """Where a model's q, k, v, o and RoPE are and what will be compressed, from its configuration alone."""
    config = load_config(source)
    geometry = geometry_of(config)
    sites = attention_sites(empty_model(source, config))
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    layers = [
        {
            "layer": site.layer, "module": site.name, "keys_from": "k_norm" if site.normed else "k_proj",
            "biases": _biases(site),
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
    kinds = Counter((site.normed, ", ".join(_biases(site)), site.sliding_window) for site in sites)
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
    for (normed, biases, window), count in kinds.items():
        keys = "k_norm" if normed else "k_proj"
        what = f"keys from {keys}; biases on {biases or 'none'}; sliding window {window or 'none'}"
        facts.append([f"{count} layers", what])
    return Inspection(data, [Table(f"model {source.name}", ["fact", "value"], facts)])


def _biases(site: AttentionSite) -> list[str]:
    parts = {name: getattr(site.module, f"{name}_proj") for name in ("q", "k", "v")}
    return [name for name, linear in parts.items() if linear.bias is not None]
