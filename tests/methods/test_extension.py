"""A method of one's own is one object and one line of the registry: everything else asks the registry."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.transform import Transform as TransformArtifact
from aatc_cli.config import make_budget
from aatc_cli.core.allocate import Allocation
from aatc_cli.core.overheads import Overheads
from aatc_cli.core.transform import rotation
from aatc_cli.methods import registry
from aatc_cli.methods.axes import Transform, Weight, together
from aatc_cli.methods.choices import Allocator, Quantizer
from aatc_cli.methods.recipe import Recipe
from aatc_cli.stages.allocate import allocate, check
from aatc_cli.stages.whiten import Wanted, whiten


class Reversed(Transform):
    """Channels in the opposite order."""

    name, meaning, kinds = "reversed", "channels in the opposite order", ("linear",)

    def matrices(self, moments: torch.Tensor, metrics: torch.Tensor) -> Any:
        return rotation(torch.eye(moments.shape[-1]).flip(0).to(moments).expand_as(moments))


class Squared(Weight):
    """The square of the variance."""

    name, meaning, sides = "squared", "the variance again", ("k", "v")

    def energy(self, site: Any, normal: Any, recipe: str) -> np.ndarray:
        return normal(site.variance) ** 2


class Halves(Allocator):
    """The leading channels all of the bits."""

    name, meaning = "halves", "twice the width in the leading half, none behind it"

    def allocate(self, choices: Any, energies: Any, average: float, groups: Any, tables: Any) -> Allocation:
        assert tables == "of halves"
        size = energies[0]["k"].variance.size
        widths = np.where(np.arange(size) < size // 2, int(2 * average), 0)
        bits = [{side: widths.copy() for side in ("k", "v")} for _ in energies]
        left = {side: float(sum(choices.energy(layer[side], side).sum() for layer in energies)) for side in ("k", "v")}
        return Allocation(bits, left, {"k": 0.0, "v": 0.0})

    def read(self, choices: Any, tensors: Any, geometry: Any) -> str:
        return "of halves"


@dataclass(frozen=True)
class Rounded:
    step: float
    largest: torch.Tensor

    def reconstruct(self, x: torch.Tensor) -> torch.Tensor:
        return torch.round(x / self.step).clamp(-self.largest, self.largest) * self.step

    def to(self, device: Any, dtype: Any = None) -> Rounded:
        return replace(self, largest=self.largest.to(device))


class Steps(Quantizer):
    """Multiples of a step that the calibration gives."""

    name, meaning, asked = "steps", "multiples of one step", True
    goes_with = together(transform=("linear",), allocator=("halves",))

    def tables(self, side: Any, stats: Any, latents: Any, groups: int) -> dict[str, torch.Tensor]:
        return {"step": latents().abs().max().reshape(1) / 100}

    def overheads(self, choices: Any, geometry: Any, groups: Any, bits: Any, blocks: int) -> Overheads:
        return Overheads({"steps": 3}, {"step": 8})

    def codec(self, choices: Any, site: Any) -> Rounded:
        widths = torch.tensor(site.widths)
        return Rounded(float(site.read("step", (1,))), 2.0 ** (widths - 1) * (widths > 0))


@pytest.fixture
def extended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry with one line more on four axes."""
    for name, axes, choice in (
        ("TRANSFORMS", ("transform",), Reversed()),
        ("WEIGHTS", ("key_weight", "value_weight"), Squared()),
        ("ALLOCATORS", ("allocator",), Halves()),
        ("QUANTIZERS", ("quantizer",), Steps()),
    ):
        monkeypatch.setattr(registry, name, (*getattr(registry, name), choice))
        for axis in axes:
            monkeypatch.setitem(registry.AXES, axis, (*registry.AXES[axis], choice))


def test_from_recipe_to_codec(extended: None, base_run: Path, tmp_path: Path) -> None:
    run, base = Run(tmp_path / "run"), Run(base_run)
    recipe = Recipe(
        name="mine",
        summary="",
        transform="reversed",
        key_weight="squared",
        value_weight="squared",
        allocator="halves",
        quantizer="steps",
    )
    assert recipe.transform_name == "reversed-steps"
    whiten(run, transform_stats=base.stats(), rate_stats=base.stats(), wanted=Wanted.by(recipe))
    made = TransformArtifact.open(run.transform("reversed-steps"))
    assert made.settings.tables == ("steps",)
    plan = allocate(run, recipe, [make_budget(bits=3.0)])[0]
    assert check(plan) == []
    assert set(plan.bits[0]["k"][:16]) == {6}
    assert set(plan.bits[0]["k"][16:]) == {0}
    assert plan.mean_bits == 3.0
    # 868 tokens are behind sinks and window: 55 blocks of 16
    assert plan.layout.breakdown(1000)["steps"] == 3 * 55
    assert plan.layout.static_breakdown() == {"step": 8}
    x = torch.randn(1, 40, 32, generator=torch.Generator().manual_seed(0))
    codec = plan.simulated_codecs("cpu")[0]["k"]
    step = float(made.artifact.tensor("layers.0.k.step", (1,)))
    found = codec.reconstruct(x)
    # the leading latents are the last channels
    assert torch.equal(found[..., :16], torch.zeros(1, 40, 16))
    assert torch.allclose(found[..., 16:], (torch.round(x[..., 16:] / step).clamp(-32, 32) * step), atol=1e-6)


def test_what_it_goes_with_is_said_with_its_name(extended: None) -> None:
    with pytest.raises(ValueError, match='quantizer "steps" goes with allocator "halves"'):
        Recipe(name="mine", summary="", quantizer="steps")


def bare(text: str) -> str:
    """A class as its page shows it: without docstrings, annotations and the imports inside of functions."""
    [found] = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    for node in ast.walk(found):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            node.body = [
                part
                for part in node.body
                if not isinstance(part, ast.ImportFrom)
                and not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))
            ]
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
    return ast.unparse(found)


def test_the_worked_example_is_the_method_as_it_is():
    root = Path(__file__).parents[2]
    page = (root / "docs" / "contributing.md").read_text("utf-8")
    shown = [block.split("```")[0] for block in page.split("```python\n")[1:]]
    [example] = [block for block in shown if "class Balanced" in block]
    assert bare(example) == bare((root / "aatc_cli" / "methods" / "quantizers" / "balanced.py").read_text("utf-8"))
    assert f"```toml\n{(root / 'profiles' / 'recipes' / 'kvarn.toml').read_text('utf-8')}```" in page
