"""RULER: retrieval, tracking, aggregation and questions at chosen contexts; generated, forced, or by a server."""

from __future__ import annotations

from aatc_cli.artifacts.manifest import digest_of
from aatc_cli.console import say
from aatc_cli.errors import AatcError, UsageError
from aatc_cli.evals.answers.ledger import Ledger
from aatc_cli.evals.answers.parts import ask_in_parts
from aatc_cli.evals.opened import Opened
from aatc_cli.evals.ruler.job import make_jobs
from aatc_cli.evals.ruler.result import Result
from aatc_cli.evals.ruler.settings import Settings
from aatc_cli.evals.ruler.ways import asking, served
from aatc_cli.evals.windows.frame import check_packed
from aatc_cli.text.ruler.tasks import TASKS, chosen_tasks
from aatc_cli.text.sources import documents, parse_source


def measure(opened: Opened, settings: Settings) -> list[Result]:
    """Ask every subject the same prompts, and write a row per subtask and context, a part of its samples at a time.

    Rows of the same plan, model and prompts are not run again. Raises `AatcError` for a context that the model does
    not have or that a plan keeps exact, `UsageError` for an unknown subtask, and for a cache that forced answers do not
    fill; of a server as `served`.
    """
    names, forced = chosen_tasks(settings.subtask), settings.mode == "forced"
    if forced and opened.options.cache != "auto":
        raise UsageError("forced answers are read without a cache", "leave out --cache, or use --mode generate")
    server = served(opened, settings) if settings.server is not None else None
    for context in settings.context:
        opened.check_length(context, "--context")
        for subject in opened.subjects:
            check_packed(subject, context, "--context")
    text = "\n\n".join(document for spec in settings.text for document in documents(parse_source(spec)))
    asked = {"samples": settings.limit, "seed": settings.seed, "chat": settings.chat, "text": digest_of(text)}
    ledger = Ledger.open(opened, TASKS, forced=forced, server=server.facts if server else None, **asked)
    jobs, left_out = make_jobs(names, settings, opened.tokenizer, text)
    for name, reason in left_out.items():
        say(f"eval: {name} is left out: {reason}")
    if not jobs:
        problem, _, remedy = next(iter(left_out.values())).rpartition("; ")
        raise AatcError(f"no RULER task can be asked: {problem}", remedy)
    ask_in_parts(opened, ledger, jobs, asking(opened, forced=forced, server=server))
    ledger.leave_out(opened.subjects, left_out)
    return [ledger.results[subject.name] for subject in opened.subjects]
