"""How RULER scores an answer: by the reference strings it contains, whatever else it says."""

from __future__ import annotations

import re
from collections.abc import Sequence

from aatc_cli.text.ruler.prompt import Metric

_CONTROL = re.compile(r"[\x00-\x1f]")


def score(answer: str, references: Sequence[str], metric: Metric) -> float:
    """``string_match_all``: share of the references contained, without regard to case; ``string_match_part``: any.

    It never falls as the answer grows, so generation may stop as soon as it is 1.
    """
    plain = _CONTROL.sub("\n", answer.strip()).strip().lower()
    found = [reference.lower() in plain for reference in references]
    return float(any(found)) if metric == "string_match_part" else sum(found) / len(found)
