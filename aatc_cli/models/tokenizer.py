"""A model's tokenizer, and a hash of all that decides which tokens it makes of a text."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from aatc_cli.artifacts.manifest import digest_of
from aatc_cli.errors import AatcError
from aatc_cli.models.attempt import attempt
from aatc_cli.models.kept import kept
from aatc_cli.models.source import ModelSource
from aatc_cli.models.steady import check_steady

# settings of the last call, not of the tokenizer, and the number of the file format
_PASSING = ("version", "truncation", "padding")
# what a tokenizer does beside its backend
_SWITCHES = ("split_special_tokens", "clean_up_tokenization_spaces")
# any of which holds a vocabulary
_FILES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json")
_PROBE = "The quick brown fox, 12345 times:\n\n\tnaïve 世界!"


@dataclass(frozen=True)
class Tokenizer:
    """The two things this tool needs of a tokenizer: plain encoding, and the BOS it puts in front by itself.

    ``digest`` covers how text becomes tokens and back; ``chat_digest`` the chat template, which only chats read.
    """

    encode: Callable[[str], list[int]]
    bos: int | None
    digest: str
    raw: Any

    @property
    def chat_digest(self) -> str | None:
        """sha256 of the chat template, or None where there is none."""
        template = getattr(self.raw, "chat_template", None)
        return digest_of(template) if template else None


@kept
def load_tokenizer(source: ModelSource) -> Tokenizer:
    """The model's tokenizer, with no special tokens added by `Tokenizer.encode`.

    Raises `AatcError` where there is none, and where transformers makes another tokenizer of a .gguf file than the
    model's own.
    """
    raw = _load(source)
    if source.gguf and _is_gemma(source) and _kind(raw) == "Unigram":
        raise AatcError(
            f"transformers {version('transformers')} makes another tokenizer of {source.gguf} than the model's own",
            "install transformers 5.24 or newer, or give the model's folder",
        )
    with_special = raw("a")["input_ids"]
    bos = raw.bos_token_id if raw.bos_token_id is not None and with_special[:1] == [raw.bos_token_id] else None
    # the length warning compares a whole text with the model's context; windows are cut afterwards
    raw.model_max_length = 1 << 60

    def encode(text: str) -> list[int]:
        ids: list[int] = raw(text, add_special_tokens=False)["input_ids"]
        return ids

    digest = digest_of([_behaviour(raw), _specials(raw), bos, encode(_PROBE)])
    return Tokenizer(encode=encode, bos=bos, digest=f"whole:{digest}", raw=raw)


def _load(source: ModelSource) -> Any:
    check_steady(source)
    # without any of them transformers may make a tokenizer that knows no word
    if not source.gguf and not any(any(source.folder.glob(name)) for name in _FILES):
        raise AatcError(
            f"{source.name} has no tokenizer: there is no tokenizer.json in {source.folder}, nor another vocabulary",
            "put the model's tokenizer.json and tokenizer_config.json beside its weights",
        )
    return attempt(source.name, lambda: AutoTokenizer.from_pretrained(source.reference, **source.keywords))


def _behaviour(raw: Any) -> Any:
    """All of a tokenizer that is not Python, in an order of its own: vocabulary, merges, normalizer, added tokens."""
    backend = getattr(raw, "backend_tokenizer", None)
    if backend is None:
        return _saved(raw)
    found = {key: value for key, value in json.loads(backend.to_str()).items() if key not in _PASSING}
    found["added_tokens"] = sorted(found.get("added_tokens") or [], key=lambda token: int(token["id"]))
    # merges were once written as one string each
    merges = found["model"].get("merges")
    if merges:
        found["model"]["merges"] = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in merges]
    return found


def _saved(raw: Any) -> Any:
    """The same of a tokenizer that is written in Python: its class, vocabulary and what it saves."""
    with tempfile.TemporaryDirectory() as folder:
        saved = sorted(raw.save_vocabulary(folder) or ())
        hashes = [hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in saved]
    return [type(raw).__name__, sorted(raw.get_vocab().items()), hashes]


def _specials(raw: Any) -> Any:
    switches = {name: bool(getattr(raw, name, False)) for name in _SWITCHES}
    names = {name: str(token) for name, token in raw.special_tokens_map.items()}
    return [switches, names]


def _kind(raw: Any) -> str:
    """How a tokenizer cuts text: Unigram by the likelihood of its pieces, as none of Gemma does; BPE merges pairs."""
    return type(getattr(getattr(raw, "backend_tokenizer", None), "model", None)).__name__


def _is_gemma(source: ModelSource) -> bool:
    config = attempt(source.name, lambda: AutoConfig.from_pretrained(source.reference, **source.keywords))
    return str(config.model_type).startswith("gemma")
