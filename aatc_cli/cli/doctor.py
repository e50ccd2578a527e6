"""The command doctor: a table of findings, exit code 1 where something has to be mended."""

from __future__ import annotations

from pathlib import Path

import typer

from aatc_cli.cli.options import JsonOption, RunOption


def doctor(run: RunOption = Path("run"), json: JsonOption = False) -> None:
    """Check this installation: packages, GPU, kernels, disk and memory, and a selftest of 20 seconds.

    The selftest runs collect, whiten, allocate and eval on a tiny random model, and holds the packed cache to what
    eval measured. Exit code 1 when anything failed, with the step named.
    """
    from dataclasses import asdict

    from aatc_cli.console import print_json, print_table
    from aatc_cli.errors import AatcError
    from aatc_cli.stages.doctor import diagnose

    found = diagnose(run)
    if json:
        print_json({"ok": not found.failed, "findings": [asdict(finding) for finding in found.findings]})
    else:
        rows = [
            [each.name, each.state, f"{each.seconds:.1f}" if each.seconds else "", each.detail]
            for each in found.findings
        ]
        print_table("doctor", ["what", "state", "s", "found"], rows)
    if found.failed and json:
        raise typer.Exit(1)
    if found.failed:
        raise AatcError(
            "; ".join(f"{each.name} failed: {each.detail}" for each in found.failed),
            "mend that and run aatc doctor again",
        )
