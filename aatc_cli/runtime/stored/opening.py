"""The codec of a plan for a model: one that is loaded, or one whose files are at hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from aatc_cli.artifacts.manifest import require_model
from aatc_cli.artifacts.plan import Plan
from aatc_cli.core import Side
from aatc_cli.models.adapter import attention_sites
from aatc_cli.models.loading import ModelSource, empty_model, identify, load_config, load_model, load_tokenizer
from aatc_cli.models.rotary import rotation_tables
from aatc_cli.runtime.stored.codec import CHUNK, StoredCodec
from aatc_cli.runtime.stored.device import on_device
from aatc_cli.runtime.stored.host import with_threads
from aatc_cli.runtime.stored.rotation import UNTURNED, Rotation


def codec_for(plan: Plan, model: nn.Module, *, tokens: int = CHUNK, device: str = "cpu") -> StoredCodec:
    """The codec of ``plan`` for a model in memory, which is the plan's: that is for the caller to know."""
    return StoredCodec.of(plan, rotation_of(model), biases_of(model), tokens=tokens, device=device)


def open_codec(plan: Plan, source: ModelSource, *, tokens: int = CHUNK, device: str = "cpu") -> StoredCodec:
    """The codec of ``plan`` for the model at ``source``; its weights are read only if its projections have biases.

    Raises `ArtifactError` for a model that is not the plan's.
    """
    config = load_config(source)
    require_model(identify(source, config, load_tokenizer(source)), plan.model, str(plan.path))
    model = empty_model(source, config)
    if any(bias is not None for layer in biases_of(model) for bias in layer.values()):
        model = load_model(source, dtype="float32")
    return codec_for(plan, model, tokens=tokens, device=device)


def fastest(codec: StoredCodec, threads: int = 0) -> StoredCodec:
    """The codec with the quickest decoder that there is for it here: of a GPU, or of a CPU with ``threads``."""
    return on_device(with_threads(codec, threads))


def rotation_of(model: nn.Module) -> Rotation:
    """How ``model`` turns the keys of its compressed layers; it may be without memory."""
    style = attention_sites(model)[0].rope
    if style == "none":
        return UNTURNED
    tables = rotation_tables(model)
    cos, sin = tables(torch.zeros(1, dtype=torch.int64))
    return Rotation(tables, style, float((cos[0, 0].square() + sin[0, 0].square()).sqrt()))


def biases_of(model: nn.Module) -> list[dict[Side, Tensor | None]]:
    """What keys and values of every compressed layer hold beside the projection of the input."""
    return [{"k": _float(site.k_bias), "v": _float(site.v_bias)} for site in attention_sites(model)]


def _float(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach() if bias.is_meta else bias.detach().float()
