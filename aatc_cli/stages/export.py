"""export: a plan as one folder that needs nothing beside it, with a card that says what it is."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from aatc_cli.artifacts.disk import replace_directory, unwritable, write_text
from aatc_cli.artifacts.hub import PREFIX, repository_of, upload
from aatc_cli.artifacts.manifest import MANIFEST, TENSORS
from aatc_cli.artifacts.plan import Plan
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.shipped import CARD, verify
from aatc_cli.artifacts.transform import Transform
from aatc_cli.console import say, working
from aatc_cli.errors import AatcError, UsageError
from aatc_cli.stages.inspecting.run import read_evaluation_data
from aatc_cli.stages.shipping.card import card


@dataclass(frozen=True)
class Exported:
    """Where a plan went: a folder, or ``hub:owner/name@COMMIT``; its digest and the bytes of the folder."""

    place: str
    digest: str
    bytes: int


def export(path: Path, target: str, *, force: bool = False) -> Exported:
    """Copy the Plan at ``path``, its Transform and its evaluations to ``target``, a folder or ``hub:owner/name``.

    What was copied is read again, every tensor against its hash, before it appears. Raises `AatcError`.
    """
    plan = Plan.open(path)
    with working(f"copying {plan.name}"):
        return _exported(plan, target, force=force)


def _exported(plan: Plan, target: str, *, force: bool) -> Exported:
    transform = plan.transform()
    if not target.startswith(PREFIX):
        folder = Path(target)
        _check_target(folder, force=force)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as place:
                draft = Path(place) / "draft"
                _write(draft, plan, transform)
                replace_directory(draft, folder)
        except OSError as failure:
            raise unwritable(folder, failure) from failure
        return Exported(str(folder), plan.digest, _bytes(folder))
    repository, revision = repository_of(target)
    if revision is not None:
        raise UsageError(f"{target} names a commit, which an upload makes", f"give {PREFIX}{repository}")
    with TemporaryDirectory(prefix="aatc-export-") as place:
        draft = Path(place) / plan.name
        _write(draft, plan, transform)
        commit = upload(draft, repository, f"{plan.name} for {plan.model.name} ({plan.digest[:12]})")
        return Exported(f"{PREFIX}{repository}@{commit}", plan.digest, _bytes(draft))


def _check_target(folder: Path, *, force: bool) -> None:
    if not folder.exists():
        return
    if not folder.is_dir() or not (((folder / CARD).is_file() and (folder / "plans").is_dir()) or _empty(folder)):
        raise AatcError(f"{folder} is there and no exported plan", "give a folder that does not exist yet")
    if not force and not _empty(folder):
        raise AatcError(f"{folder} holds an exported plan already", "add --force to replace it, or give another folder")


def _empty(folder: Path) -> bool:
    return not any(folder.iterdir())


def _write(draft: Path, plan: Plan, transform: Transform) -> None:
    """Fill ``draft``, and read all of it again."""
    run, shipped = Run(plan.path.parent.parent), Run(draft)
    for source, place in (
        (plan.path, shipped.plan(plan.recipe.name, plan.budget)),
        (transform.path, shipped.transform(plan.recipe.transform_name)),
    ):
        place.mkdir(parents=True)
        for name in (MANIFEST, TENSORS):
            shutil.copyfile(source / name, place / name)
    evaluations = _evaluations(run, plan)
    for file in evaluations:
        shipped.evals.mkdir(exist_ok=True)
        shutil.copyfile(file, shipped.evals / file.name)
    write_text(draft / CARD, card(run, plan, transform, list(evaluations.values())))
    copy = Plan.open(shipped.plan(plan.recipe.name, plan.budget))
    if copy.digest != plan.digest:
        raise AatcError(f"{plan.path} changed while it was copied", "run the same command again")
    verify(copy)
    verify(copy.transform())
    say(f"export: {plan.name} with its transform and {len(evaluations)} evaluations, every tensor verified")


def _evaluations(run: Run, plan: Plan) -> dict[Path, dict[str, Any]]:
    """Files of what was measured of exactly this plan, with their data."""
    files = sorted(run.evals.glob("*.json")) if run.evals.is_dir() else []
    data = {file: read_evaluation_data(file) for file in files}
    return {file: each for file, each in data.items() if each.get("plan") == plan.digest}


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
