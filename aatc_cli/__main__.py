"""Entry point: run the command line and turn every error a user can meet into one clear message and an exit code."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import time
from contextlib import suppress
from types import FrameType

from aatc_cli.streams import OutputError, guarded_streams, open_streams

_INTERRUPTED = 130
# distributions that are not called as the packages in them
_DISTRIBUTIONS = {"yaml": "pyyaml", "sklearn": "scikit-learn"}


def main() -> None:
    """Run ``aatc``. Exit codes: 0 done, 1 failed or check differs, 2 usage, 130 interrupted."""
    if not open_streams():
        _complain("the standard output is closed, and what a command finds goes there", "end it with > /dev/null")
        sys.exit(1)
    interrupts: list[int] = []

    def interrupted(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    # where whoever started this process ignores interrupts, it stays so
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, interrupted)
    sys.unraisablehook = _unraisable
    # everything is imported in here, so that an interrupt of an import is one like any other
    try:
        code = _run(interrupts)
    except KeyboardInterrupt:
        code = _INTERRUPTED
    except BrokenPipeError:
        # the reader of a pipe went away: not an error of ours; keep the interpreter from writing to it again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except ModuleNotFoundError as error:
        package = (_named(error) or "aatc_cli").split(".")[0]
        if package == "aatc_cli":
            raise
        distribution = _DISTRIBUTIONS.get(package, package.replace("_", "-"))
        _complain(f"the package {package} is not installed", f"pip install {distribution}")
        code = 1
    except MemoryError:
        _complain("the memory of this process is used up", "close other programs, raise its limit, or ask for less")
        code = 1
    except OutputError as error:
        problem = f"the standard output cannot be written: {error.strerror or error}"
        _complain(problem, "send it elsewhere, or make room there; what the command made is in its place")
        code = 1
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        _complain(f"{error.strerror or error}{where}", "check the path, its permissions and the space left on the disk")
        code = 1
    except Exception:
        # libraries that call back into Python wrap an interrupt into an error of their own
        if not interrupts:
            raise
        code = _INTERRUPTED
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.unraisablehook = sys.__unraisablehook__
    if code == _INTERRUPTED:
        _complain("interrupted", "run the same command again; collect continues from its last checkpoint")
    sys.exit(code)


def _run(interrupts: list[int]) -> int:
    """Run the command line; its exit code, with what the user can act on said unless it came of an interrupt."""
    if not sys.stderr.isatty():
        # bars of other libraries (a .gguf file being read, a download) would fill a log with carriage returns
        os.environ.setdefault("TQDM_DISABLE", "1")
    import typer

    from aatc_cli.cli import app
    from aatc_cli.errors import AatcError

    # what the option parser raises for a wrong command line; typer brings a parser of its own and does not name it
    parser_error: type[Exception] = typer.BadParameter.__mro__[1]
    try:
        with guarded_streams():
            code = app(prog_name="aatc", standalone_mode=False)
    except AatcError as error:
        if interrupts:
            return _INTERRUPTED
        _complain(error.message, error.hint)
        return error.exit_code
    except parser_error as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "aatc"
        # lists of choices come with a tab and a line each
        message = " ".join(getattr(error, "format_message", error.__str__)().split())
        _complain(message.replace("Value error, ", ""), f"see {command} --help")
        return 2
    except typer.Abort:
        return _INTERRUPTED
    return code if isinstance(code, int) else 0


def _named(error: BaseException | None) -> str | None:
    """The module that is missing; a library may have wrapped the error that says it."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name:
            return error.name
        error = error.__cause__ or error.__context__
    return None


def _unraisable(event: sys.UnraisableHookArgs) -> None:
    """Interrupt again a moment later where an interrupt fell into a callback or a destructor, which lose exceptions."""
    if event.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(event)
        return
    _thread.start_new_thread(_interrupt_soon, ())


def _interrupt_soon() -> None:
    time.sleep(0.05)
    _thread.interrupt_main()


def _complain(message: str, hint: str | None) -> None:
    lines = [f"Error: {message}"] + ([f"Hint: {hint}"] if hint else [])
    with suppress(OSError):
        sys.stderr.write("".join(" ".join(line.splitlines()) + "\n" for line in lines))
        sys.stderr.flush()


if __name__ == "__main__":
    main()
