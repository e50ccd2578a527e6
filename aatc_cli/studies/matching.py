"""Budgets at which a recipe comes to given packed bits, by the byte law of the plans themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from aatc_cli.artifacts.manifest import read_manifest
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.study import StudyRow
from aatc_cli.artifacts.transform import Transform
from aatc_cli.config import MAX_BITS, Budget
from aatc_cli.core.allocate import Energies
from aatc_cli.errors import AatcError
from aatc_cli.methods.recipe import Recipe
from aatc_cli.stages.allocate import derive

# budgets are tried in thousandths of a bit, and one that comes this near is near enough
_GRID = 1000
_NEAR = 0.0005
# a method that comes no nearer cannot be said to be at that rate
_TOO_FAR = 0.25


@dataclass
class Matcher:
    """Finds budgets of one recipe; what was derived for one rate serves the next."""

    transform: Transform
    recipe: Recipe
    energies: Energies
    known: dict[int, float | None] = field(default_factory=dict)
    refusal: AatcError | None = None

    @classmethod
    def of(cls, transform: Transform, recipe: Recipe) -> Matcher:
        """For plans of ``recipe`` made from ``transform``."""
        return cls(transform, recipe, transform.energies())

    def budget(self, target: float) -> Budget:
        """The budget whose plan comes nearest to ``target`` packed bits (`bits_packed`).

        A recipe of one width takes the nearest of its widths, wherever that is; others are searched by bisection,
        which finds the nearest where bits rise with the budget. Raises `AatcError` when none is within a quarter bit,
        or none can be had at all.
        """
        if self._fixed:
            for width in self.recipe.allowed_widths:
                if width:
                    self._bits(width * _GRID)
        else:
            self._bisect(target)
        found = {step: bits for step, bits in self.known.items() if bits is not None}
        if not found:
            assert self.refusal is not None
            raise self.refusal
        best = min(found, key=lambda step: (abs(found[step] - target), step))
        if not self._fixed and abs(found[best] - target) > _TOO_FAR:
            problem = f"recipe {self.recipe.name} comes no nearer to {target:g} packed bits than {found[best]:.3f}"
            raise AatcError(problem, "leave this rate out for it")
        return Budget(unit="bits", value=best / _GRID)

    @property
    def _fixed(self) -> bool:
        """Whether its budgets are its widths; behind a press the number of tokens is another dial."""
        return self.recipe.choices.allocator.one_width and not self.recipe.pressed

    def _bisect(self, target: float) -> None:
        """Narrow a bracket down to neighbouring budgets, or until one is near enough."""
        low, high = 0, min(self.recipe.max_bits, MAX_BITS) * _GRID
        guess = round(target * _GRID)
        while high - low > 1:
            step = guess if low < guess < high else (low + high) // 2
            bits = self._bits(step)
            if bits is not None and abs(bits - target) < _NEAR:
                return
            if bits is None or bits < target:  # too few bits for the protected layers, or for any width: go up
                low = step
            else:
                high = step
            # overheads hardly change with the budget, so the distance in bits is nearly that in budget; every second
            # step halves the bracket all the same
            missed = step + round((target - bits) * _GRID) if bits is not None else 0
            guess = missed if len(self.known) % 2 else (low + high) // 2
        self._bits(high)

    def _bits(self, step: int) -> float | None:
        """Packed bits of the plan at ``step`` thousandths; None where the recipe cannot take that budget."""
        if step not in self.known:
            try:
                _, layout, _ = derive(
                    self.transform, self.energies, self.recipe, Budget(unit="bits", value=step / _GRID)
                )
                self.known[step] = layout.bits_packed
            except AatcError as error:
                self.known[step], self.refusal = None, error
        return self.known[step]


@dataclass
class Matchers:
    """A matcher for every Transform, of the recipe that was asked for last."""

    by_transform: dict[Path, Matcher] = field(default_factory=dict)

    def budget(self, place: Run, recipe: Recipe, row: StudyRow, known: StudyRow | None) -> Budget:
        """The budget of ``row`` in the run ``place``: that of the row ``known`` while its plan holds, or a new one."""
        assert row.asked is not None
        transform = Transform.open(place.transform(recipe.transform_name))
        if known is not None and known.budget is not None:
            budget = Budget(unit="bits", value=float(known.budget))
            path = place.plan(recipe.name, budget)
            plan = read_manifest(path) if path.exists() else None
            if plan and plan.digest == known.plan and plan.inputs == {"transform": transform.digest}:
                return budget
        if transform.path not in self.by_transform or self.by_transform[transform.path].recipe != recipe:
            self.by_transform[transform.path] = Matcher.of(transform, recipe)
        return self.by_transform[transform.path].budget(row.asked)
