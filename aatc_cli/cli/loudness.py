"""The options -q and -v, which every command has."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

F = TypeVar("F", bound=Callable[..., Any])

QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Nothing on stderr but errors.")]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="More on stderr: what is read, used, skipped.")]


class Commands(typer.Typer):
    """A typer application whose commands all take -q and -v."""

    def command(self, name: str | None = None, **options: Any) -> Callable[[F], F]:
        """As `typer.Typer.command`."""
        register = super().command(name, **options)

        def registered(function: F) -> F:
            register(heard(function))
            return function

        return registered


def heard(function: Callable[..., Any]) -> Callable[..., Any]:
    """The command ``function`` with the options -q and -v, which hold before it is called; raises `UsageError`."""
    hints = get_type_hints(function, include_extras=True)
    parameters = [
        parameter.replace(annotation=hints.get(name, parameter.annotation))
        for name, parameter in inspect.signature(function).parameters.items()
    ]
    own = {"quiet": QuietOption, "verbose": VerboseOption}
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters += [inspect.Parameter(name, kind, default=False, annotation=option) for name, option in own.items()]

    @functools.wraps(function)
    def wrapper(*args: Any, quiet: bool = False, verbose: bool = False, **options: Any) -> Any:
        from aatc_cli.console import set_loudness
        from aatc_cli.errors import UsageError

        if quiet and verbose:
            raise UsageError("-q and -v ask for less and for more", "give one of them")
        set_loudness("quiet" if quiet else "verbose" if verbose else "usual")
        return function(*args, **options)

    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = hints | own
    wrapper.__doc__ = _paragraphs(function)
    return wrapper


def _paragraphs(function: Callable[..., Any]) -> str:
    """Its docstring with a line a paragraph: the help is folded by the terminal, not by the source as well."""
    return "\n\n".join(" ".join(part.split()) for part in (inspect.getdoc(function) or "").split("\n\n"))
