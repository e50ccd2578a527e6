"""What is asked of every subject: the prompts of one subtask at one context, and why some cannot be asked."""

from __future__ import annotations

from dataclasses import dataclass, replace

from aatc_cli.artifacts.manifest import digest_of
from aatc_cli.errors import AatcError
from aatc_cli.evals.answers.asking import prompt_tokens
from aatc_cli.evals.ruler.settings import Settings
from aatc_cli.models.tokenizer import Tokenizer
from aatc_cli.text.ruler.collections import open_collections
from aatc_cli.text.ruler.prompt import Metric, Prompt, Reference, Sample, make_samples, reference_of
from aatc_cli.text.ruler.tasks import SAMPLES, Material, make_task


@dataclass(frozen=True)
class Job:
    """One subtask at one context, ready to be asked. references: of forced answers, how each is written."""

    subtask: str
    context: int
    metric: Metric
    room: int
    samples: list[Sample]
    prompts: str
    references: list[Reference]

    @property
    def place(self) -> tuple[str, int]:
        """Subtask and context."""
        return self.subtask, self.context

    def part(self, begin: int, end: int) -> Job:
        """The samples from ``begin`` on and before ``end``."""
        return replace(self, samples=self.samples[begin:end], references=self.references[begin:end])

    @property
    def what(self) -> str:
        """Its name in progress."""
        return f"ruler {self.subtask} at {self.context}"


def make_jobs(
    names: list[str], settings: Settings, tokenizer: Tokenizer, text: str
) -> tuple[list[Job], dict[str, str]]:
    """The prompts of every subtask and context, and the reasons for those that cannot be made."""

    def encode(prompt: Prompt) -> list[int]:
        return prompt_tokens(tokenizer, prompt, chat=settings.chat)

    material = Material(text, *open_collections(settings.data, {"qa_1", "qa_2"} & set(names)))
    jobs: list[Job] = []
    left_out: dict[str, str] = {}
    for context in settings.context:
        for name in names:
            try:
                task = make_task(name, context, material, encode)
                if settings.mode == "forced" and task.joiner is None:
                    raise AatcError("its answers have no one wording", "generate them")
                samples = make_samples(task, context, settings.limit or SAMPLES, settings.seed, encode)
                references = [
                    reference_of(sample, task.joiner, encode, tokenizer.raw.decode)
                    for sample in samples
                    if settings.mode == "forced" and task.joiner is not None
                ]
            except AatcError as error:
                left_out[f"{name} at {context}"] = f"{error.message}; {error.hint}"
                continue
            asked = [task.room, task.metric, [[s.tokens, s.prompt.answers] for s in samples]]
            prompts = digest_of([*asked, *([r.tokens, r.spans] for r in references)])
            jobs.append(Job(name, context, task.metric, task.room, samples, prompts, references))
    return jobs, left_out
