"""What generation needs of a model beside its forward pass: its own cache, the tokens that end a text, a chat turn."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.cache_utils import DynamicCache

from aatc_cli.errors import AatcError
from aatc_cli.models.loading import Tokenizer


def plain_cache(model: nn.Module) -> Any:
    """An empty cache as the model makes it for itself, with nothing compressed."""
    return DynamicCache(config=model.config)


def end_tokens(model: nn.Module) -> frozenset[int]:
    """Tokens after which nothing follows, from the generation configuration or the model's own."""
    generation: Any = getattr(model, "generation_config", None)
    config: Any = model.config
    found = getattr(generation, "eos_token_id", None)
    if found is None:
        found = getattr(config.get_text_config(), "eos_token_id", None)
    return frozenset([found] if isinstance(found, int) else found or [])


def chat_turn(tokenizer: Tokenizer, text: str) -> str:
    """``text`` as a user's turn with the opening of the answer, by the model's chat template; raises `AatcError`."""
    if not getattr(tokenizer.raw, "chat_template", None):
        raise AatcError("the tokenizer of this model has no chat template", "leave out --chat")
    messages = [{"role": "user", "content": text}]
    return str(tokenizer.raw.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def chat_tokens(tokenizer: Tokenizer, text: str, prefix: str) -> list[int]:
    """Tokens of a chat turn and the beginning of its answer; the template's own BOS stays the only one."""
    return tokenizer.encode(chat_turn(tokenizer, text) + prefix.lstrip())


def plain_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of ``text`` behind the BOS that the tokenizer puts in front of texts, where it does."""
    return [*([] if tokenizer.bos is None else [tokenizer.bos]), *tokenizer.encode(text)]
