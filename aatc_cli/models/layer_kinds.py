"""How far each layer looks back, and which configurations describe another cache than keys and values per layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aatc_cli.errors import UnsupportedModelError
from aatc_cli.models.architectures import architecture_of, supported
from aatc_cli.models.limits import context_limit

# what other architectures cache, by the field that gives them away; told before the name alone is refused
_REFUSED = {
    "kv_lora_rank": "multi-head latent attention (MLA) already caches a low-rank latent",
    "is_encoder_decoder": "it is an encoder-decoder model",
    "kv_channels_per_layer": "its layers differ in cache width",
    "num_kv_shared_layers": "some of its layers share the cache of earlier ones",
    "use_bidirectional_attention": "its tokens attend to later ones",
}
_OTHER_LAYERS = {
    "linear_attention": "it has linear-attention layers, which keep a state and no keys",
    "chunked_attention": "it has layers whose attention is cut into chunks",
}


@dataclass(frozen=True)
class LayerWindow:
    """How far a layer looks back: ``tokens``, or None for all. ``exact``: its cache is kept as it is."""

    tokens: int | None
    exact: bool


def layer_windows(config: Any) -> list[LayerWindow]:
    """One entry per layer of the model.

    Sliding layers beside full ones are exact: their cache stops growing, and it is the full ones that a long context
    is paid for. Where all layers slide, all are compressed. Raises `UnsupportedModelError` for layers that cache other
    things than keys and values.
    """
    text = config.get_text_config()
    kinds: list[str] | None = getattr(text, "layer_types", None)
    _refuse(config, text, kinds)
    count = text.num_hidden_layers
    window = getattr(text, "sliding_window", None) or None
    context = context_limit(config)
    if not getattr(text, "use_sliding_window", True) or (window and context and window >= context):
        window = None
    if kinds is None or window is None:
        return [LayerWindow(window, exact=False)] * count
    sliding = [kind == "sliding_attention" for kind in kinds]
    mixed = any(sliding) and not all(sliding)
    return [LayerWindow(window if slides else None, exact=slides and mixed) for slides in sliding]


def rope_switch(config: Any) -> int | None:
    """Tokens beyond which every position is rotated with other frequencies (longrope), or None."""
    text = config.get_text_config()
    rope = dict(getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {})
    if rope.get("rope_type", rope.get("type")) != "longrope":
        return None
    found = rope.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
    return int(found) if found else None


def _refuse(config: Any, text: Any, kinds: list[str] | None) -> None:
    name = config.model_type
    for field, why in _REFUSED.items():
        if getattr(text, field, None):
            raise UnsupportedModelError(f"{name} is not supported: {why}", supported())
    heads, count = getattr(text, "num_attention_heads", None), getattr(text, "num_hidden_layers", None)
    for what in ("num_attention_heads", "num_key_value_heads", "head_dim"):
        if isinstance(getattr(text, what, None), list | tuple | dict):
            raise UnsupportedModelError(f"{name} is not supported: its layers differ in {what}", supported())
    for kind in kinds or ():
        if kind not in ("full_attention", "sliding_attention"):
            why = _OTHER_LAYERS.get(kind, f"it has layers of kind {kind}")
            raise UnsupportedModelError(f"{name} is not supported: {why}", supported())
    if not isinstance(heads, int) or heads < 1 or not count or (kinds is not None and len(kinds) != count):
        raise UnsupportedModelError(f"{name} has no standard attention heads", supported())
    architecture_of(config)
