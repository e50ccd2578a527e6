"""Shapes of attention that break shortcuts: head_dim that is not hidden / heads, one kv head, tied embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from aatc_cli.config import Window
from aatc_cli.errors import UnsupportedModelError
from aatc_cli.evals.forced.teacher_forced import Method, method_logits
from aatc_cli.models.adapter import attention_sites, geometry_of
from aatc_cli.models.loading import find_model, load_model
from aatc_cli.runtime.attach import attach_codecs

WINDOW = Window(sinks=2, recent=8, flush=4)


@torch.no_grad()
@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 24},
        {"num_key_value_heads": 1},
        {"tie_word_embeddings": True},
        {"hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 10},
    ],
    ids=["wide-heads", "mqa", "tied", "odd"],
)
def test_token_by_token_equals_the_one_pass_evaluator(
    new_model: Any, codecs: Any, tmp_path: Path, changes: dict[str, Any]
) -> None:
    model = load_model(find_model(str(new_model(tmp_path / "model", num_hidden_layers=2, **changes)))).double()
    geometry = geometry_of(model.config)
    plan = codecs(geometry.layers, geometry.channels, 1, 3)
    ids = torch.randint(0, 256, (1, 36), generator=torch.Generator().manual_seed(0))
    expected = method_logits(model, attention_sites(model), Method("t", plan, WINDOW, "pre-rope"), ids, 0)
    with attach_codecs(model, plan, WINDOW) as session:
        cache = session.new_cache()
        rows = [model(ids[:, t : t + 1], **{session.keyword: cache}).logits[0, -1] for t in range(36)]
        assert cache.state.bytes_live() == cache.state.bytes_predicted()
    assert (torch.stack(rows)[:-1] - expected).abs().max() < 1e-9 * expected.abs().max()
    assert (model(ids).logits[0, :-1] - expected)[20:].abs().max() > 1e-3


@pytest.mark.parametrize("part", ["q_proj", "k_proj", "v_proj"])
def test_a_layer_of_another_width_is_refused_by_name(tiny_llama: Path, part: str) -> None:
    """Head dims that differ from layer to layer have no place in one geometry."""
    model = load_model(find_model(str(tiny_llama)))
    setattr(model.model.layers[2].self_attn, part, torch.nn.Linear(64, 48, bias=False))
    with pytest.raises(UnsupportedModelError, match=rf"model.layers.2.self_attn.{part} does not give"):
        attention_sites(model)
