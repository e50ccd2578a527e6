"""Feeding tokens one at a time to an attention of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from aatc_cli.models.adapter import AttentionSite
from aatc_cli.models.attention import LayerInputs, attention_override

Attend = Callable[[LayerInputs], Tensor]


@torch.no_grad()
def _fed_one_by_one(model: Any, sites: list[AttentionSite], attend: Attend, tokens: Tensor) -> Tensor:
    """Logits [T, V] of tokens [1, T]; what was before is for ``attend`` to remember."""
    rows = []
    with attention_override(model, sites, attend):
        for position in range(tokens.shape[1]):
            step = model(
                input_ids=tokens[:, position : position + 1], position_ids=torch.tensor([[position]]), use_cache=False
            )
            rows.append(step.logits[0, -1])
    return torch.stack(rows)


@pytest.fixture(scope="session")
def fed_one_by_one() -> Callable[..., Tensor]:
    return _fed_one_by_one
