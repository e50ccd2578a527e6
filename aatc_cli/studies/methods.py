"""The methods of a study as subjects: missing transforms and plans are made, and what cannot be made says why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.study import StudyRow
from aatc_cli.config import Budget
from aatc_cli.console import say
from aatc_cli.errors import AatcError, ArtifactError, UsageError
from aatc_cli.evals.subjects import Subject
from aatc_cli.methods.recipe import Recipe
from aatc_cli.models.quantized import library_codec
from aatc_cli.profiles import load_recipe
from aatc_cli.stages.allocate import allocate
from aatc_cli.stages.whiten import Wanted, whiten
from aatc_cli.studies.definition import Study, StudyMethod
from aatc_cli.studies.matching import Matchers

# tokens at which the paper counts compression
_PAPER_CONTEXT = 8192


@dataclass(frozen=True)
class Entrant:
    """A row of a study, the run its files lie in, and what is evaluated; no subject where the row says why not."""

    row: StudyRow
    place: Run
    subject: Subject | None = None


def methods_of(study: Study, recipes: tuple[str, ...] = ()) -> list[tuple[StudyMethod, Recipe]]:
    """The methods of a study with their recipes; only of ``recipes`` where any are named.

    Raises `UsageError` for a method without budgets that needs one, and for recipes that the study does not have.
    """
    found = [(method, load_recipe(method.recipe)) for method in study.methods]
    named = {recipe.name for _, recipe in found}
    for name in recipes:
        if name not in named:
            raise UsageError(f"the study {study.name} has no recipe {name!r}", f"it has {', '.join(sorted(named))}")
    for method, recipe in found:
        if (recipe.choices.allocator.nothing) == bool(method.budgets or method.packed):
            needs = "has budgets and takes none" if recipe.choices.allocator.nothing else "has no budgets"
            raise UsageError(f"recipe {recipe.name} of the study {study.name} {needs}", "mend the study's file")
    return [(method, recipe) for method, recipe in found if not recipes or recipe.name in recipes]


def rates_of(method: StudyMethod, recipe: Recipe) -> list[tuple[str, float | None, bool]]:
    """The rows of a method: name, what is asked, and whether that is packed bits; None is asked where nothing is."""
    suffix = "" if method.stats is None else f" ({method.stats})"
    if recipe.choices.allocator.nothing:
        return [(recipe.name + suffix, None, False)]
    plain = [(f"{recipe.name}-{value:g}{suffix}", value, False) for value in method.budgets]
    return [*plain, *((f"{recipe.name}@{value:g}{suffix}", value, True) for value in method.packed)]


def check_rows(study: Study, recipes: tuple[str, ...], wanted: Sequence[str]) -> None:
    """Raise `UsageError` for a glob that no row of the study matches, of ``recipes`` where any are named."""
    rows = [name for method, recipe in methods_of(study, recipes) for name, _, _ in rates_of(method, recipe)]
    for pattern in wanted:
        if not any(fnmatchcase(row, pattern) for row in rows):
            raise UsageError(f"the study {study.name} has no row {pattern!r}", f"it has {', '.join(rows)}")


@dataclass
class Methods:
    """Makes entrants of a study's methods in ``run``; one matcher serves all rates of a recipe.

    ``known``: rows of an earlier call, whose budgets for packed bits are taken over while their plans hold.
    ``force`` makes plans anew. device: where missing transforms are computed.
    """

    run: Run
    known: Mapping[str, StudyRow] = field(default_factory=dict)
    force: bool = False
    device: str = "cpu"
    matchers: Matchers = field(default_factory=Matchers)

    def entrants(
        self, study: Study, recipes: tuple[str, ...] = (), asked: Callable[[str], bool] = lambda row: True
    ) -> list[Entrant]:
        """Every method at every budget whose row is ``asked``, in order; only of ``recipes`` where any are named.

        A plan that two entries come to is one entrant. Raises as `methods_of` does.
        """
        found: dict[tuple[Path, str], Entrant] = {}
        for method, recipe in methods_of(study, recipes):
            for entrant in self._of(method, recipe, asked):
                subject = entrant.subject
                name = subject.name if subject else entrant.row.name
                found.setdefault((entrant.place.root, name), entrant)
        return list(found.values())

    def _of(self, method: StudyMethod, recipe: Recipe, wanted: Callable[[str], bool]) -> Iterator[Entrant]:
        place = self.run if method.stats is None else self.run.within("studies", method.stats)
        plain = StudyRow(
            name=recipe.name,
            label=method.label or recipe.name,
            recipe=recipe.name,
            stats=method.stats,
            asked=None,
            matched=False,
        )
        for name, value, matched in rates_of(method, recipe):
            if not wanted(name):
                continue
            if value is None:
                whole = {"name": name, "bits": 16.0, "bits_packed": 16.0, "ratio": 1.0}
                yield Entrant(plain.model_copy(update=whole), place, Subject(recipe, None))
                continue
            asked = {"name": name, "asked": value, "matched": matched, "simulated": not recipe.packed}
            row = plain.model_copy(update=asked)
            try:
                subject = self._subject(place, recipe, row)
            except AatcError as error:
                say(f"study: {name} is left out: {error.message}")
                yield Entrant(row.model_copy(update={"reason": reason_of(error, self.run.root)}), place)
                continue
            assert subject.plan is not None
            update = {
                "budget": subject.plan.budget.label,
                "plan": subject.plan.digest,
                "bits": subject.plan.mean_bits,
                "bits_packed": subject.plan.layout.bits_packed,
                "ratio": subject.plan.layout.ratio(_PAPER_CONTEXT),
            }
            yield Entrant(row.model_copy(update=update), place, subject)

    def _subject(self, place: Run, recipe: Recipe, row: StudyRow) -> Subject:
        """The plan at a budget, or at the budget that comes to these packed bits, with the Transform it needs."""
        assert row.asked is not None
        transform = place.transform(recipe.transform_name)
        if not transform.exists():
            self._whiten(place, recipe, row.stats)
        # a package that is missing is found here, and not after other methods have run
        recipe.choices.quantizer.ready(library_codec, recipe.max_bits, recipe.window.flush)
        known = None if self.force else self.known.get(row.name)
        budget = (
            self.matchers.budget(place, recipe, row, known) if row.matched else Budget(unit="bits", value=row.asked)
        )
        plan = allocate(place, recipe, [budget], force=self.force)[0]
        return Subject(plan.recipe, plan)

    def _whiten(self, place: Run, recipe: Recipe, stats: str | None) -> None:
        rates = self.run.stats(stats or "stats")
        if stats and not rates.exists():
            problem = f"there are no Stats of the name {stats}"
            raise ArtifactError(problem, f"make them by aatc collect --name {stats}, with the samples they are to have")
        basis = self.run.stats("stats-transform")
        whiten(
            place,
            transform_stats=rates if stats or not basis.exists() else basis,
            rate_stats=rates,
            wanted=Wanted.by(recipe),
            device=self.device,
        )


def reason_of(error: Exception, root: Path) -> str:
    """Why something could not be done, in one line; paths in the run at ``root`` begin there."""
    if isinstance(error, AatcError):
        said = f"{error.message}; {error.hint}" if error.hint else error.message
    else:
        first = next(iter(str(error).strip().splitlines()), "")
        said = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return said.replace(f"{root}/", "")
