"""Accumulate: tokens decoded one by one with a live cache, beside the uncompressed model over the same tokens."""

from __future__ import annotations

from aatc_cli.artifacts.evaluation import write_evaluation
from aatc_cli.console import progress, say
from aatc_cli.evals.accumulate.result import Result
from aatc_cli.evals.accumulate.settings import Settings
from aatc_cli.evals.accumulate.walking import Ticks, Walk
from aatc_cli.evals.caches import cache_kind
from aatc_cli.evals.keeping import found_before
from aatc_cli.evals.opened import Opened
from aatc_cli.evals.subjects import Subject
from aatc_cli.evals.windows.frame import check_packed
from aatc_cli.evals.windows.seen import seen_share
from aatc_cli.models.limits import check_tokens
from aatc_cli.text.windows import Windows, consecutive_windows


def measure(opened: Opened, settings: Settings) -> list[Result]:
    """Every subject on every text, each written when its text is done.

    Raises `AatcError` for more tokens than the model has positions, or for so few that a plan keeps them exact.
    """
    opened.check_length(settings.length, "--tokens", settings.prompt + 1)
    for subject in opened.subjects:
        check_packed(subject, settings.length, "--tokens")
    return [result for text in dict.fromkeys(settings.text) for result in _on_text(opened, settings, text)]


def _on_text(opened: Opened, settings: Settings, text: str) -> list[Result]:
    tokenizer, limit = opened.tokenizer, settings.limit or None
    windows = consecutive_windows(text, tokenizer.encode, length=settings.length, limit=limit, bos=tokenizer.bos)
    check_tokens(windows.tokens, opened.config)
    drafts = {subject.name: _draft(opened, settings, windows, subject) for subject in opened.subjects}
    found = {name: found_before(opened, draft) for name, draft in drafts.items()}
    missing = [subject for subject in opened.subjects if found[subject.name] is None]
    for subject in opened.subjects:
        if subject not in missing:
            say(f"eval: accumulate of {subject.name} on {drafts[subject.name].text} is there already, nothing to do")
    if missing:
        ticks = Ticks.of(opened, settings, windows.tokens.shape[0], len(missing))
        walk = Walk(opened, settings, windows.tokens, ticks)
        with progress("eval accumulate", ticks.total) as ticker:
            ticks.ticker = ticker
            for subject, result in walk.results(missing, drafts):
                path = write_evaluation(opened.run.evals, result)
                say(f"eval: accumulate of {subject.name} on {result.text} -> {path}")
                found[subject.name] = result
    return [result for result in found.values() if result is not None]


def _draft(opened: Opened, settings: Settings, windows: Windows, subject: Subject) -> Result:
    """The result before anything is decoded."""
    record, kind = windows.records[0], cache_kind(subject, opened.options) if settings.live else None
    share = seen_share(subject.plan, windows, opened.tokenizer.bos) if subject.plan is not None else None
    if share:
        say(f"eval: {share:.0%} of {record.name} is calibration text of {subject.name}: its figures flatter it")
    return Result(
        **opened.origin(subject),
        cache=kind,
        simulated=kind == "simulated",
        protocol=opened.protocol(
            tokens=windows.digest,
            text=record.sha256,
            windows=windows.tokens.shape[0],
            prompt=settings.prompt,
            decoded=settings.tokens,
            ways=list(settings.way),
            temperature=settings.temperature,
            seed=settings.seed,
            **({"at_once": True} if settings.at_once else {}),
        ),
        seconds=0.0,
        text=record.name,
        text_sha256=record.sha256,
        windows=windows.tokens.shape[0],
        prompt=settings.prompt,
        decoded=settings.tokens,
        calibration_share=share,
    )
