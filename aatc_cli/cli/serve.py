"""The command serve: vLLM with a plan's cache."""

from __future__ import annotations

from typing import Annotated

import typer

from aatc_cli.cli.options import JsonOption, ModelOption

_Plan = Annotated[str, typer.Option("--plan", help="Plan directory, exported folder, or hub:owner/name@COMMIT.")]
_Length = Annotated[
    int | None, typer.Option("--max-model-len", min=1, help="Longest text in tokens; if not given, the model's limit.")
]


def serve(
    plan: _Plan,
    model: ModelOption = None,
    max_model_len: _Length = None,
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", min=1, help="Requests that run at once.")] = 64,
    prefixes: Annotated[
        bool, typer.Option("--prefixes", help="Share prefixes, with 64 exact first tokens whatever the plan has.")
    ] = False,
    start: Annotated[bool, typer.Option("--start", help="Start vLLM instead of printing its command.")] = False,
    vllm: Annotated[
        list[str] | None, typer.Option("--vllm", help="More of vllm serve: --vllm=--port=8001; several allowed.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Print the command that serves a model through vLLM with the cache of a plan, or start it.

    Plan, model and the installed vLLM are checked first: what will not work is refused here and not at a request.

    Example: aatc serve --plan run/plans/loss-aware-tiles-even-2 --model MODEL --max-model-len 32768
    """
    from dataclasses import asdict

    from aatc_cli.console import print_json, say
    from aatc_cli.errors import UsageError
    from aatc_cli.serve.vllm_backend.command import Wanted, serve_command

    if model is None:
        raise UsageError("no model was named", "give --model: the folder or hub id that vLLM is to serve")
    if json and start:
        raise UsageError("--json is of what is printed, and --start prints nothing", "give one of them")
    found = serve_command(plan, model, Wanted(max_model_len, max_num_seqs, prefixes), vllm or [])
    if json:
        print_json(asdict(found) | {"command": found.line})
        return
    ratio = found.uncompressed / found.block_bytes
    say(f"64 tokens take {found.block_bytes:,} bytes, {ratio:.2f} times less than 16 bits")
    say(f"every request that runs takes {found.exact_bytes:,} bytes more for its exact tokens")
    if found.version is None:
        say("vLLM is not installed here: its version was not checked")
    if start:
        found.start()
    else:
        typer.echo(found.line)
