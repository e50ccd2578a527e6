"""What was measured alike: only results of one protocol stand in one table, and what keeps others apart is said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aatc_cli.artifacts.evaluation import Evaluation

# versions that decide a number; others are recorded and told in the headline
DECIDING = ("aatc", "torch", "transformers")
# one table holds the measures of several tasks on the same windows, each with fields of its own
_OF_A_TASK = ("task", "queries")
_WORDS = {
    "weights": "weights of the model",
    "config": "configuration of the model",
    "tokenizer": "tokenizer",
    "text": "sha256 of the text",
    "tokens": "tokens of the windows",
    "first": "first scored position",
}


@dataclass(frozen=True, order=True)
class Protocol:
    """What must be equal before two evaluations on text are compared.

    ``facts`` are all things that determine a number beside the plan, by name, those in the other fields included.
    """

    model: str
    text: str
    length: int
    windows: int
    stride: int
    first_position: int
    dtype: str
    facts: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, e: Evaluation) -> Protocol:
        """The protocol an evaluation was made under."""
        return cls(e.model, e.text, e.length, e.windows, e.stride, e.first_position, e.dtype, facts_of(e))

    def describe(self) -> str:
        """The protocol in words, as the caption of its table."""
        windows = "1 window" if self.windows == 1 else f"{self.windows} windows"
        return (
            f"{self.text}: {windows} of {self.length} tokens, scored from position {self.first_position}, {self.dtype}"
        )

    @property
    def text_sha256(self) -> str:
        """Of the part of the text that was tokenised."""
        return dict(self.facts).get("text", "")

    def differences(self, other: Protocol) -> list[str]:
        """What was not the same, in words: ``torch 2.11.0 here and 2.12.0 there``."""
        mine, theirs = dict(self.facts), dict(other.facts)
        names = [name for name in dict.fromkeys((*mine, *theirs)) if mine.get(name) != theirs.get(name)]
        return [f"{_WORDS.get(n, n)} {_short(mine.get(n))} here and {_short(theirs.get(n))} there" for n in names]


def facts_of(e: Evaluation) -> tuple[tuple[str, str], ...]:
    """All that determines the evaluation's number beside its plan, by name; of older files what they recorded."""
    recorded: dict[str, Any] = dict(getattr(e, "protocol", None) or {})
    base = {
        "model": e.model,
        "weights": e.model_fingerprint,
        "text": e.text_sha256,
        "windows": e.windows,
        "length": e.length,
        "stride": e.stride,
        "first": e.first_position,
        "dtype": e.dtype,
        "device": e.device,
        "versions": {name: e.versions[name] for name in DECIDING if name in e.versions},
    }
    found = base | recorded
    versions = found.pop("versions")
    flat = {**found, **versions}
    kept = {name: value for name, value in flat.items() if name not in _OF_A_TASK and value is not None}
    return tuple(sorted((name, str(value)) for name, value in kept.items()))


def apart_notes(protocols: Sequence[Protocol]) -> list[tuple[str, ...]]:
    """For every protocol at most one note: from which earlier one of the same text it is kept apart, and by what."""
    notes: list[tuple[str, ...]] = []
    for place, protocol in enumerate(protocols):
        alike = [other for other in protocols[:place] if other.text == protocol.text]
        nearest = min(alike, key=lambda other: len(protocol.differences(other)), default=None)
        if nearest is None:
            notes.append(())
            continue
        said = "; ".join(protocol.differences(nearest))
        notes.append((f"Not to be compared with the table above on {nearest.text}: {said}.",))
    return notes


def _short(value: str | None) -> str:
    if value is None:
        return "not recorded"
    return value[:12] if len(value) >= 32 and value.isalnum() else value
