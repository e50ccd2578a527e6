"""What a report is made of, loaded and plain: nothing below this file opens an artifact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aatc_cli.artifacts.evaluation import Evaluation
from aatc_cli.artifacts.manifest import ModelIdentity, TextRecord
from aatc_cli.config import HeadGroups
from aatc_cli.core import SIDES, Side
from aatc_cli.core.allocate import Floats
from aatc_cli.core.layout import CacheLayout
from aatc_cli.evals.answers.result import BenchmarkResult
from aatc_cli.evals.memory.result import Result as MemoryResult
from aatc_cli.evals.needles.result import Result as NeedleResult
from aatc_cli.evals.recall.result import Result as RecallResult
from aatc_cli.evals.speed.result import Result as SpeedResult
from aatc_cli.evals.stability.result import Result as StabilityResult
from aatc_cli.report.data.study import StudyView

# the context at which the paper counts bytes; every report states it beside the evaluations' own
PAPER_CONTEXT = 8192


@dataclass(frozen=True)
class PlanView:
    """One plan as a report sees it. ``bits[layer][side]`` holds the widths [C]; the first ``protected`` layers are
    outside the common pool; ``predicted`` and ``water_level`` are in the recipe's normalised energy. With n classes of
    tokens a site has n C widths, class after class, and ``shares`` are those of the tokens in each."""

    recipe: str
    budget: str
    digest: str
    protected: int
    groups: HeadGroups
    bits: list[Mapping[Side, list[int]]]
    bits_mean: float
    predicted: Mapping[Side, float]
    water_level: Mapping[Side, float]
    layout: CacheLayout
    shares: tuple[float, ...] = (1,)

    @property
    def name(self) -> str:
        """Recipe and budget: ``paper-2``."""
        return f"{self.recipe}-{self.budget}"

    def layer_means(self, side: Side) -> list[float]:
        """Mean bits per channel and token of every layer on one side."""
        return [
            sum(share * sum(part) for share, part in self._classes(layer[side])) * len(self.shares) / len(layer[side])
            for layer in self.bits
        ]

    def histogram(self) -> dict[Side, list[float]]:
        """Per side, how many channels of the whole model have width 0, 1, ... up to the plan's largest width.

        A channel of one class of tokens counts for their share.
        """
        top = max(width for layer in self.bits for side in SIDES for width in layer[side])
        counts: dict[Side, list[float]] = {side: [0] * (top + 1) for side in SIDES}
        for layer in self.bits:
            for side in SIDES:
                for share, part in self._classes(layer[side]):
                    for width in part:
                        counts[side][width] += share
        return counts

    def _classes(self, widths: Sequence[int]) -> list[tuple[float, Sequence[int]]]:
        """The share of the tokens and the widths [C] of every class of a site."""
        size = len(widths) // len(self.shares)
        return [(share, widths[k * size : (k + 1) * size]) for k, share in enumerate(self.shares)]


@dataclass(frozen=True)
class Spectrum:
    """Normalised energies w sigma^2 [C] of a few sites in falling order, and the water level of each plan."""

    recipe: str
    layers: tuple[int, ...]
    energy: Mapping[tuple[int, Side], Floats]
    levels: tuple[tuple[str, Mapping[Side, float]], ...]


@dataclass(frozen=True)
class Absent:
    """Why a part of the report is missing: one sentence with the remedy."""

    reason: str


@dataclass(frozen=True)
class TextUse:
    """The texts one artifact was made from. ``artifact`` names it as in the run: ``stats``, ``transform whiten``.

    used: tokens that entered its sums; None where it does not say.
    """

    artifact: str
    texts: tuple[TextRecord, ...]
    used: int | None = None


@dataclass(frozen=True)
class ReportData:
    """Everything a report shows. ``model`` is None only when the run holds evaluations and no artifact at all."""

    title: str
    version: str
    model: ModelIdentity | None
    texts: tuple[TextUse, ...]
    evaluations: tuple[Evaluation, ...]
    plans: tuple[PlanView, ...]
    spectrum: Spectrum | Absent
    studies: tuple[StudyView, ...] = ()
    stability: tuple[StabilityResult, ...] = ()
    speed: tuple[SpeedResult, ...] = ()
    memory: tuple[MemoryResult, ...] = ()
    answers: tuple[BenchmarkResult, ...] = ()
    needles: tuple[NeedleResult, ...] = ()
    recall: tuple[RecallResult, ...] = ()

    @property
    def contexts(self) -> list[int]:
        """Cache lengths at which bytes are stated, in tokens: those of the evaluations, and the paper's."""
        return sorted({PAPER_CONTEXT} | {evaluation.context for evaluation in self.evaluations})


def paper_first(recipe: str) -> tuple[bool, bool, str]:
    """Sort key of recipes everywhere in the report: the float16 reference, the paper's own, then by name."""
    return recipe != "fp16", recipe != "paper", recipe
