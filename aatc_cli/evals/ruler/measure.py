"""RULER: retrieval, tracking, aggregation and questions at chosen context lengths, by generation."""

from __future__ import annotations

from dataclasses import dataclass

from aatc_cli.artifacts.manifest import digest_of
from aatc_cli.console import say
from aatc_cli.errors import AatcError
from aatc_cli.evals.answers.asking import Asker, prompt_tokens
from aatc_cli.evals.answers.ledger import Ledger, score_row
from aatc_cli.evals.opened import Opened
from aatc_cli.evals.ruler.result import Result
from aatc_cli.evals.ruler.settings import Settings
from aatc_cli.evals.windows.frame import check_packed
from aatc_cli.models.tokenizer import Tokenizer
from aatc_cli.text.ruler.collections import open_collections
from aatc_cli.text.ruler.prompt import Metric, Prompt, Sample, make_samples
from aatc_cli.text.ruler.tasks import SAMPLES, TASKS, Material, chosen_tasks, make_task
from aatc_cli.text.sources import documents, parse_source


@dataclass(frozen=True)
class _Job:
    """One subtask at one context, ready to be asked."""

    subtask: str
    context: int
    metric: Metric
    room: int
    samples: list[Sample]
    prompts: str


def measure(opened: Opened, settings: Settings) -> list[Result]:
    """Ask every subject the same prompts, and write a row per subtask and context as it comes.

    Rows of the same plan, model and prompts are not run again. Raises `AatcError` for a context that the model does
    not have or that a plan keeps exact, `UsageError` for an unknown subtask.
    """
    names = chosen_tasks(settings.subtask)
    for context in settings.context:
        opened.check_length(context)
        for subject in opened.subjects:
            check_packed(subject, context, "--context")
    text = "\n\n".join(document for spec in settings.text for document in documents(parse_source(spec)))
    ledger = Ledger.open(
        opened, TASKS, samples=settings.limit, seed=settings.seed, chat=settings.chat, text=digest_of(text)
    )
    jobs, left_out = _jobs(names, settings, opened.tokenizer, text)
    for name, reason in left_out.items():
        say(f"eval: {name} is left out: {reason}")
    if not jobs:
        raise AatcError(f"no RULER task can be asked: {next(iter(left_out.values()))}", "give a larger --context")
    asker = Asker(opened)
    for job in jobs:
        missing = ledger.missing(opened.subjects, job.subtask, job.context, job.prompts)
        what = f"ruler {job.subtask} at {job.context}"
        for subject in opened.subjects:
            if subject not in missing:
                say(f"eval: {what} of {subject.name} is there already, nothing to do")
        if missing:
            answers, seconds = asker.answers(what, job.samples, job.metric, job.room, missing)
            for subject, found in zip(missing, answers, strict=True):
                place, scores = (job.subtask, job.context, job.metric), [answer.score for answer in found]
                ledger.add(subject, score_row(place, scores, job.prompts, seconds), what)
    ledger.leave_out(opened.subjects, left_out)
    return [ledger.results[subject.name] for subject in opened.subjects]


def _jobs(names: list[str], settings: Settings, tokenizer: Tokenizer, text: str) -> tuple[list[_Job], dict[str, str]]:
    """The prompts of every subtask and context, and the reasons for those that cannot be made."""

    def encode(prompt: Prompt) -> list[int]:
        return prompt_tokens(tokenizer, prompt, chat=settings.chat)

    material = Material(text, *open_collections(settings.data, {"qa_1", "qa_2"} & set(names)))
    jobs: list[_Job] = []
    left_out: dict[str, str] = {}
    for context in settings.context:
        for name in names:
            try:
                task = make_task(name, context, material, encode)
                samples = make_samples(task, context, settings.limit or SAMPLES, settings.seed, encode)
            except AatcError as error:
                left_out[f"{name} at {context}"] = f"{error.message}; {error.hint}"
                continue
            prompts = digest_of([task.room, task.metric, [[s.tokens, s.prompt.answers] for s in samples]])
            jobs.append(_Job(name, context, task.metric, task.room, samples, prompts))
    return jobs, left_out
