"""Commands made from the settings of what they call: an option for every field, and none that is not read."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union, get_args, get_origin

import typer
from typer.core import DEFAULT_MARKUP_MODE, TyperCommand
from typer.models import OptionInfo

from aatc_cli.cli.loudness import heard

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

M = TypeVar("M", bound="BaseModel")
Parameters = Callable[[], Sequence[inspect.Parameter]]

_HELP = {"help_option_names": ["-h", "--help"]}
_KIND = inspect.Parameter.POSITIONAL_OR_KEYWORD


def spreading(parameters: Iterable[inspect.Parameter]) -> type[TyperCommand]:
    """The class of a command whose options that may be repeated also take several values: ``--plan a b``.

    So what a shell makes of ``--plan run/plans/*`` is taken whole. Numbers may be separated by commas, as in
    ``--budget 2,3``; texts and paths may not: they can hold one.
    """
    repeatable = dict(found for parameter in parameters if (found := _repeatable(parameter)))

    class SpreadCommand(TyperCommand):
        """A command that gives every further value the option in front of it before it parses."""

        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            """As the parser's own, on arguments with one option for every value."""
            return super().parse_args(ctx, spread(args, repeatable))

    return SpreadCommand


def _repeatable(given: inspect.Parameter) -> tuple[str, bool] | None:
    """The flag of an option that may be repeated, and whether its values are numbers; None for any other parameter."""
    if get_origin(given.annotation) is not Annotated:
        return None
    kind, info = get_args(given.annotation)[:2]
    lists = [part for part in (kind, *get_args(kind)) if get_origin(part) is list]
    if not lists or not isinstance(info, OptionInfo):
        return None
    # typer takes the first name for a default until it reads the whole signature
    flag = next(iter(info.param_decls or ()), info.default)
    return str(flag), get_args(lists[0])[0] in (int, float)


def spread(args: Sequence[str], repeatable: dict[str, bool]) -> list[str]:
    """``args`` with one option for every value of the ``repeatable`` ones, whose flags say whether commas separate.

    The word behind a flag is its value whatever it looks like; further ones end at the next option.
    """
    found: list[str] = []
    flag, first = "", False
    for arg in args:
        name, equals, value = arg.partition("=")
        if first or (flag and not arg.startswith("-")):
            values = arg.split(",") if repeatable[flag] else [arg]
            found += [part for one in values for part in (flag, one)]
            first = False
        elif name in repeatable:
            flag, first = name, not equals
            if equals:
                found += [part for one in (value.split(",") if repeatable[flag] else [value]) for part in (flag, one)]
        else:
            flag = ""
            found.append(arg)
    # an option without any value is for the parser to refuse
    return [*found, flag] if first else found


def settings_parameters(settings: type[BaseModel], *names: str) -> list[inspect.Parameter]:
    """A parameter for every field, or for those named; its option bears the field's name and description."""
    fields = settings.model_fields
    return [
        inspect.Parameter(name, _KIND, default=_default(fields[name]), annotation=_annotation(name, fields[name]))
        for name in names or fields
    ]


def given_settings(settings: type[M], values: dict[str, Any]) -> M:
    """The settings of the values of their options, taken out of ``values``; raises `UsageError` for wrong ones."""
    from pydantic import ValidationError

    from aatc_cli.errors import UsageError

    # an option that was not given has None where the field has a default of its own
    given = {name: value for name in settings.model_fields if (value := values.pop(name, None)) is not None}
    try:
        return settings(**{name: tuple(v) if isinstance(v, list) else v for name, v in given.items()})
    except ValidationError as error:
        first = error.errors()[0]
        option = "--" + str(first["loc"][0]).replace("_", "-") if first["loc"] else "options"
        raise UsageError(f"{option}: {str(first['msg']).removeprefix('Value error, ')}", "see --help") from error


def command_of(
    name: str, summary: str, parameters: Sequence[inspect.Parameter], call: Callable[[dict[str, Any]], None]
) -> Any:
    """A command with these parameters that hands ``call`` their values; all have defaults or are arguments."""

    def run(**values: Any) -> None:
        call(values)

    # typer reads both; a function that is made has neither
    run.__signature__ = inspect.Signature(list(parameters))  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__doc__ = summary
    application = typer.Typer(add_completion=False)
    application.command(name=name, cls=spreading(parameters), context_settings=_HELP)(heard(run))
    return typer.main.get_command(application)


class MadeCommand(TyperCommand):
    """A command of settings: help of all commands has its name and summary, and it is made when it is asked for."""

    def __init__(self, call: Callable[[dict[str, Any]], None], parameters: Parameters) -> None:
        self.call, self.parameters = call, parameters
        super().__init__(call.__name__, help=inspect.getdoc(call), rich_markup_mode=DEFAULT_MARKUP_MODE)

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """That of the command with its options."""
        return self.command().make_context(info_name, args, parent, **extra)

    def get_params(self, ctx: Any) -> Any:
        """Its options, for the reference of all commands."""
        return self.command().get_params(ctx)

    def command(self) -> Any:
        """The command with its options; a new one each time, for it remembers the help option of its first context."""
        return command_of(str(self.name), str(self.help), self.parameters(), self.call)


def parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    """A parameter of a command that is made."""
    return inspect.Parameter(name, _KIND, default=default, annotation=annotation)


def _default(field: FieldInfo) -> Any:
    value = field.get_default()
    return (list(value) or None) if isinstance(value, tuple) else value


def _annotation(name: str, field: FieldInfo) -> Any:
    """What typer makes an option of: the field's type, bounds and description."""
    kind: Any = field.annotation
    metadata = list(field.metadata)
    optional = get_origin(kind) in (Union, UnionType)
    if optional:
        kind = next(part for part in get_args(kind) if part is not type(None))
    repeated = get_origin(kind) is tuple
    if repeated:
        kind = get_args(kind)[0]
    if get_origin(kind) is Annotated:
        kind, *more = get_args(kind)
        metadata += [bound for part in more for bound in getattr(part, "metadata", [part])]
    bounds = {"min": _bound(metadata, "ge"), "max": _bound(metadata, "le")} if kind in (int, float) else {}
    option = typer.Option("--" + name.replace("_", "-"), help=field.description, **bounds)
    if repeated:
        return Annotated[list[kind] | None, option]
    return Annotated[kind | None, option] if optional else Annotated[kind, option]


def _bound(metadata: list[Any], side: str) -> Any:
    return next((getattr(part, side) for part in metadata if hasattr(part, side)), None)
