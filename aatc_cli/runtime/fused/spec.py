"""The fused caches of a plan's codecs on a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from aatc_cli.config import HeadGroups, Window
from aatc_cli.core import SIDES
from aatc_cli.core.layout import CacheLayout
from aatc_cli.errors import AatcError
from aatc_cli.models.adapter import AttentionLayer, geometry_of
from aatc_cli.models.rotary import rotary_frequencies
from aatc_cli.runtime.fused.form import FusedForm
from aatc_cli.runtime.fused.limits import check_form
from aatc_cli.runtime.fused.static import fused_layer
from aatc_cli.runtime.kernels.launch import fused_available
from aatc_cli.runtime.kernels.tables import fast_pairs
from aatc_cli.runtime.packed.form import Codecs
from aatc_cli.runtime.spec import CacheSpec, check_layers


def fused_spec(model: nn.Module, layers: list[AttentionLayer], codecs: Codecs, window: Window) -> CacheSpec:
    """The fused caches of ``codecs`` on ``model``: tables of every layer on its device.

    Raises `AatcError` for codecs, windows and models that tiles cannot hold, or when CuPy is missing on a GPU.
    """
    config: Any = model.config
    geometry, parameter = geometry_of(config), next(model.parameters())
    sites = check_layers(layers, len(codecs))
    check_form(layers, window, geometry.heads // geometry.kv_heads, geometry.head_dim)
    if parameter.device.type == "cuda" and not fused_available():
        raise AatcError("the fused kernels need CuPy", "pip install 'aatc[cuda]', or use the packed cache")
    frequencies = rotary_frequencies(model, geometry.head_dim).to(parameter.device)
    fast = fast_pairs(frequencies)
    made = [fused_layer(layer, geometry, parameter, fast) for layer in codecs]
    form = FusedForm(
        tuple(made),
        window,
        parameter.dtype,
        geometry.heads,
        geometry.kv_heads,
        geometry.head_dim,
        frequencies.to(torch.float32),
        float(getattr(sites[0].module, "scaling", geometry.head_dim**-0.5)),
    )
    bits = [{side: layer.codecs[side].bits.tolist() for side in SIDES} for layer in made]
    layout = CacheLayout.of_bits(geometry, window, HeadGroups.both(geometry.kv_heads), bits)
    return CacheSpec.of(model, layers, form, window, layout)
