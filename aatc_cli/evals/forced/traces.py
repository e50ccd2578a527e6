"""KL of single positions with the text they stand in, kept of a few windows for people to read."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from aatc_cli.artifacts.evaluation import TokenTrace
from aatc_cli.evals.forced.scores import Scores


def token_traces(
    scores: Scores, windows: Tensor, first: int, count: int, decode: Callable[[list[int]], str]
) -> list[TokenTrace]:
    """Traces of the first ``count`` of ``windows`` [n, T], which were scored from position ``first`` on.

    The KL of a position belongs to the prediction of the token after it, which is the one that stands beside it.
    """
    return [
        TokenTrace(
            window=index,
            first=first + 1,
            tokens=[decode([int(token)]) for token in windows[index, first + 1 :]],
            kl=[float(value) for value in kl],
        )
        for index, kl in enumerate(scores.kl[:count])
    ]
