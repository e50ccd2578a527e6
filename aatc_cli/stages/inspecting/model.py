"""inspect --model: the preflight. What will be compressed, what collecting will cost here, and what to run next."""

from __future__ import annotations

from collections import Counter
from typing import Any

from aatc_cli.config import Geometry, HeadGroups, Window
from aatc_cli.console import duration
from aatc_cli.core.layout import CacheLayout, fp16_bytes, sliding_bytes
from aatc_cli.models.adapter import AttentionLayer, AttentionSite, attention_layers, geometry_of
from aatc_cli.models.limits import context_limit
from aatc_cli.models.loading import ModelSource, empty_model, load_config
from aatc_cli.models.profile_check import check_profile
from aatc_cli.profiles import ModelProfile, available, load_model_profile
from aatc_cli.stages.inspecting.facts import Inspection, Table
from aatc_cli.stages.inspecting.preflight import (
    LENGTH,
    SAMPLES,
    Machine,
    Work,
    collect_work,
    measure_machine,
    next_command,
    seconds,
)

# the width whose size is shown as an example of what compression gives
_EXAMPLE_BITS = 2.5
_CONTEXT = 8192


def inspect_model(source: ModelSource, profile: ModelProfile | None = None) -> Inspection:
    """What this tool will do with a model, from its configuration alone.

    Raises `UnsupportedModelError` for an attention that cannot be compressed, `AatcError` for another geometry than the
    profile's. ``verdict`` in the data is "supported", or "partly" where some layers are kept exact.
    """
    config = load_config(source)
    geometry = geometry_of(config)
    check_profile(profile, geometry)
    model = empty_model(source, config)
    layers = attention_layers(model)
    known = profile or _profile_of(source, geometry)
    machine = measure_machine()
    mixture = known.calibration.rates if known else None
    samples, length = (mixture.samples, mixture.length) if mixture else (SAMPLES, LENGTH)
    itemsize = 2 if machine.device.startswith("cuda") else 4
    work = collect_work(model, geometry, samples, length, itemsize=itemsize)
    groups = known.head_groups if known else 1
    reference = source.reference if source.gguf is None else f"{source.reference}/{source.gguf}"
    data = _data(source, config, geometry, layers, profile)
    sizes = _sizes(geometry, groups, data["context"])
    command = next_command(reference, known, machine.device)
    data |= {"at_context": sizes, "collect": _cost(work, machine), "next": command}
    return Inspection(data, [_facts(data, geometry, layers), _preflight(data, sizes, work, machine)])


def _data(
    source: ModelSource, config: Any, geometry: Geometry, layers: list[AttentionLayer], profile: ModelProfile | None
) -> dict[str, Any]:
    text = config.get_text_config()
    return {
        "model": source.name,
        "architecture": config.model_type,
        "supported": True,
        "verdict": "partly" if geometry.sliding_layers else "supported",
        "geometry": geometry.model_dump(),
        "channels_per_site": geometry.channels,
        "sites_compressed": 2 * geometry.layers,
        "context": context_limit(config),
        "rope": _rope(text),
        "fp16_bytes_per_token": fp16_bytes(geometry.of_full_layers(), 1),
        "fp16_bytes_sliding": sliding_bytes(geometry, geometry.sliding_window or 0),
        "layers": [_layer(layer) for layer in layers],
        "profile": profile.name if profile else None,
    }


def _layer(layer: AttentionLayer) -> dict[str, Any]:
    if isinstance(layer, AttentionSite):
        return {
            "layer": layer.layer,
            "place": layer.place,
            "module": layer.name,
            "kept": "compressed",
            "keys_from": "k_norm" if layer.normed else "k_proj",
            "biases": list(layer.biases),
            "rope": layer.rope,
            "sliding_window": layer.sliding_window,
        }
    return {
        "layer": None,
        "place": layer.place,
        "module": layer.name,
        "kept": "exact",
        "sliding_window": layer.sliding_window,
    }


def _rope(text: Any) -> dict[str, Any]:
    """The rotary settings; where kinds of layers have their own, the full layers' first."""
    rope = dict(getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {})
    for kind in ("full_attention", "sliding_attention"):
        if isinstance(rope.get(kind), dict):
            name = kind.removesuffix("_attention")
            rope |= {f"{name} {key}": value for key, value in rope.pop(kind).items()}
    return {key: value for key, value in rope.items() if isinstance(value, int | float | str)}


