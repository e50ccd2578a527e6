"""Score every subject on the same windows of every text: what is there is taken over, what is missing is run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aatc_cli.artifacts.evaluation import Evaluation, write_evaluation
from aatc_cli.console import progress, say
from aatc_cli.errors import UsageError
from aatc_cli.evals.forced.scores import Scores, score_windows
from aatc_cli.evals.forced.subject_method import method_of
from aatc_cli.evals.keeping import found_before
from aatc_cli.evals.opened import Opened
from aatc_cli.evals.subjects import Subject
from aatc_cli.evals.windows.frame import Frame, check_packed
from aatc_cli.evals.windows.prompts import check_prompt
from aatc_cli.evals.windows.settings import WindowSettings
from aatc_cli.models.adapter import attention_sites
from aatc_cli.runtime.second_pass import Reader

# evaluations of these subjects on one text, in their order
Runner = Callable[[Frame, Sequence[Subject]], list[Evaluation]]


def measure_windows(opened: Opened, settings: WindowSettings, runner: Runner) -> list[Evaluation]:
    """Evaluations of every text and subject, each written as soon as its text is done.

    Raises `UsageError` for a first position that is not in a window, `AatcError` for text or windows that cannot be
    used, `SettingsMismatchError` for a result that is there of another plan.
    """
    if not 0 <= settings.first_position < settings.length - 1:
        raise UsageError(
            f"--first {settings.first_position} leaves no position to score in windows of {settings.length}",
            "use a smaller --first or a larger --length",
        )
    opened.check_length(settings.length)
    check_prompt(opened.subjects, settings)
    for subject in opened.subjects:
        check_packed(subject, settings.length)
    frames = [Frame.of(opened, settings, text) for text in dict.fromkeys(settings.text)]
    for frame in frames:
        frame.say_seen()
    return [evaluation for frame in frames for evaluation in _fill(frame, runner)]


def _fill(frame: Frame, runner: Runner) -> list[Evaluation]:
    """The evaluations of one text, of all subjects in their order."""
    opened = frame.opened
    found = {s.name: found_before(opened, frame.evaluation(s, 0.0, {})) for s in opened.subjects}
    wanted = min(frame.settings.traced, frame.windows.tokens.shape[0])
    # a result without the traces that are asked for now is run again: its numbers stay as they are
    missing = [s for s in opened.subjects if (e := found[s.name]) is None or len(e.traces or ()) < wanted]
    for subject in opened.subjects:
        if subject not in missing:
            say(f"eval: {opened.task} of {subject.name} on {frame.text} is there already, nothing to do")
    if missing:
        for subject, evaluation in zip(missing, runner(frame, missing), strict=True):
            path = write_evaluation(opened.run.evals, evaluation)
            say(f"eval: {opened.task} of {subject.name} on {frame.text} -> {path}")
            found[subject.name] = evaluation
    return [evaluation for evaluation in found.values() if evaluation is not None]


def forced_scores(frame: Frame, subjects: Sequence[Subject]) -> list[Scores]:
    """Scores of the subjects on a frame's windows, by teacher-forced passes that share the reference's."""
    opened = frame.opened
    model = opened.model()
    sites = attention_sites(model)
    reader = Reader(opened.tokenizer.encode)
    methods = [method_of(subject, sites, opened.options, reader) for subject in subjects]
    what, batch = f"eval {opened.task}", opened.options.batch
    with progress(what, -(-frame.windows.tokens.shape[0] // batch) * (1 + len(methods))) as ticker:
        return score_windows(
            model,
            sites,
            methods,
            frame.windows.tokens,
            frame.settings.first_position,
            lambda name: ticker.advance(text=f"{what}: {name}"),
            frame.settings.prompt_tokens,
            batch,
        )
