"""How much of what is asked a plan was calibrated on, said where there is any."""

from __future__ import annotations

from collections.abc import Sequence

from aatc_cli.console import say
from aatc_cli.evals.opened import Opened
from aatc_cli.evals.subjects import Subject
from aatc_cli.evals.windows.seen import seen_of_prompts
from aatc_cli.text.ruler.prompt import Sample


def calibrated_share(opened: Opened, subject: Subject, samples: Sequence[Sample], what: str) -> float | None:
    """Share of the prompts' tokens that is calibration text of the subject; None where none can tell."""
    if subject.plan is None:
        return None
    share = seen_of_prompts(subject.plan, [sample.tokens for sample in samples], opened.tokenizer.bos)
    if share:
        say(f"eval: {share:.0%} of {what} is calibration text of {subject.name}: its scores flatter it")
    return share
