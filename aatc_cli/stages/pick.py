"""pick: the smallest plan of a run that is good enough, by what was measured in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aatc_cli.artifacts.run import Run
from aatc_cli.console import detail, say
from aatc_cli.errors import AatcError, UsageError
from aatc_cli.stages.inspecting.run import RunFacts, plan_facts


@dataclass(frozen=True)
class Wish:
    """KL in nats per token that a plan may have at most, on the texts named or on every text that it was measured on.

    context: tokens at which plans are compared by their bytes. recipes: those that may be picked, all if none.
    """

    kl: float
    texts: tuple[str, ...] = ()
    recipes: tuple[str, ...] = ()
    context: int = 8192


def pick(run: Run, wish: Wish) -> dict[str, Any]:
    """The facts (`plan_facts`) of the plan with the fewest bytes whose KL is at most that of the wish on every text.

    Plans that are stale, or were not measured on all of the texts, are passed over and named in the log. Raises
    `AatcError` where no plan will do, with the best there is.
    """
    if not wish.kl > 0:
        raise UsageError(f"--kl must be a positive number of nats, got {wish.kl:g}", "try --kl 0.01")
    facts = RunFacts.read(run)
    entries = [plan_facts(facts, plan, wish.context) for plan in facts.plans]
    entries = [entry for entry in entries if not wish.recipes or entry["recipe"] in wish.recipes]
    texts = wish.texts or tuple(sorted({text for entry in entries for text in entry["kl"]}))
    measured = [entry for entry in entries if texts and set(texts) <= set(entry["kl"]) and not entry["stale"]]
    _tell_left_out(entries, measured, texts)
    if not measured:
        where = f" on {', '.join(texts)}" if texts else ""
        raise AatcError(f"no plan of {run.root} was measured{where}", "measure all of them: aatc eval --model MODEL")
    for entry in measured:
        entry["kl_worst"] = max(entry["kl"][text]["mean"] for text in texts)
        detail(f"pick: {_name(entry)}: {entry['bytes_total']:,} bytes, KL {entry['kl_worst']:.3g}")
    good = [entry for entry in measured if entry["kl_worst"] <= wish.kl]
    if not good:
        best = min(measured, key=lambda entry: entry["kl_worst"])
        raise AatcError(
            f"no plan has a KL of {wish.kl:g} or less: the lowest is {best['kl_worst']:.3g}, of {_name(best)}",
            "plan more bits with aatc allocate --budget, and measure them with aatc eval",
        )
    return min(good, key=lambda entry: (entry["bytes_total"], entry["kl_worst"], entry["plan"]))


def _tell_left_out(entries: list[dict[str, Any]], measured: list[dict[str, Any]], texts: tuple[str, ...]) -> None:
    for entry in entries:
        if entry not in measured:
            missing = [text for text in texts if text not in entry["kl"]]
            why = (
                f"it is stale ({entry['stale']})"
                if entry["stale"]
                else f"not measured on {' and '.join(missing)} as the others were"
                if missing
                else "not measured on any text"
            )
            say(f"pick: {_name(entry)} is passed over: {why}")


def _name(entry: dict[str, Any]) -> str:
    return f"{entry['recipe']}-{entry['budget']}"
