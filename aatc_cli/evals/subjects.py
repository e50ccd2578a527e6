"""Subjects: what an evaluation is of, a plan or the uncompressed reference, with its codecs and where it ran."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from aatc_cli.artifacts.evaluation import Measurement
from aatc_cli.artifacts.manifest import ModelIdentity, require_model
from aatc_cli.artifacts.plan import Plan
from aatc_cli.artifacts.versions import versions
from aatc_cli.core import SIDES
from aatc_cli.core.codec import CastCodec
from aatc_cli.core.joint import LayersCodec
from aatc_cli.errors import UsageError
from aatc_cli.methods.recipe import Recipe
from aatc_cli.models.adapter import AttentionSite
from aatc_cli.models.loading import pick_dtype
from aatc_cli.models.placement import device_of
from aatc_cli.models.quantized import library_codec

CacheChoice = Literal["auto", "packed", "fused", "simulated"]


@dataclass(frozen=True)
class EvalOptions:
    """How it is evaluated: where, in which dtype, with which cache, how many prompts at once.

    ``spread``: over all devices, by accelerate. ``cache`` auto is the packed one where the plan has one. ``accept`` is
    shown every result before it is measured, and raises for one that must not stand beside others.
    """

    device: str = "cpu"
    dtype: str = "auto"
    force: bool = False
    spread: bool = False
    batch: int = 1
    cache: CacheChoice = "auto"
    accept: Callable[[Measurement], None] | None = None


@dataclass(frozen=True)
class Subject:
    """What is under evaluation: a plan, or the reference, a recipe that needs none (fp16)."""

    recipe: Recipe
    plan: Plan | None

    @property
    def name(self) -> str:
        """Name in progress and errors."""
        return self.plan.name if self.plan else self.recipe.name


def require_subjects(identity: ModelIdentity, subjects: Sequence[Subject]) -> None:
    """Raise `ArtifactError` for a plan of another model."""
    for subject in subjects:
        if subject.plan:
            require_model(identity, subject.plan.model, str(subject.plan.path))


def origin_of(subject: Subject | None, identity: ModelIdentity, options: EvalOptions) -> dict[str, Any]:
    """The fields of a `Measurement` that say of which subject and model it is and where it ran, all but its seconds.

    Without a subject, of the model and the place alone.
    """
    plan = subject.plan if subject else None
    return {
        "recipe": subject.recipe.name if subject else "",
        "budget": plan.budget.label if plan else None,
        "model": identity.name,
        "model_fingerprint": identity.weights_fingerprint,
        "config_hash": identity.config_hash,
        "tokenizer_hash": identity.tokenizer_hash,
        "plan": plan.digest if plan else None,
        "bits": plan.mean_bits if plan else 16.0,
        "bits_packed": plan.layout.bits_packed if plan else 16.0,
        "device": device_name(options.device),
        "dtype": str(pick_dtype(options.device, options.dtype)).removeprefix("torch."),
        "versions": versions(),
    }


def subject_codecs(subject: Subject, layers: int, device: str) -> list[dict[Any, Any]]:
    """One codec per layer and side: the plan's, packed or not, or a float16 cast for the reference."""
    if subject.plan is None:
        return [dict.fromkeys(SIDES, CastCodec(torch.float16)) for _ in range(layers)]
    return subject.plan.simulated_codecs(device, library=library_codec)


def placed_codecs(subject: Subject, sites: Sequence[AttentionSite], options: EvalOptions) -> list[dict[Any, Any]]:
    """The codecs of a subject on the evaluation's device, or of a spread model each where its layer computes.

    Raises `UsageError` for a codec over all layers of a spread model.
    """
    if not options.spread:
        return subject_codecs(subject, len(sites), options.device)
    codecs = subject_codecs(subject, len(sites), "cpu")
    if any(isinstance(codec, LayersCodec) for codec in codecs[0].values()):
        raise UsageError(
            f"{subject.name} codes all layers together, and --device-map auto may spread them over devices",
            "evaluate it without --device-map, or use a recipe that codes layer by layer",
        )
    if subject.plan is None:
        return codecs
    return [
        {side: codec.to(device_of(site.o)) for side, codec in layer.items()}
        for site, layer in zip(sites, codecs, strict=True)
    ]


def device_name(device: str) -> str:
    """What a figure ran on: the GPU's name, or the CPU's model where the system tells it."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as handle:
            names = [line.split(":", 1)[1].strip() for line in handle if line.startswith("model name")]
        return names[0] if names else "cpu"
    except OSError:
        return "cpu"
