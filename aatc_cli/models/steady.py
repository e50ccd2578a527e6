"""One command reads a model's files several times; all of it has to be the same model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from aatc_cli.errors import AatcError
from aatc_cli.models.hash_cache import Stamp
from aatc_cli.models.source import ModelSource

_SMALL = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


def check_steady(source: ModelSource, weights: Sequence[Path] = ()) -> None:
    """Raise `AatcError` naming the first file that is not what it was when ``source`` was looked at first."""
    for path in (*(source.folder / name for name in _SMALL), *weights):
        now = Stamp.of(path) if path.exists() else None
        if source.seen.setdefault(str(path), now) != now:
            raise AatcError(
                f"{path} changed while the command ran: what it found before was of another model",
                "run the same command again, when nothing writes to the model's folder",
            )
