"""Windows that begin with a prompt: what such an evaluation measures, and what it does not."""

from __future__ import annotations

from collections.abc import Sequence

from aatc_cli.core.layout import packed_tokens
from aatc_cli.errors import AatcError, UsageError
from aatc_cli.evals.subjects import Subject
from aatc_cli.evals.windows.settings import WindowSettings


def check_prompt(subjects: Sequence[Subject], settings: WindowSettings) -> None:
    """Raise for positions inside the prompt, which see everything exactly, and for presses that need a prompt.

    `UsageError` for a first position in the prompt, `AatcError` for a press that would leave all tokens.
    """
    prompt = settings.prompt_tokens
    if prompt and settings.first_position < prompt:
        raise UsageError(
            f"--first {settings.first_position} lies in the prompt of {prompt} tokens, which is not compressed yet",
            f"score from --first {prompt} on, or give a shorter --prompt",
        )
    if prompt >= settings.length - 1:
        raise UsageError(
            f"--prompt {prompt} leaves no position to score in windows of {settings.length}",
            "use a shorter --prompt or a larger --length",
        )
    for subject in subjects:
        press, window = subject.recipe.choices.press, subject.recipe.window
        if not press.nothing and press.acts == "prompt" and not packed_tokens(prompt, window):
            least = window.sinks + window.recent + 1
            raise AatcError(
                f"press {press.name} of {subject.name} acts when a prompt ends, and there is none that is longer than "
                "its sinks and window",
                f"give --prompt {least} or more: so many tokens of every window are the prompt",
            )
