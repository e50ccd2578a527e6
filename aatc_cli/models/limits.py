"""What a model can take: refuse windows that are too long and tokens that have no embedding, by number."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from aatc_cli.errors import AatcError


def check_length(length: int, config: Any, option: str = "--length") -> None:
    """Raise `AatcError` naming both numbers, and the ``option`` to change, when that is beyond the model's context."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise AatcError(
            f"{length} tokens are more than the model's context of {limit}", f"use {option} {limit} or less"
        )


def check_tokens(tokens: Tensor, config: Any) -> None:
    """Raise `AatcError` naming both numbers when the tokenizer gives tokens the model has no embedding for."""
    highest, vocabulary = int(tokens.max()), int(config.get_text_config().vocab_size)
    if highest >= vocabulary:
        raise AatcError(
            f"the tokenizer gives token {highest}, but the model has embeddings for {vocabulary} tokens only",
            "the tokenizer and the model do not belong together: fetch the model again",
        )
