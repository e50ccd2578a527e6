"""The result of a benchmark: one file per subject and protocol, one row per subtask and context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from aatc_cli.artifacts.evaluation import Measurement
from aatc_cli.config import Settings


class BenchmarkRow(Settings):
    """Score of one subtask at one context, in 0..1."""

    subtask: str
    context: int | None = Field(description="tokens of prompt and answer; null where prompts have their own length")
    metric: str
    score: float
    stderr: float | None = Field(description="standard deviation of the samples' scores over the root of their number")
    low: float | None = Field(None, description="lower end of the 95 % interval, honest at 0 and 1 (Wilson)")
    high: float | None = Field(None, description="upper end of the same interval")
    samples: int
    asked: int | None = Field(None, description="samples that are to be asked, while fewer of them were")
    scores: list[float] | None = Field(None, description="of every sample, in the order asked")
    logprob: float | None = Field(
        None, description="forced answers: log-probability of the right one (of references: of a token of it), nats"
    )
    logprob_stderr: float | None = Field(None, description="standard error of the same over samples")
    logprobs: list[float] | None = Field(None, description="the same of every sample")
    calibration_share: float | None = Field(
        None, description="share of the prompts' tokens that is calibration text of the plan; null where none can tell"
    )
    prompts_sha256: str = Field(description="of all that the model was asked and how, by which a row is known again")
    seconds: float = Field(description="of generation, divided evenly among the caches that were asked together")

    @property
    def place(self) -> tuple[str, int | None, str]:
        """What the row is of: subtask, context, metric."""
        return self.subtask, self.context, self.metric

    @property
    def whole(self) -> bool:
        """Whether all samples were asked."""
        return self.asked is None

    def with_logprobs(self, values: list[float]) -> BenchmarkRow:
        """The row with the log-probabilities of right answers, one of every sample."""
        from aatc_cli.core.metrics import mean_and_stderr

        mean, stderr = mean_and_stderr(values)
        return self.model_copy(update={"logprob": mean, "logprob_stderr": stderr, "logprobs": values})


class BenchmarkResult(Measurement):
    """One benchmark with one cache. ``left_out`` says why a subtask is not among the rows."""

    task: Literal["benchmark"] = "benchmark"
    benchmark: str
    simulated: bool = Field(False, description="quantized and decoded at once in an ordinary cache, not packed")
    rows: list[BenchmarkRow] = Field(default_factory=list)
    left_out: dict[str, str] = Field(default_factory=dict)

    @property
    def file_name(self) -> str:
        """File the result is stored under."""
        return f"{self.task}.{self.method}.{self.benchmark}{self.stamp}.json"

    def row(self, subtask: str, context: int | None) -> BenchmarkRow | None:
        """The row of a subtask at a context, if it is there."""
        return next((row for row in self.rows if row.subtask == subtask and row.context == context), None)

    def with_row(self, row: BenchmarkRow, order: Sequence[str] = ()) -> BenchmarkResult:
        """The same result with ``row`` in the place of an older one, rows by context and then in ``order``."""
        ranks = {name: rank for rank, name in enumerate(order)}
        rows = [*(old for old in self.rows if old.place != row.place), row]
        rows.sort(key=lambda r: (r.context or 0, ranks.get(r.subtask, len(ranks)), r.subtask, r.metric))
        return self.model_copy(update={"rows": rows})


def indistinguishable(row: BenchmarkRow, reference: BenchmarkRow) -> bool | None:
    """Whether a score cannot be told from the reference's; None where no error is known.

    Answer by answer at 95 % where both had the same prompts (`core.compare`). Else by two standard errors, the larger
    of both: the criterion of the paper's Table "main results", which does not say whose error it is.
    """
    from aatc_cli.core.compare import Figure, tied

    if row.scores and reference.scores and row.prompts_sha256 == reference.prompts_sha256:
        return tied(*(Figure(of.score, of.stderr, {"": of.scores or []}) for of in (row, reference)))
    if row.stderr is None or reference.stderr is None:
        return None
    return abs(row.score - reference.score) <= 2 * max(row.stderr, reference.stderr)
