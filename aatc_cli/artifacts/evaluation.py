"""The Evaluation: one JSON file per (task, recipe, budget, text), flat, with the standard error beside every mean."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator

from aatc_cli.artifacts.disk import read_record, write_text
from aatc_cli.artifacts.locking import locked, sweep
from aatc_cli.artifacts.manifest import digest_of
from aatc_cli.config import Settings
from aatc_cli.errors import ArtifactError
from aatc_cli.profiles import explain

Task = Literal["kl", "perplexity", "distortion"]

M = TypeVar("M", bound="Measurement")

SCHEMA_VERSION: Final = 3
# what to do about a file that cannot be read; without --force eval compares with it first
AGAIN: Final = "remove it, or measure again by aatc eval with --force"


class Measurement(Settings):
    """What every evaluation says of itself: of which cache and model it is, and where it ran."""

    schema_version: Literal[1, 2, 3] = SCHEMA_VERSION
    task: str
    recipe: str
    budget: str | None = Field(None, description="the plan's budget label; null for fp16")
    model: str
    model_fingerprint: str | None = Field(None, description="of the weight files, as in the manifests")
    config_hash: str | None = Field(None, description="of the model's configuration, as in the manifests")
    tokenizer_hash: str | None = Field(None, description="of the tokenizer, as in the manifests")
    plan: str | None = Field(None, description="digest of the plan; null for fp16")
    cache: str | None = Field(
        None, description="packed, fused or simulated, where a cache was filled; null for the model's own and without"
    )
    protocol: dict[str, Any] | None = Field(
        None,
        description="all that determines the number beside the plan: model, what was asked, dtype, device, versions; "
        "results of equal protocols can be compared; null before version 3",
    )
    bits: float = Field(description="mean code bits per channel of a packed token")
    bits_packed: float | None = Field(
        None, description="bits of a number of a packed token with all that goes with it; 16 for fp16; null if unknown"
    )
    seconds: float
    device: str
    dtype: str
    versions: dict[str, str]

    @property
    def method(self) -> str:
        """Recipe and budget: ``paper-2``; the recipe alone where there is no plan."""
        return self.recipe if self.budget is None else f"{self.recipe}-{self.budget}"

    @property
    def determined_by(self) -> dict[str, Any]:
        """What a result must be equal in to be taken over: its subject, its cache and its protocol."""
        return {"plan": self.plan, "cache": self.cache, "protocol": self.protocol}

    @property
    def stamp(self) -> str:
        """Ending of the file's name that tells protocols apart: ``.1f2e3d4c``; none before version 3."""
        return "" if self.protocol is None else f".{digest_of([self.protocol, self.cache])[:8]}"

    @property
    def file_name(self) -> str:
        """File the evaluation is stored under, a function of what was asked and of all that determines its number."""
        return f"{self.task}.{self.method}{self.stamp}.json"


class DistortionRow(Settings):
    """Predicted against measured error of one layer's attention output when one side of its cache is quantized.

    All three are mean squared norms per query of the output error, relative to the mean squared norm of the output.
    """

    layer: int
    side: Literal["k", "v"]
    bits: float = Field(description="uniform width, or the plan's mean width at this site when plan is true")
    plan: bool = False
    predicted: float = Field(description="second-order prediction, with the coupling between heads that share a cache")
    predicted_diagonal: float = Field(description="the Theorem's D_K or D_V, summed over heads as if independent")
    measured: float


class TokenTrace(Settings):
    """KL token by token over one window, for people to read."""

    window: int = Field(description="number of the window, from 0")
    first: int = Field(description="position of the first token")
    tokens: list[str] = Field(description="text of every token from there on")
    kl: list[float] = Field(description="KL of the prediction made in the place of each token, nats")


