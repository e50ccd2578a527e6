"""Windows of tokens: drawn at random over weighted sources to calibrate, or one after another to evaluate."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from aatc_cli.artifacts.manifest import TextRecord
from aatc_cli.artifacts.tensor_file import tensor_digest
from aatc_cli.errors import AatcError, UsageError
from aatc_cli.text.sources import FORMS, TextSource, documents, parse_source

Encode = Callable[[str], list[int]]
"""Token ids of a text, without special tokens."""

SEPARATOR = "\n\n"
# a hub source may have no end: this many times the slots that are drawn are read of it
HUB_SLOTS = 4


@dataclass(frozen=True, eq=False)
class Windows:
    """Windows of equal length, a record of each text they come from, and the sha256 of the token bytes.

    ``tokens`` is int64 [N, length], N windows.
    """

    tokens: torch.Tensor
    records: list[TextRecord]
    digest: str


@dataclass(frozen=True, eq=False)
class _Tokenised:
    tokens: torch.Tensor  # int64 [T]
    sha256: str


def draw_windows(
    specs: Sequence[str], encode: Encode, *, samples: int, length: int, seed: int, bos: int | None = None
) -> Windows:
    """Draw ``samples`` windows of ``length`` tokens from the texts in ``specs``, by weight, for calibration.

    Each text (documents joined by a blank line) is cut into slots that do not overlap, each with ``bos`` in front if
    it is given; slots are drawn without replacement and the windows of all texts shuffled together, as in "Experimental
    Setting". The same seed gives the same windows. Raises `UsageError` for wrong values and `AatcError` when a text
    has too little for its share, or is there twice, whose windows could be drawn twice.
    """
    if samples < 1:
        raise UsageError(f"samples must be at least 1, got {samples}", "raise --samples")
    size = _text_tokens(length, bos)
    if not specs:
        raise UsageError("no text source was given", f"write {FORMS}")
    sources = [parse_source(spec) for spec in specs]
    shares = largest_remainder([source.weight for source in sources], samples)
    for source, share in zip(sources, shares, strict=True):
        if share == 0:
            raise AatcError(
                f"the text {source.name!r} gets none of the {samples} windows by its weight {source.weight:g}",
                "raise --samples or its weight, or leave it out",
            )
    drawn, records = [], []
    for index, (source, share) in enumerate(zip(sources, shares, strict=True)):
        text = _tokenise(source, encode, enough=HUB_SLOTS * share * size if source.kind == "hub" else None)
        drawn.append(_draw_slots(text, source, share, size, _generator(seed, index)))
        records.append(_record(source, text, share))
        twin = next((old for old in records[:-1] if old.sha256 == text.sha256), None)
        if twin is not None:
            names = source.name if twin.name == source.name else f"{twin.name} and {source.name}"
            raise AatcError(
                f"one text is given twice: {names}",
                "name it once; to draw more of it than of others, give it a weight: @2",
            )
    slots = torch.cat(drawn)
    return _windows(slots[torch.randperm(samples, generator=_generator(seed, "shuffle"))], records, bos)


def consecutive_windows(
    spec: str, encode: Encode, *, length: int, limit: int | None, bos: int | None = None, stride: int | None = None
) -> Windows:
    """Cut the text in ``spec`` from its start into windows of ``length`` tokens, at most ``limit``, to evaluate on.

    Windows start ``stride`` tokens of text apart: by default one follows the other with nothing left out, which is
    ``length`` apart, or ``length - 1`` when ``bos`` takes the first place of each. With a limit no more documents are
    read than it needs. A rest shorter than a window is left out. Raises `UsageError` for wrong values and `AatcError`
    for a text shorter than one window.
    """
    size = _text_tokens(length, bos)
    step = size if stride is None else stride
    if step < 1:
        raise UsageError(f"stride must be at least 1, got {stride}", "raise --stride")
    if limit is not None and limit < 1:
        raise UsageError(f"the number of windows must be at least 1, got {limit}", "raise the limit, or leave it out")
    source = parse_source(spec)
    text = _tokenise(source, encode, enough=None if limit is None else (limit - 1) * step + size)
    found = text.tokens.numel()
    if found < size:
        raise AatcError(
            f"the text {source.name!r} has {found} tokens, fewer than the {size} of one window",
            "lower --length, or give a longer text",
        )
    slots = text.tokens.unfold(0, size, step)[:limit]
    return _windows(slots, [_record(source, text, slots.shape[0])], bos)


def largest_remainder(weights: Sequence[float], total: int) -> list[int]:
    """Share ``total`` items by weight: whole parts first, the rest by falling fraction, earlier first on a tie.

    Weights count as the decimal numbers they are written as, so that 0.1 and 0.2 tie exactly where they should.
    """
    exact = [Fraction(repr(float(weight))) for weight in weights]
    quotas = [weight * total / sum(exact) for weight in exact]
    shares = [int(quota) for quota in quotas]
    order = sorted(range(len(quotas)), key=lambda i: (shares[i] - quotas[i], i))
    for index in order[: total - sum(shares)]:
        shares[index] += 1
    return shares


def _text_tokens(length: int, bos: int | None) -> int:
    """Tokens of text in one window: all of it, or one less when ``bos`` is put in front."""
    if length < 2:
        raise UsageError(f"a window must be at least 2 tokens long, got {length}", "raise --length")
    return length if bos is None else length - 1


def _tokenise(source: TextSource, encode: Encode, enough: int | None) -> _Tokenised:
    """Tokenise ``source`` document by document, and stop once ``enough`` tokens are there.

    The hash covers the text that was tokenised, separators included.
    """
    ids = array("q")
    digest = hashlib.sha256()
    for index, document in enumerate(documents(source)):
        piece = SEPARATOR + document if index else document
        digest.update(piece.encode("utf-8"))
        ids.extend(encode(piece))
        if enough is not None and len(ids) >= enough:
            break
    tokens = torch.frombuffer(ids, dtype=torch.int64).clone() if ids else torch.empty(0, dtype=torch.int64)
    return _Tokenised(tokens, digest.hexdigest())


def _draw_slots(
    text: _Tokenised, source: TextSource, wanted: int, size: int, generator: torch.Generator
) -> torch.Tensor:
    """``wanted`` slots [wanted, size] of the text, drawn without replacement in random order."""
    available = text.tokens.numel() // size
    if available < wanted:
        raise AatcError(
            f"the text {source.name!r} has {available} windows of {size} tokens, but {wanted} are needed",
            "lower --samples or --length, or give more text",
        )
    chosen = torch.randperm(available, generator=generator)[:wanted]
    return text.tokens[: available * size].view(available, size)[chosen]


def _generator(seed: int, stream: int | str) -> torch.Generator:
    """A generator of its own for each use of ``seed``, so that no source changes what another one draws."""
    state = hashlib.sha256(f"{seed}:{stream}".encode()).digest()[:8]
    return torch.Generator().manual_seed(int.from_bytes(state, "big") >> 1)


def _record(source: TextSource, text: _Tokenised, windows: int) -> TextRecord:
    return TextRecord(
        name=source.name, weight=source.weight, sha256=text.sha256, tokens=text.tokens.numel(), windows=windows
    )


def _windows(slots: torch.Tensor, records: list[TextRecord], bos: int | None) -> Windows:
    """Put ``bos`` in front of every slot [N, size] and hash the result."""
    first = slots.new_full((slots.shape[0], 0 if bos is None else 1), bos or 0)
    tokens = torch.cat([first, slots], dim=1)
    return Windows(tokens, records, tensor_digest(tokens))
