"""Shipped folders: one Plan with its Transform and what was measured of it, laid out as a run of its own."""

from __future__ import annotations

from pathlib import Path

from aatc_cli.artifacts.artifact import Noun
from aatc_cli.artifacts.hub import PREFIX, download
from aatc_cli.artifacts.manifest import MANIFEST
from aatc_cli.artifacts.run import Run
from aatc_cli.errors import ArtifactError

CARD = "README.md"


def verify(noun: Noun) -> None:
    """Read every tensor of an artifact against its hash; raises `ArtifactError`."""
    for name in noun.manifest.tensors:
        noun.artifact.array(name)


def find_plan(name: Path | str) -> Path:
    """The directory of the Plan that ``--plan`` names; raises `ArtifactError`.

    A Plan's own directory, a shipped folder or another run that holds one plan alone, or ``hub:owner/name@COMMIT``.
    """
    text = str(name)
    path = download(text) if text.startswith(PREFIX) else Path(text)
    if (path / MANIFEST).is_file() or not (path / "plans").is_dir():
        return path
    plans = Run(path).plans()
    if len(plans) != 1:
        found = ", ".join(plan.name for plan in plans) or "none"
        raise ArtifactError(f"{text} holds {len(plans)} plans, not one: {found}", f"name one: {path}/plans/NAME")
    return plans[0]
