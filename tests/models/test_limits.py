"""Limits of a model are named with both numbers."""

from __future__ import annotations

import pytest
import torch

from aatc_cli.errors import AatcError
from aatc_cli.models.limits import check_length, check_tokens
from aatc_cli.models.loading import find_model, load_config


def test_limits_are_named(tiny_llama):
    config = load_config(find_model(str(tiny_llama)))
    with pytest.raises(AatcError, match=r"600 tokens .* context of 512"):
        check_length(600, config)
    check_length(512, config)
    with pytest.raises(AatcError, match=r"token 260, .* 260 tokens only"):
        check_tokens(torch.tensor([[1, 260]]), config)
    check_tokens(torch.tensor([[1, 259]]), config)
