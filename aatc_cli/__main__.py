"""Entry point: run the command line and turn every error a user can meet into one clear message and an exit code."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run ``aatc``. Exit codes: 0 done, 1 failed or check differs, 2 usage, 130 interrupted."""
    # transformers shows a bar of its own for .gguf files; ours is on stderr already
    os.environ.setdefault("TQDM_DISABLE", "1")
    from aatc_cli.cli import app
    from aatc_cli.errors import AatcError

    try:
        app()
    except AatcError as error:
        _complain(error.message, error.hint)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        _complain("interrupted", "run the same command again; collect continues from its last checkpoint")
        sys.exit(130)
    except BrokenPipeError:
        # the reader of a pipe went away: not an error of ours; keep the interpreter from writing to it again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        _complain(f"{error.strerror or error}{where}", "check the path, its permissions and the space left on the disk")
        sys.exit(1)


def _complain(message: str, hint: str | None) -> None:
    sys.stderr.write(f"Error: {message}\n" + (f"Hint: {hint}\n" if hint else ""))


if __name__ == "__main__":
    main()
