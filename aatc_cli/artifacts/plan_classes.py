"""Classes of tokens in a Plan: what share of the tokens is in each, and one class where a recipe tells none apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from aatc_cli.methods.recipe import Recipe

if TYPE_CHECKING:
    from aatc_cli.core.token_classes import TokenClasses


class ClassFacts(BaseModel):
    """What a Plan says of one class, on average over layers: its share of tokens, and what noise in them costs."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    share: float
    key_cost: float
    value_cost: float


@dataclass(frozen=True)
class PlanClasses:
    """The classes of a Plan: the share of the tokens in each, least attended first; one holds all without classes."""

    shares: tuple[float, ...] = (1.0,)

    @classmethod
    def of(cls, recipe: Recipe) -> PlanClasses:
        """Those that plans of ``recipe`` have: quotas are of the recipe alone."""
        return cls(tuple(recipe.choices.classes.shares(recipe)))

    @property
    def count(self) -> int:
        """Classes of every layer."""
        return len(self.shares)


def recorded_classes(classes: TokenClasses) -> list[dict[str, float]]:
    """What the results of a Plan say of every class, on average over layers."""
    keys, values = (classes.costs[side].mean(0).tolist() for side in ("k", "v"))
    parts = zip(classes.shares.tolist(), keys, values, strict=True)
    # nine digits, as of all results: the last ones of a mean may differ between machines
    names = ("share", "key_cost", "value_cost")
    return [{name: float(f"{part:.9g}") for name, part in zip(names, found, strict=True)} for found in parts]
