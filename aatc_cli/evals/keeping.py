"""Results that are there already: taken over where all is equal, and never replaced unasked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from aatc_cli.artifacts.changes import changes_in_words
from aatc_cli.artifacts.disk import require_writable
from aatc_cli.artifacts.evaluation import Measurement, read_measurement, write_evaluation
from aatc_cli.console import say
from aatc_cli.errors import SettingsMismatchError
from aatc_cli.evals.opened import Opened

M = TypeVar("M", bound=Measurement)


def already(folder: Path, draft: M, *, force: bool) -> M | None:
    """The result under the name of ``draft``, if it is of the same subject and protocol; None without one, or forced.

    Raises `SettingsMismatchError` naming every difference when it is of another, and `ArtifactError` when damaged.
    """
    path = folder / draft.file_name
    if force or not path.is_file():
        require_writable(folder)
        return None
    found = read_measurement(path, type(draft))
    changed = changes_in_words(found.determined_by, draft.determined_by)
    if changed:
        shown = "; ".join(changed[:5]) + ("; ..." if len(changed) > 5 else "")
        raise SettingsMismatchError(
            f"{path} was measured on something else: {shown}", "add --force to replace it, or use another --run"
        )
    return found


def found_before(opened: Opened, draft: M) -> M | None:
    """What `already` finds for a call's draft, once the call accepts the draft: both before anything is measured.

    Raises as `already` does, and as the call's ``accept``.
    """
    if opened.options.accept is not None:
        opened.options.accept(draft)
    return already(opened.run.evals, draft, force=opened.options.force)


def kept(folder: Path, draft: M, what: str, *, force: bool, measured: Callable[[], M]) -> M:
    """The result that is there already of the same, or what ``measured`` gives, written; ``what`` is for people.

    Raises as `already` does.
    """
    found = already(folder, draft, force=force)
    if found is not None:
        say(f"eval: {what} is there already, nothing to do")
        return found
    result = measured()
    say(f"eval: {what} -> {write_evaluation(folder, result)}")
    return result