def _sizes(geometry: Geometry, groups: int, context: int | None) -> dict[str, Any]:
    layout = CacheLayout.nominal(geometry, Window(), HeadGroups(k=groups, v=groups), _EXAMPLE_BITS)
    tokens = min(_CONTEXT, context or _CONTEXT)
    summary = layout.summary(tokens)
    names = ("bytes_fp16", "bytes_total", "ratio", "ratio_full_layers")
    return {"context": tokens, "bits": _EXAMPLE_BITS} | {name: summary[name] for name in names if name in summary}


def _cost(work: Work, machine: Machine) -> dict[str, Any]:
    return {
        "device": machine.device,
        "tokens": work.tokens,
        "seconds": round(seconds(work, machine), 1),
        "bytes_model": work.model_bytes,
        "bytes_stats": work.stats_bytes,
        "bytes_memory": work.memory,
        "bytes_free": machine.free,
        "fits": work.memory <= machine.free,
    }


def _facts(data: dict[str, Any], geometry: Geometry, layers: list[AttentionLayer]) -> Table:
    rows = [
        ["architecture", data["architecture"]],
        ["layers", str(len(layers))],
        ["query heads / kv heads / head dim", f"{geometry.heads} / {geometry.kv_heads} / {geometry.head_dim}"],
        ["channels per site", str(geometry.channels)],
        ["context", str(data["context"])],
        ["rope", ", ".join(f"{key} {value}" for key, value in data["rope"].items()) or "default"],
    ]
    for what, count in Counter(_kind(layer) for layer in layers).items():
        rows.append([f"{count} layers", what])
    return Table(f"model {data['model']}: {data['verdict']}", ["fact", "value"], rows)


def _kind(layer: AttentionLayer) -> str:
    if not isinstance(layer, AttentionSite):
        return f"kept exact: sliding window of {layer.sliding_window} tokens"
    keys = "k_norm" if layer.normed else "k_proj"
    parts = [f"keys from {keys}", f"biases on {', '.join(layer.biases) or 'none'}"]
    parts += [f"sliding window of {layer.sliding_window}, all of it compressed"] if layer.sliding_window else []
    parts += [f"rotary pairs: {layer.rope}"] if layer.rope != "half" else []
    parts += ["a logit per head joins the softmax"] if layer.sinks is not None else []
    parts += [f"scores capped at {layer.softcap:g}"] if layer.softcap is not None else []
    return "compressed: " + "; ".join(parts)


def _preflight(data: dict[str, Any], sizes: dict[str, Any], work: Work, machine: Machine) -> Table:
    cost = data["collect"]
    room = "fits" if cost["fits"] else "does NOT fit"
    rows = [
        ["FP16 cache, full layers", f"{data['fp16_bytes_per_token']:,} bytes per token"],
        *(
            [["FP16 cache, sliding layers", f"{data['fp16_bytes_sliding']:,} bytes at most, kept as they are"]]
            if data["fp16_bytes_sliding"]
            else []
        ),
        [
            f"at {sizes['context']:,} tokens, {sizes['bits']:g} bits",
            f"{sizes['bytes_fp16']:,} -> {sizes['bytes_total']:,} bytes, ratio {sizes['ratio']:.2f}",
        ],
        *(
            [["of the full layers alone", f"ratio {sizes['ratio_full_layers']:.2f}"]]
            if "ratio_full_layers" in sizes
            else []
        ),
        ["collect: time", f"about {duration(max(cost['seconds'], 1))} for {work.tokens:,} tokens on {machine.device}"],
        [
            "collect: memory",
            f"about {work.memory / 1e9:.2f} GB, {work.stats_bytes / 1e9:.2f} of it statistics; "
            f"{room} in the {machine.free / 1e9:.1f} GB that are free",
        ],
        ["next", data["next"]],
    ]
    return Table("preflight", ["what", "how much"], rows)


def _profile_of(source: ModelSource, geometry: Geometry) -> ModelProfile | None:
    """The packaged profile of exactly this model: of its name, or of its folder's, and of its geometry."""
    for name in available("models"):
        profile = load_model_profile(name)
        named = source.name in (profile.model, profile.model.rsplit("/", 1)[-1])
        if named and profile.geometry == geometry:
            return profile
    return None
