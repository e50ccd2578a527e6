"""What a model can take: refuse windows that are too long and tokens that have no embedding, by number."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from aatc_cli.errors import AatcError


def context_limit(config: Any) -> int | None:
    """Tokens that a model can take with the frequencies it rotates with, or None where nothing limits them.

    ``max_position_embeddings`` is that number with llama3 and longrope scaling. YaRN leaves it as it was before (Qwen)
    or not, so the original context times the factor is taken. Linear scaling leaves it as it was, but in models whose
    layers rotate in two ways (Gemma 3). With dynamic scaling every further token changes all frequencies, which no
    cache of keys can follow: it is the limit as well.
    """
    text = config.get_text_config()
    limit: int | None = getattr(text, "max_position_embeddings", None)
    rope = dict(getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {})
    by_layer = isinstance(rope.get("full_attention"), dict)
    if by_layer:
        rope = rope["full_attention"]
    kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor")
    if limit is None or factor is None:
        return limit
    if kind == "yarn":
        return int(factor * (rope.get("original_max_position_embeddings") or limit))
    return int(factor * limit) if kind == "linear" and not by_layer else limit


def check_length(length: int, config: Any, option: str = "--length", beside: int = 0) -> None:
    """Raise `AatcError` naming both numbers, and the ``option`` to change, when that is beyond `context_limit`.

    beside: tokens of ``length`` that the option does not count.
    """
    limit = context_limit(config)
    if limit is not None and length > limit:
        raise AatcError(
            f"{length} tokens are more than the model's context of {limit}",
            f"use {option} {max(limit - beside, 1)} or less",
        )


def check_tokens(tokens: Tensor, config: Any) -> None:
    """Raise `AatcError` naming both numbers when the tokenizer gives tokens the model has no embedding for."""
    highest, vocabulary = int(tokens.max()), int(config.get_text_config().vocab_size)
    if highest >= vocabulary:
        raise AatcError(
            f"the tokenizer gives token {highest}, but the model has embeddings for {vocabulary} tokens only",
            "the tokenizer and the model do not belong together: fetch the model again",
        )
