"""Entry point: run the command line and turn every error a user can meet into one clear message and an exit code."""

from __future__ import annotations

import io
import os
import sys

import typer

# what the option parser raises for a wrong command line; typer brings a parser of its own and does not name the class
_ParserError: type[Exception] = typer.BadParameter.__mro__[1]
_INTERRUPTED = 130


def main() -> None:
    """Run ``aatc``. Exit codes: 0 done, 1 failed or check differs, 2 usage, 130 interrupted."""
    if not sys.stderr.isatty():
        # bars of other libraries (a .gguf file being read, a download) would fill a log with carriage returns
        os.environ.setdefault("TQDM_DISABLE", "1")
    from aatc_cli.cli import app
    from aatc_cli.errors import AatcError

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # a character that the terminal's encoding lacks is shown as its escape, not as a traceback
            stream.reconfigure(errors="backslashreplace")
    try:
        code = app(prog_name="aatc", standalone_mode=False)
        # flushed here, so that a full disk or a closed pipe is reported and not met at interpreter exit
        sys.stdout.flush()
    except AatcError as error:
        _complain(error.message, error.hint)
        sys.exit(error.exit_code)
    except _ParserError as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "aatc"
        _complain(getattr(error, "format_message", error.__str__)(), f"see {command} --help")
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        code = _INTERRUPTED
    except BrokenPipeError:
        # the reader of a pipe went away: not an error of ours; keep the interpreter from writing to it again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        _complain(f"{error.strerror or error}{where}", "check the path, its permissions and the space left on the disk")
        sys.exit(1)
    if code == _INTERRUPTED:
        _complain("interrupted", "run the same command again; collect continues from its last checkpoint")
    sys.exit(code if isinstance(code, int) else 0)


def _complain(message: str, hint: str | None) -> None:
    lines = [f"Error: {message}"] + ([f"Hint: {hint}"] if hint else [])
    sys.stderr.write("".join(" ".join(line.splitlines()) + "\n" for line in lines))


if __name__ == "__main__":
    main()
