"""Fused tiles on models with biases on their projections and with partial rotation, the kernel emulated on a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Phi3Config, Phi3ForCausalLM, Qwen2Config, Qwen2ForCausalLM

from aatc_cli.config import Window
from aatc_cli.core import SIDES
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.core.tile_rule import TileRule
from aatc_cli.models.adapter import attention_layers
from aatc_cli.runtime.fused_tiles import shared
from aatc_cli.runtime.fused_tiles.tables import TileTables
from aatc_cli.runtime.session import Session
from aatc_cli.runtime.tiles.form import tiles_spec

WINDOW = Window(sinks=4, recent=128, flush=64)
SHAPE = {
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 7,
    "num_key_value_heads": 1,
    "vocab_size": 97,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
}


def qwen2() -> Any:
    """Seven queries of a kv head, and projections with biases that are not small."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**(SHAPE | {"hidden_size": 448}))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("proj.bias"):
                parameter.normal_()
    return model


def phi3() -> Any:
    """Half of the dimensions of a head turn."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    config = Phi3Config(**(SHAPE | {"hidden_size": 256, "num_attention_heads": 4}), rope_parameters=rope)
    return Phi3ForCausalLM(config).eval()


def codecs_of(model: Any) -> list[dict[Any, TileCodec]]:
    sides = {}
    for place, side in enumerate(SIDES):
        generator = torch.Generator().manual_seed(place)
        matrix = torch.linalg.qr(torch.randn(1, 64, 64, generator=generator, dtype=torch.float64))[0]
        variance = 0.5 + torch.rand(64, generator=generator, dtype=torch.float64)
        widths = torch.randint(0, 4, (3, 64), generator=generator) + torch.arange(3)[:, None]
        codec = TransformCodec(
            matrix, matrix.mT.contiguous(), variance, widths[0], variance, "uniform", scale_bits=8, restored=0.5
        )
        sides[side] = TileCodec(codec, widths, TileRule((32, 16, 16)))
    return [sides]


def with_tables(spec: Any) -> Any:
    """What a GPU has: tables, by which single queries go to the kernel."""
    [one] = spec.form.layers
    tables = TileTables.of(one.layer.codecs, one.layer.held, one.layer.biases, one.order)
    return replace(spec, form=replace(spec.form, layers=(replace(one, tables=tables),)))


@pytest.mark.parametrize("make", [qwen2, phi3])
@torch.no_grad()
def test_steps_are_those_of_the_packed_cache(emulated: Any, monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    class Emulated:
        def __init__(self, shape: Any, dtype: torch.dtype, device: torch.device) -> None:
            self.shape = shape

        def __call__(self, call: Any, out: Tensor) -> Tensor:
            return out.copy_(emulated(self.shape, 8, call))

    monkeypatch.setattr(shared, "TileDecoder", Emulated)
    model, found = make(), []
    ids = torch.randint(1, 97, (1, 203), generator=torch.Generator().manual_seed(1))
    layers = attention_layers(model)
    for kind in ("packed", "fused"):
        spec = tiles_spec(model, layers, codecs_of(model), WINDOW, None, kind)  # type: ignore[arg-type]
        session = Session.of("tiles", model, layers, with_tables(spec) if kind == "fused" else spec)
        with session.attached():
            cache = session.new_cache()
            logits = [model(ids[:, :200], **{session.keyword: cache}).logits[:, -1]]
            logits += [model(ids[:, t : t + 1], **{session.keyword: cache}).logits[:, -1] for t in range(200, 203)]
            found.append(torch.stack(logits))
    error = (found[1] - found[0]).square().mean((1, 2)).sqrt() / found[0].square().mean().sqrt()
    assert float(error.max()) < 2e-3
