"""The cells of one column, filled method by method; what fails is missing with its reason, and the rest goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from aatc_cli.artifacts.evaluation import Measurement
from aatc_cli.artifacts.manifest import digest_of
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.study import StudyCell, StudyResult, update_study
from aatc_cli.console import say
from aatc_cli.errors import AatcError, SettingsMismatchError
from aatc_cli.studies.columns import Column
from aatc_cli.studies.methods import Entrant, reason_of


class MixedProtocolsError(SettingsMismatchError):
    """Cells of one column would be of different windows, settings, dtypes or versions."""


@dataclass
class Sheet:
    """Fills the cells of one column and keeps the result on disk up to date."""

    run: Run
    column: Column
    result: StudyResult
    places: dict[Path, list[Entrant]] = field(default_factory=dict)

    def fill(self, entrants: Sequence[Entrant]) -> None:
        """Every entrant that is asked: those without a subject at once, the others by their run and in parts."""
        entrants = [entrant for entrant in entrants if self.column.asks(entrant.row.name)]
        self._put([self._cell(c, reason=c.row.reason) for c in entrants if c.subject is None])
        for entrant in entrants:
            if entrant.subject is not None and self.column.takes(entrant.subject.recipe):
                self.places.setdefault(entrant.place.root, []).append(entrant)
        for members in self.places.values():
            size = self.column.together or len(members)
            for start in range(0, len(members), size):
                self._attempt(members[start : start + size])

    def _attempt(self, members: list[Entrant]) -> None:
        """Run the stage; where it fails, on each half, so that one method cannot take the others with it."""
        try:
            self._run(members)
        except MixedProtocolsError:
            raise
        except Exception as error:  # anything a method may raise: running out of memory, a codec without a kernel, ...
            reason = reason_of(error, self.run.root)
            if len(members) == 1 or (isinstance(error, AatcError) and self._fails_for_all(members, reason)):
                names = ", ".join(member.row.name for member in members)
                say(f"study: {self.column.cell.column} is missing of {names}: {reason}")
                self._put([self._cell(member, reason=reason) for member in members])
                return
            middle = len(members) // 2
            self._attempt(members[:middle])
            self._attempt(members[middle:])

    def _fails_for_all(self, members: list[Entrant], reason: str) -> bool:
        """Whether the first and the last alone fail for the same reason: then it is the task's and no method's."""
        for member in (members[0], members[-1]):
            try:
                self._run([member])
            except Exception as error:
                if reason_of(error, self.run.root) == reason:
                    continue
            return False
        return True

    def _run(self, members: Sequence[Entrant]) -> None:
        """Run the stage for these, all of one place, and put down their cells."""
        place = members[0].place
        subjects = [member.subject for member in members if member.subject]
        found = self.column.stage(place, subjects, partial(self._accept, place))
        cells = []
        for member, measured in zip(members, found, strict=True):
            self._accept(place, measured)
            left_out = getattr(measured, "left_out", {})
            file, protocol = self._file(place, measured), _protocol_of(measured)
            cells.append(self._cell(member, file=file, left_out=left_out, protocol=protocol))
        self._put(cells)

    def _accept(self, place: Run, measured: Measurement) -> None:
        """Raise `MixedProtocolsError` where others of the column were measured on something else.

        A result that is still to be measured has its protocol already, so nothing is measured in vain.
        """
        mine = self.column.cell.column
        for old in self.result.cells:
            if old.column == mine and old.protocol not in (None, _protocol_of(measured)):
                raise MixedProtocolsError(
                    f"the study has {mine} of {old.row} measured on something else ({old.file}, now "
                    f"{self._file(place, measured)}): one column would show both",
                    "add --force to measure all of it anew, or give the study another name",
                )

    def _file(self, place: Run, measured: Measurement) -> str:
        return (place.evals / measured.file_name).relative_to(self.run.root).as_posix()

    def _cell(self, entrant: Entrant, **changes: object) -> StudyCell:
        return self.column.cell.model_copy(update={"row": entrant.row.name, **changes})

    def _put(self, cells: list[StudyCell]) -> None:
        self.result = update_study(self.run.root, self.result, lambda found: found.with_cells(cells))


def _protocol_of(measured: Measurement) -> str | None:
    return None if measured.protocol is None else digest_of(measured.protocol)
