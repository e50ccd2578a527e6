"""The command advise: whether a stored cache is worth it on a link."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from aatc_cli.cli.options import DeviceOption, JsonOption, ModelOption

_Plan = Annotated[str, typer.Option("--plan", help="Plan directory, exported folder, or hub:owner/name@COMMIT.")]
_Links = Annotated[list[str], typer.Option("--link", help="Speed of a link: 25Gbps, 3.1GB/s; several allowed.")]


def advise(
    plan: _Plan,
    link: _Links,
    context: Annotated[int, typer.Option("--context", min=1, help="Tokens of the prefix.")] = 32768,
    decode: Annotated[str | None, typer.Option("--decode", help="Raw bytes decoded: 4GB/s. Default: measured.")] = None,
    recompute: Annotated[
        float | None, typer.Option("--recompute", min=0, help="Seconds to compute it. Default: measured with --model.")
    ] = None,
    model: ModelOption = None,
    device: DeviceOption = "cpu",
    json: JsonOption = False,
) -> None:
    """Say for every link whether to move a prefix in chunks, to move it raw, or to compute it again.

    Example: aatc advise --plan run/plans/loss-aware-tiles-2 --link 25Gbps --link 3GB/s --recompute 4.2
    """
    from dataclasses import asdict
    from math import isfinite

    from aatc_cli.artifacts.plan import Plan
    from aatc_cli.artifacts.shipped import find_plan
    from aatc_cli.cli.choosing import named_source
    from aatc_cli.console import print_json, working
    from aatc_cli.errors import UsageError
    from aatc_cli.models.placement import find_device
    from aatc_cli.stages.storing.advise import Question, link_speed, measured_decode, measured_recompute
    from aatc_cli.stages.storing.advise import advise as stage

    opened = Plan.open(find_plan(plan))
    find_device(device)
    for one in link:
        link_speed(one)
    if recompute is not None and not isfinite(recompute):
        raise UsageError(f"--recompute must be a number of seconds, got {recompute:g}", "leave it out, or measure it")
    with working("measuring"):
        speed = measured_decode(opened, device) if decode is None else link_speed(decode)
        if recompute is None and model is not None:
            recompute = measured_recompute(opened, named_source(model), context, device, "auto")
    found = asdict(stage(opened, Question(context, tuple(link), speed, recompute)))
    if json:
        print_json(found)
    else:
        _print(opened.name, found)


def _print(name: str, found: dict[str, Any]) -> None:
    from aatc_cli.console import print_table

    typer.echo(
        f"{name}, {found['context']:,} tokens: {found['coded_bytes']:,} bytes for {found['raw_bytes']:,} "
        f"({found['ratio']:.2f} x), decoded in {found['decode_seconds']:.3g} s"
    )
    rows = [[e["link"], f"{e['raw_seconds']:.3g}", f"{e['stored_seconds']:.3g}", e["best"]] for e in found["links"]]
    print_table("seconds by link", ["link", "raw", "stored", "best"], rows)
    typer.echo(f"raw pages arrive sooner on links above {found['worth_below'] / 1e9:.3g} GB/s")
    if found["recompute_seconds"] is not None:
        least = found["worth_above"]
        told = "before a chunk of it is decoded" if least is None else f"sooner on links below {least / 1e9:.3g} GB/s"
        typer.echo(f"computed again in {found['recompute_seconds']:.3g} s: {told}")