class Evaluation(Measurement):
    """One evaluation of one recipe at one budget on one text. Fields that a task does not measure are null."""

    task: Task
    bits_at_context: float = Field(description="all cache bytes at this context, as bits per cached number")
    ratio: float = Field(description="float16 cache bytes over all cache bytes at this context")
    bytes_total: int | None = Field(None, description="all cache bytes of one sequence at this context")
    context: int = Field(description="tokens in the cache at the end of a window")
    text: str
    text_sha256: str
    windows: int
    length: int = Field(description="tokens per window")
    stride: int = Field(description="tokens between the starts of windows")
    first_position: int = Field(description="first position of a window that is scored")
    tokens_scored: int
    queries: int | None = Field(None, description="query positions measured per window; only distortion")
    sinks: int
    recent: int
    flush: int
    kl_mean: float | None = Field(None, description="KL(reference || compressed), nats per token")
    kl_stderr: float | None = None
    kl_windows: list[float] | None = Field(None, description="mean KL of every window, by which methods are paired")
    kl_p50: float | None = Field(None, description="median of KL over scored positions")
    kl_p90: float | None = Field(None, description="90th percentile of KL over scored positions")
    kl_p99: float | None = Field(None, description="99th percentile of KL over scored positions")
    kl_p999: float | None = Field(None, description="99.9th percentile of KL over scored positions")
    kl_max: float | None = Field(None, description="largest KL of a scored position")
    top1: float | None = Field(None, description="share of positions with the reference's most likely token")
    top1_stderr: float | None = None
    nll: float | None = Field(None, description="negative log-likelihood, nats per token")
    nll_stderr: float | None = None
    nll_reference: float | None = None
    nll_windows: list[float] | None = Field(None, description="mean NLL of every window, by which methods are paired")
    nll_reference_windows: list[float] | None = Field(None, description="the same of the model with its own cache")
    perplexity: float | None = None
    perplexity_stderr: float | None = None
    perplexity_reference: float | None = None
    calibration_share: float | None = Field(
        None,
        description="share of the scored text's tokens that is calibration text of the plan, 0 to 1: such figures "
        "flatter it; null where none can tell",
    )
    kept_share: float | None = Field(
        None, description="with a press, share of the packed tokens that it left, of a prompt where it acts at the end"
    )
    distortion: list[DistortionRow] | None = None
    traces: list[TokenTrace] | None = Field(None, description="KL token by token of the windows for which it was asked")

    @model_validator(mode="before")
    @classmethod
    def _older_names(cls, data: Any) -> Any:
        """Versions 1 and 2 called the bits at the context otherwise."""
        if isinstance(data, dict) and data.get("schema_version") in (1, 2) and "bits_effective" in data:
            return {("bits_at_context" if name == "bits_effective" else name): data[name] for name in data}
        return data

    @property
    def file_name(self) -> str:
        """File the evaluation is stored under: task, recipe, budget, text, window length, first position, protocol."""
        text = re.sub(r"[^A-Za-z0-9._-]+", "-", self.text).strip("-")
        return f"{self.task}.{self.method}.{text}.{self.length}-{self.first_position}{self.stamp}.json"


def write_evaluation(folder: Path, evaluation: Measurement) -> Path:
    """Write ``evaluation`` with its digest into ``folder`` under its own file name, atomically; returns the path."""
    path = folder / evaluation.file_name
    write_sealed(path, evaluation)
    return path


def write_sealed(path: Path, record: BaseModel) -> None:
    """Write a record with its digest to ``path``, atomically and under the lock of its folder; raises `AatcError`."""
    data = record.model_copy(update={"schema_version": SCHEMA_VERSION}).model_dump(mode="json")
    text = json.dumps(data | {"digest": digest_of(data)}, indent=2, ensure_ascii=False, allow_nan=False)
    with locked(path.parent, wait=True):
        sweep(path.parent)
        write_text(path, text + "\n")


def read_sealed(path: Path, remedy: str) -> Any:
    """The data of a record, checked against its digest; raises `ArtifactError`, and what `read_record` raises.

    From version 2 on a digest in the file covers all of it; files of version 1 have none.
    """
    raw: Any = json.loads(read_record(path))
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if isinstance(raw, dict) and (type(version) is not int or version not in (1, 2, 3)):
        problem = f"{path} has schema version {version!r}; this aatc reads versions 1 to {SCHEMA_VERSION}"
        raise ArtifactError(problem, f"use the aatc that wrote it, or {remedy}")
    if version in (2, 3) and raw.pop("digest", None) != digest_of(raw):
        raise ArtifactError(f"{path} is damaged: it does not match its own digest", remedy)
    return raw


def read_measurement(path: Path, kind: type[M]) -> M:
    """Read one evaluation of one ``kind``; raises `ArtifactError` when the file is not a valid one of this schema."""
    try:
        return kind.model_validate(read_sealed(path, AGAIN))
    except ValidationError as error:
        raise ArtifactError(f"{path} is not a valid evaluation: {explain(error)}", AGAIN) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}", AGAIN) from error


def read_evaluation(path: Path) -> Evaluation:
    """Read one evaluation on text; raises `ArtifactError` when the file is not a valid evaluation of this schema."""
    return read_measurement(path, Evaluation)
