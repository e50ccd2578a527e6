"""What an evaluation is of: a plan or the uncompressed reference, its codecs, and the machine it ran on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from aatc_cli.core import SIDES
from aatc_cli.core.codec import CastCodec
from aatc_cli.profiles import Recipe
from aatc_cli.stages.files import Plan, load_codecs, transform_of
from aatc_cli.stages.method_codecs import method_codecs


@dataclass(frozen=True)
class EvalOptions:
    """How it is evaluated; never part of a file's identity, but recorded in it."""

    device: str = "cpu"
    dtype: str = "auto"
    force: bool = False


@dataclass(frozen=True)
class Subject:
    """One cache under evaluation: a plan, or a recipe that needs none (fp16)."""

    recipe: Recipe
    plan: Plan | None

    @property
    def name(self) -> str:
        """Name in progress and errors."""
        return self.plan.name if self.plan else self.recipe.name


def subject_codecs(subject: Subject, layers: int, device: str) -> list[dict[Any, Any]]:
    """One codec per layer and side: the plan's, packed or not, or a float16 cast for the reference."""
    if subject.plan is None:
        return [dict.fromkeys(SIDES, CastCodec(torch.float16)) for _ in range(layers)]
    transform = transform_of(subject.plan)
    if subject.recipe.packed:
        return list(load_codecs(subject.plan, transform, device))
    return list(method_codecs(subject.plan, transform, device))


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
