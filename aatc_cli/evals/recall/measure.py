"""Recall: how likely names and numbers are when they come again, far behind their first mention."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from aatc_cli.artifacts.evaluation import write_evaluation
from aatc_cli.console import progress, say
from aatc_cli.errors import AatcError, UsageError
from aatc_cli.evals.keeping import found_before
from aatc_cli.evals.opened import Opened
from aatc_cli.evals.recall.parts import rows_of
from aatc_cli.evals.recall.reading import Reader, Seen
from aatc_cli.evals.recall.result import Result
from aatc_cli.evals.recall.settings import Settings
from aatc_cli.evals.subjects import Subject
from aatc_cli.evals.windows.seen import seen_share
from aatc_cli.models.limits import check_tokens
from aatc_cli.text.mentions import Mention, mentions
from aatc_cli.text.windows import Windows, consecutive_windows


def measure(opened: Opened, settings: Settings) -> list[Result]:
    """Recall of every subject on every text, each written when its text is done.

    Raises `AatcError` for text without a second mention, `UsageError` for a gap within which a subject is exact.
    """
    opened.check_length(settings.length)
    for subject in opened.subjects:
        window, press = subject.recipe.window, subject.recipe.choices.press
        if not press.nothing and press.acts == "prompt":
            raise UsageError(
                f"press {press.name} of {subject.name} acts when a prompt ends, and recall reads text without one",
                "use aatc eval ruler --mode forced, or aatc eval kl --prompt",
            )
        if subject.plan is not None and settings.gap < window.recent + window.flush:
            raise UsageError(
                f"a first mention {settings.gap} tokens before may still be exact in the window of {subject.name}",
                f"use --gap {window.recent + window.flush} or more",
            )
    return [result for text in dict.fromkeys(settings.text) for result in _on_text(opened, settings, text)]


def _on_text(opened: Opened, settings: Settings, text: str) -> list[Result]:
    tokenizer, limit = opened.tokenizer, settings.limit or None
    windows = consecutive_windows(text, tokenizer.encode, length=settings.length, limit=limit, bos=tokenizer.bos)
    check_tokens(windows.tokens, opened.config)
    places = [mentions(window.tolist(), tokenizer.raw.decode, settings.gap) for window in windows.tokens]
    if not any(places):
        raise AatcError(
            f"{windows.records[0].name} has no name or number that comes again after {settings.gap} tokens",
            "use more or longer windows (--limit, --length), another text, or a smaller --gap",
        )
    drafts = {subject.name: _draft(opened, settings, windows, places, subject) for subject in opened.subjects}
    found = {name: found_before(opened, draft) for name, draft in drafts.items()}
    missing = [subject for subject in opened.subjects if found[subject.name] is None]
    for subject in opened.subjects:
        if subject not in missing:
            say(f"eval: recall of {subject.name} on {drafts[subject.name].text} is there already, nothing to do")
    if missing:
        for subject, seen in _read(opened, windows, places, missing):
            changes = {"tokens": seen.tokens, "rows": rows_of(seen.tokens, settings.gap), "seconds": seen.seconds}
            result = drafts[subject.name].model_copy(update=changes)
            say(f"eval: recall of {subject.name} on {result.text} -> {write_evaluation(opened.run.evals, result)}")
            found[subject.name] = result
    return [result for result in found.values() if result is not None]


def _draft(
    opened: Opened, settings: Settings, windows: Windows, places: list[list[Mention]], subject: Subject
) -> Result:
    """The result before anything is read."""
    record = windows.records[0]
    share = seen_share(subject.plan, windows, opened.tokenizer.bos) if subject.plan is not None else None
    if share:
        say(f"eval: {share:.0%} of {record.name} is calibration text of {subject.name}: its figures flatter it")
    return Result(
        **opened.origin(subject),
        protocol=opened.protocol(
            tokens=windows.digest,
            text=record.sha256,
            windows=windows.tokens.shape[0],
            length=settings.length,
            gap=settings.gap,
            places=[[[m.first, m.again, m.size] for m in window] for window in places],
        ),
        seconds=0.0,
        text=record.name,
        text_sha256=record.sha256,
        windows=windows.tokens.shape[0],
        length=settings.length,
        gap=settings.gap,
        places=sum(len(window) for window in places),
        calibration_share=share,
    )


def _read(
    opened: Opened, windows: Windows, places: list[list[Mention]], subjects: Sequence[Subject]
) -> Iterator[tuple[Subject, Seen]]:
    """What every subject sees at the second mentions of all windows, one by one; the reference's pass is shared."""
    reader = Reader(opened, subjects)
    asked = [(index, mine) for index, mine in enumerate(places) if mine]
    with progress("eval recall", len(asked) * (1 + len(subjects))) as ticker:
        references = []
        for index, mine in asked:
            references.append(reader.reference(index, windows.tokens[index], mine))
            ticker.advance(text="eval recall: reference")
        for subject in subjects:
            seen, began = reader.seen[subject.name], time.perf_counter()
            size = opened.options.batch
            for some in (references[start : start + size] for start in range(0, len(references), size)):
                reader.read(subject, some)
                ticker.advance(len(some), text=f"eval recall: {subject.name}")
            seen.seconds = time.perf_counter() - began
            yield subject, seen
