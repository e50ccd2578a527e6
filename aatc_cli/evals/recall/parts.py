"""Means over parts of the tokens of second mentions: all, what was recalled, kinds, ranges of gaps, classes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from aatc_cli.evals.recall.result import RecallRow, RecallToken

Floats = NDArray[np.float64]

# recalled: not to be guessed at the first mention, and known at the second
_UNREAD, _KNOWN = math.log(0.1), math.log(0.5)


def rows_of(tokens: Sequence[RecallToken], least: int) -> list[RecallRow]:
    """Rows of all parts that have a token; ranges of gaps double from ``least`` on."""
    parts: list[tuple[str, Floats]] = [
        ("all", np.ones(len(tokens))),
        ("recalled", _mask([t.unread < _UNREAD and t.reference > _KNOWN for t in tokens])),
        ("names", _mask([t.kind == "name" for t in tokens])),
        ("numbers", _mask([t.kind == "number" for t in tokens])),
    ]
    gaps = [t.again - t.first for t in tokens]
    low = least
    while low <= max(gaps, default=0):
        parts.append((f"gap {low} to {2 * low - 1}", _mask([low <= gap < 2 * low for gap in gaps])))
        low *= 2
    for k in range(max((len(t.classes or ()) for t in tokens), default=0)):
        parts.append((f"class {k}", np.array([(t.classes or [0.0] * (k + 1))[k] for t in tokens])))
    return [_row(name, tokens, weights) for name, weights in parts if weights.sum() > 0]


def _mask(chosen: list[bool]) -> Floats:
    return np.array(chosen, dtype=np.float64)


def _row(part: str, tokens: Sequence[RecallToken], weights: Floats) -> RecallRow:
    windows = np.array([t.window for t in tokens])
    reference, own = (np.array([getattr(t, name) for t in tokens]) for name in ("reference", "logprob"))
    loss = reference - own
    agree = _mask([t.agree for t in tokens])
    known = weights * _mask([t.first_of_reference for t in tokens])
    return RecallRow(
        part=part,
        tokens=float(weights.sum()),
        windows=len(set(windows[weights > 0].tolist())),
        loss=_mean(loss, weights),
        loss_stderr=_stderr(loss, weights, windows),
        loss_p90=_quantile(loss, weights, 0.9),
        loss_p99=_quantile(loss, weights, 0.99),
        agree=_mean(agree, weights),
        agree_stderr=_stderr(agree, weights, windows),
        probability=_mean(np.exp(own), weights),
        probability_reference=_mean(np.exp(reference), weights),
        kept=_mean(_mask([t.first_of_all for t in tokens]), known) if known.sum() > 0 else None,
    )


def _mean(values: Floats, weights: Floats) -> float:
    return math.fsum(values * weights) / math.fsum(weights)


def _stderr(values: Floats, weights: Floats, windows: NDArray[np.int64]) -> float | None:
    """Standard error of a weighted mean of tokens that come in clusters, a window each; None for one window."""
    mean, names = _mean(values, weights), sorted(set(windows[weights > 0].tolist()))
    if len(names) < 2:
        return None
    sums = [math.fsum((weights * (values - mean))[windows == name]) for name in names]
    return math.sqrt(len(names) / (len(names) - 1) * math.fsum(s * s for s in sums)) / math.fsum(weights)


def _quantile(values: Floats, weights: Floats, share: float) -> float:
    """The least value that ``share`` of the weight does not exceed."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    return float(values[order[min(int(np.searchsorted(reached, share * reached[-1])), order.size - 1)]])
