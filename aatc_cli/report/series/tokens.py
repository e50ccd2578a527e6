"""KL token by token: the pieces of a text, marked by what compression changed in front of each."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from aatc_cli.artifacts.evaluation import Evaluation
from aatc_cli.report.blocks import MarkedText, Piece
from aatc_cli.report.data.run import paper_first
from aatc_cli.report.text import number

# nats from which a piece is marked one step stronger: the same in every report, so that pages can be compared
LEVELS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


def marked_texts(evaluations: Sequence[Evaluation]) -> list[MarkedText]:
    """One text for every window that was recorded token by token."""
    traced = [e for e in evaluations if e.traces]
    found = []
    for e in sorted(traced, key=lambda e: (e.text, -e.bits, paper_first(e.recipe))):
        for trace in e.traces or []:
            pieces = tuple(
                Piece(text, bisect_right(LEVELS, kl), f"{number(kl)} nats at position {trace.first + place}")
                for place, (text, kl) in enumerate(zip(trace.tokens, trace.kl, strict=True))
            )
            caption = f"{e.method} on {e.text}, window {trace.window} from position {trace.first} on"
            found.append(MarkedText(caption, pieces, tuple(f"{level:g}" for level in LEVELS)))
    return found
