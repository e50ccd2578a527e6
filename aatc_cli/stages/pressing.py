"""The plan of a recipe with a press: of a budget, what goes to the number of tokens and what to the bits of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from aatc_cli.config import MAX_BITS
from aatc_cli.core.allocate import Allocation
from aatc_cli.core.layout import CacheLayout
from aatc_cli.errors import AatcError
from aatc_cli.methods.recipe import Recipe

# of a bit, or of all tokens
_GRID = 1024
_FINE = 8 * _GRID
# of a step away from a guess
_FIRST = 8
# an allocation, its byte law with a press, and the bits a number of a kept token that it was made at
Pressed = tuple[Allocation, CacheLayout, float]

T = TypeVar("T")


def pressed_plan(
    recipe: Recipe,
    allocation: Callable[[float], Allocation],
    layout: Callable[[Allocation, float], CacheLayout],
    fits: Callable[[CacheLayout], bool],
    guess: int | None = None,
) -> Pressed:
    """The most code bits whose bytes fit, or for a code of one width and no ``keep`` the most tokens.

    allocation: widths at an average of bits; layout: their byte law where a share of the tokens stays. guess: the step
    that code bits may come to. Raises `AatcError` when nothing fits.
    """
    keep = recipe.keep
    if keep is None:
        whole = allocation(recipe.max_bits)

        def of_share(step: int) -> Pressed:
            return whole, layout(whole, step / _FINE), float(recipe.max_bits)

        found = _highest(_FINE, of_share, lambda one: fits(one[1]))
    else:

        def of_bits(step: int) -> Pressed:
            made = allocation(step / _GRID)
            return made, layout(made, keep), step / _GRID

        found = _highest(min(recipe.max_bits, MAX_BITS) * _GRID, of_bits, lambda one: fits(one[1]), guess)
    if found is None:
        raise AatcError(
            f"nothing of {recipe.name} fits this budget: what says which tokens stay takes a part of it",
            "raise the budget, or keep fewer tokens",
        )
    return found


def _highest(last: int, make: Callable[[int], T], fits: Callable[[T], bool], guess: int | None = None) -> T | None:
    """What is made at the highest of the steps 1 .. ``last`` at which it can be made and fits, which low ones do.

    guess: where to look first, with steps that double.
    """
    low, high, best, step = 1, last, None, _FIRST
    while low <= high:
        near = guess is not None and low <= guess <= high
        middle = guess if near and guess is not None else (low + high) // 2
        try:
            made = make(middle)
        except AatcError:
            low, guess = middle + 1, None  # too few bits for any width: the search goes on above
            continue
        if fits(made):
            best, low = made, middle + 1
            guess = middle + step if near else guess
        else:
            high = middle - 1
            guess = middle - step if near else guess
        step *= 2
    return best
