"""cache: what is read and written by which plan and model, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aatc_cli.artifacts.plan import Plan
from aatc_cli.errors import AatcError
from aatc_cli.models.limits import check_length
from aatc_cli.models.loading import ModelSource
from aatc_cli.runtime.session import CacheChoice


@dataclass(frozen=True)
class Using:
    """What a prefix is read or written with: store, plan and model, and where that runs."""

    folder: Path
    plan: Plan
    source: ModelSource
    device: str = "cpu"
    dtype: str = "auto"
    cache: CacheChoice = "auto"


@dataclass(frozen=True)
class Stored:
    """A prefix that is in a store: its tokens, bytes of its objects, bytes that were new, and the same in float16."""

    tokens: int
    bytes: int
    new: int
    uncompressed: int
    there: bool


@dataclass(frozen=True)
class Continued:
    """A prefix that was read again: tokens that came from the store, tokens of the text, and what was generated."""

    stored: int
    tokens: int
    text: str


def token_ids(tokenizer: Any, text: str, using: Using, config: Any, new_tokens: int = 1) -> torch.Tensor:
    """Tokens [1, n] of a text where the model is; raises `AatcError` for a text of none, or of too many for the model.

    new_tokens: how many are to be generated behind them, of which the last enters no cache.
    """
    ids: torch.Tensor = tokenizer(text, return_tensors="pt")["input_ids"].to(using.device)
    if not ids.shape[1]:
        raise AatcError("the text has no tokens", "give a file with text in it by --file")
    check_length(ids.shape[1], config, "a text of")
    check_length(ids.shape[1] + new_tokens - 1, config, "--new-tokens", beside=ids.shape[1] - 1)
    return ids
