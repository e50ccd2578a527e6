"""What is known of each architecture's attention, as data: one entry per ``model_type`` of its configuration.

An architecture that is not here is refused by name: a model may look like its neighbours and still add to its scores
or its positions something that no shape betrays. Every entry is compared with the model's own cache in a test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from aatc_cli.errors import UnsupportedModelError

if TYPE_CHECKING:
    # the list of architectures is printed without loading torch
    from aatc_cli.core.rope import RopeStyle


@dataclass(frozen=True)
class Architecture:
    """Where q, k, v, o of an attention module are, and how they become scores.

    projections: linears of their own (``q_proj``, ``k_proj``, ``v_proj``), or one linear ``fused`` whose rows are q, k
    and v one after another ("stacked") or q, k, v of head after head ("by-head"). norms: the modules of query and key
    norm, absent from a model whose configuration turns them off; ``heads_first`` where they are given [B, H, T, D].
    rope_full: the rotation of full layers where sliding ones have another. sinks, softcap: attributes of the module.
    """

    projections: Literal["separate", "stacked", "by-head"] = "separate"
    fused: str = ""
    output: str = "o_proj"
    norms: tuple[str, str] = ("q_norm", "k_norm")
    heads_first: bool = False
    rope: RopeStyle = "half"
    rope_full: RopeStyle | None = None
    sinks: str = ""
    softcap: str = ""


_PLAIN = Architecture()
ARCHITECTURES: dict[str, Architecture] = {
    "cohere": Architecture(rope="interleaved"),
    "cohere2": Architecture(rope="interleaved", rope_full="none"),
    "gemma": _PLAIN,
    "gemma2": Architecture(softcap="attn_logit_softcapping"),
    "gemma3": Architecture(heads_first=True),
    "gemma3_text": Architecture(heads_first=True),
    "gpt_neox": Architecture(projections="by-head", fused="query_key_value", output="dense"),
    "gpt_oss": Architecture(rope="half-once", sinks="sinks"),
    "granite": _PLAIN,
    "granitemoe": _PLAIN,
    "llama": _PLAIN,
    "mistral": _PLAIN,
    "mixtral": _PLAIN,
    "olmo2": _PLAIN,
    "phi": Architecture(output="dense", norms=("q_layernorm", "k_layernorm"), heads_first=True),
    "phi3": Architecture(projections="stacked", fused="qkv_proj"),
    "qwen2": _PLAIN,
    "qwen2_moe": _PLAIN,
    "qwen3": _PLAIN,
    "qwen3_moe": _PLAIN,
    "stablelm": Architecture(norms=("q_layernorm", "k_layernorm"), heads_first=True),
    "starcoder2": _PLAIN,
}


def architecture_of(config: Any) -> Architecture:
    """The entry of a configuration's ``model_type``; raises `UnsupportedModelError` where there is none."""
    kind = str(config.model_type)
    if kind not in ARCHITECTURES:
        problem = f"{kind} is not supported: it is not among the architectures whose attention is known"
        raise UnsupportedModelError(problem, supported())
    return ARCHITECTURES[kind]


def supported() -> str:
    """The hint of every refusal: what can be used instead."""
    return f"supported: decoder-only models of the architectures {', '.join(sorted(ARCHITECTURES))}"
