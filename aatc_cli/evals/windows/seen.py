"""How much of the text that is scored a plan was calibrated on: such figures flatter the plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from aatc_cli.artifacts.manifest import MANIFEST, read_manifest
from aatc_cli.artifacts.plan import Plan
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import Stats
from aatc_cli.errors import ArtifactError
from aatc_cli.text.overlap import overlap
from aatc_cli.text.windows import Windows


def seen_share(plan: Plan, windows: Windows, bos: int | None) -> float | None:
    """Share of the tokens of ``windows`` that lie in calibration text of ``plan``, 0 to 1; None where none can tell.

    By the hashes that the Stats behind it keep, where they still lie in the run; else by the hash of the whole text.
    """
    inputs = plan.transform().manifest.inputs
    found = [
        share for stats in _stats_of(plan, set(inputs.values())) if (share := seen_in(stats, windows, bos)) is not None
    ]
    if found:
        return max(found)
    known = {record.sha256 for record in plan.texts}
    return 1.0 if windows.records[0].sha256 in known else None


def seen_of_prompts(plan: Plan, prompts: Sequence[Sequence[int]], bos: int | None) -> float | None:
    """Share of the tokens of ``prompts`` that lie in calibration text of ``plan``; None where none can tell."""
    rows = [torch.tensor(prompt)[None] for prompt in prompts]
    found = []
    for stats in _stats_of(plan, set(plan.transform().manifest.inputs.values())):
        if stats.blocks is None:
            continue
        shares = [(overlap(row, bos, stats.blocks), row.shape[1]) for row in rows]
        known = [(share.tokens, count) for share, count in shares if share is not None]
        if known:
            found.append(sum(share * count for share, count in known) / sum(count for _, count in known))
    return max(found, default=None)


def seen_in(stats: Stats, windows: Windows, bos: int | None) -> float | None:
    """The same for the text of some Stats."""
    blocks = stats.blocks
    shared = None if blocks is None else overlap(windows.tokens, bos, blocks)
    return None if shared is None else shared.tokens


def _stats_of(plan: Plan, digests: set[str]) -> Iterator[Stats]:
    """The Stats of these digests in the plan's run, or in the run that this one lies in (a study's, stability's)."""
    root = plan.path.parent.parent
    for place in (root, root.parent.parent):
        for path in Run(place).all_stats() if place.is_dir() else []:
            try:
                if (path / MANIFEST).is_file() and read_manifest(path).digest in digests:
                    yield Stats.open(path)
            except ArtifactError:
                # what is not the plan's need not be whole
                continue
