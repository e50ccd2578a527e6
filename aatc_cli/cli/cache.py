"""The commands cache put, get, list, check and gc: prefixes in a store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aatc_cli.cli.advise import advise
from aatc_cli.cli.loudness import Commands
from aatc_cli.cli.options import DeviceOption, DtypeOption, JsonOption, ModelOption, a_path
from aatc_cli.cli.serve import serve

if TYPE_CHECKING:
    from aatc_cli.stages.storing.using import Using

_Store = Annotated[
    Path, typer.Option("--store", envvar="AATC_STORE", parser=a_path, metavar="PATH", help="Folder of the store.")
]
_Plan = Annotated[str, typer.Option("--plan", help="Plan directory, exported folder, or hub:owner/name@COMMIT.")]
_File = Annotated[Path, typer.Option("--file", parser=a_path, metavar="PATH", help="Text of the prefix, in UTF-8.")]
_Limit = Annotated[str | None, typer.Option("--limit", help="Bytes that the store may take: 10GB.")]
_HERE = Path("store")

cache = Commands(
    name="cache",
    help="Keep prefixes that were computed once: a store of compressed caches.\n\n"
    "A store is a folder that several processes may use at once (--store, default $AATC_STORE or ./store).",
)


@cache.command()
def put(
    plan: _Plan,
    file: _File,
    store: _Store = _HERE,
    model: ModelOption = None,
    limit: _Limit = None,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "auto",
    json: JsonOption = False,
) -> None:
    """Read a text into a compressed cache and keep it; of a plan that predicts, its whole chunks of 256 tokens.

    Example: aatc cache put --plan run/plans/loss-aware-tiles-2 --model MODEL --file system-prompt.txt
    """
    from dataclasses import asdict

    from aatc_cli.console import print_json
    from aatc_cli.stages.storing.cache import put as stage

    done = stage(_using(store, plan, model, device, dtype), _words(file), limit)
    if json:
        print_json(asdict(done))
        return
    known = "was there" if done.there else f"{done.new:,} of them new"
    typer.echo(f"{done.tokens} tokens in {done.bytes:,} bytes, {known}; float16: {done.uncompressed:,}")


@cache.command()
def get(
    plan: _Plan,
    file: _File,
    store: _Store = _HERE,
    model: ModelOption = None,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=1, help="Tokens to generate, greedily.")] = 32,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "auto",
    json: JsonOption = False,
) -> None:
    """Go on from the longest stored prefix of a text: the rest of the text is read, and tokens are generated.

    Example: aatc cache get --plan run/plans/loss-aware-tiles-2 --model MODEL --file prompt.txt --new-tokens 64
    """
    from dataclasses import asdict

    from aatc_cli.console import print_json
    from aatc_cli.stages.storing.cache import get as stage

    done = stage(_using(store, plan, model, device, dtype), _words(file), new_tokens)
    if json:
        print_json(asdict(done))
    else:
        typer.echo(done.text)


@cache.command(name="list")
def list_prefixes(store: _Store = _HERE, json: JsonOption = False) -> None:
    """List the prefixes of a store, the least recently used first."""
    from dataclasses import asdict

    from aatc_cli.console import print_json, print_table
    from aatc_cli.stages.storing.cache import listed, summary

    found, whole = listed(store), summary(store)
    if json:
        print_json({"prefixes": [asdict(each) for each in found], "store": asdict(whole)})
        return
    rows = [[e.plan, e.model, str(e.tokens), f"{e.bytes:,}", e.problem] for e in found]
    print_table(str(store), ["plan", "model", "tokens", "bytes", "problem"], rows)
    typer.echo(f"{whole.prefixes} prefixes, {whole.objects} objects, {whole.chunks} chunks: {whole.bytes:,} bytes")


@cache.command()
def check(
    store: _Store = _HERE,
    repair: Annotated[bool, typer.Option("--repair", help="Remove what is damaged.")] = False,
    json: JsonOption = False,
) -> None:
    """Read every byte of a store against its checksum; exit 1 where something is damaged and not repaired."""
    from aatc_cli.console import print_json
    from aatc_cli.stages.storing.cache import check as stage

    found = stage(store, repair=repair)
    if json:
        print_json({"damaged": found, "removed": repair})
    else:
        for name, reason in found.items():
            typer.echo(f"{name}: {reason}")
        typer.echo(f"{len(found)} damaged{', removed' if repair and found else ''}")
    if found and not repair:
        raise typer.Exit(1)


@cache.command()
def gc(store: _Store = _HERE, limit: _Limit = None, json: JsonOption = False) -> None:
    """Remove what no prefix needs and what killed writers left; with --limit also what was used least recently."""
    from dataclasses import asdict

    from aatc_cli.console import print_json
    from aatc_cli.stages.storing.cache import collect

    done = collect(store, limit)
    if json:
        print_json(asdict(done))
    else:
        typer.echo(f"freed {done.freed:,} bytes: {done.prefixes} prefixes, {done.chunks} chunks; {done.bytes:,} left")


def add_stored(app: Commands) -> None:
    """Add the commands of stored caches and of engines to the application."""
    app.add_typer(cache)
    app.command()(advise)
    app.command()(serve)


def _using(store: Path, plan: str, model: str | None, device: str, dtype: str) -> Using:
    from aatc_cli.artifacts.plan import Plan
    from aatc_cli.artifacts.shipped import find_plan
    from aatc_cli.cli.choosing import named_source
    from aatc_cli.stages.storing.using import Using

    return Using(store, Plan.open(find_plan(plan)), named_source(model), device, dtype)


def _words(file: Path) -> str:
    from aatc_cli.errors import AatcError

    try:
        return file.read_text("utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise AatcError(f"{file} cannot be read: {reason}", "give a text file in UTF-8") from error
