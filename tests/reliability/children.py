"""A process that has everything loaded and forks one child per request, so that a kill costs no import of torch.

Requests and answers are JSON, one a line, on stdin and stdout. A child runs one command through the entry point (or
saves or loads a cache) and meets one fault: a signal before its n-th call of the file system, a file system that
refuses to write, a limit on the size of files, no network, a package that is absent, or a user who is not root.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

# a child computes in one thread: those of a thread pool do not survive a fork
os.environ["OMP_NUM_THREADS"] = "1"

import torch

from aatc_cli.__main__ import main

torch.set_num_threads(1)
NOBODY = 65534
_PLACES = {"open": 0, "os.rename": 1, "os.mkdir": 0, "os.remove": 0, "os.rmdir": 0, "os.truncate": 0}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Calls:
    """Counts what this process asks of the file system under a folder, and lets one call meet its fault."""

    def __init__(self, folder: str, act: str | None, at: int) -> None:
        self.folder, self.act, self.at, self.count = folder, act, at, 0
        self.sync = os.fsync
        os.fsync = self.fsync
        sys.addaudithook(self.hear)

    def fsync(self, handle: int) -> None:
        """Count before and after, so that a fault falls on both sides of the flush."""
        path = os.readlink(f"/proc/self/fd/{handle}")
        self.meet(path, "os.fsync")
        self.sync(handle)
        self.meet(path, "os.fsync")

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Audit hook: every opening for writing, renaming, making and removing of files."""
        if event not in _PLACES:
            return
        path = arguments[_PLACES[event]]
        if not isinstance(path, str | bytes | os.PathLike):
            return
        path = os.fsdecode(path)
        if event == "open":
            _, mode, flags = arguments
            writes = any(letter in mode for letter in "wax+") if mode else flags & _WRITING
            if not writes:
                return
        elif event in ("os.remove", "os.rmdir") and arguments[1] not in (None, -1):
            path = os.path.join(os.readlink(f"/proc/self/fd/{arguments[1]}"), path)
        self.meet(path, event)

    def meet(self, path: str, event: str) -> None:
        """One call under the folder: count it, and act if it is its turn."""
        if not os.path.abspath(path).startswith(self.folder):
            return
        self.count += 1
        if self.count == self.at and self.act in ("SIGKILL", "SIGINT", "SIGSTOP", "SIGTERM"):
            os.kill(os.getpid(), getattr(signal, self.act))
        if self.count >= self.at and self.act == "read-only" and event != "os.fsync":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)


class Absent:
    """A finder that knows nothing of some packages, whatever is installed."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        for loaded in [name for name in sys.modules if name.split(".")[0] in names]:
            del sys.modules[loaded]
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, *_: object) -> None:
        """Refuse the absent packages and leave the others to who comes next."""
        if name.split(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def unreachable(*_: object, **__: object) -> None:
    """Stands for every way to open a connection."""
    raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))


class Server:
    """Answers requests; holds the cache that `save` children write."""

    def __init__(self) -> None:
        self.held: Any = None
        self.session: Any = None
        self.cache: Any = None

    def prepare(self, argv: list[str]) -> dict[str, Any]:
        """Run a command in this process, so that its children find everything imported."""
        sys.argv = ["aatc", *argv]
        try:
            main()
        except SystemExit as stop:
            return {"code": stop.code}
        return {"code": 0}

    def prepare_cache(self, model: str, plan: str, tokens: int) -> dict[str, Any]:
        """Fill a cache of ``tokens`` tokens under a plan; it and its session stay open."""
        from aatc_cli.artifacts.plan import Plan
        from aatc_cli.models.loading import find_model, load_model
        from aatc_cli.runtime.attach import attach_codecs

        opened = Plan.open(Path(plan))
        loaded = load_model(find_model(model), dtype="bfloat16")
        codecs = opened.codecs("cpu")
        if self.held is not None:
            self.held.__exit__(None, None, None)
        self.held = attach_codecs(loaded, codecs, opened.recipe.window)
        self.session = self.held.__enter__()
        self.cache = self.session.new_cache()
        ids = torch.randint(0, 256, (1, tokens), generator=torch.Generator().manual_seed(tokens))
        with torch.no_grad():
            loaded(ids, **{self.session.keyword: self.cache})
        return {"digest": self.digest(self.cache)}

    def digest(self, cache: Any) -> str:
        """One hash over all tensors of a cache."""
        from aatc_cli.artifacts.manifest import digest_of
        from aatc_cli.artifacts.tensor_file import tensor_digest

        return digest_of({name: tensor_digest(tensor) for name, tensor in cache.state.tensors().items()})

    def act(self, argv: list[str]) -> None:
        """What a child does: a command, or saving or loading the cache."""
        if argv[0] not in ("save", "load"):
            sys.argv = ["aatc", *argv]
            main()
            return
        from aatc_cli.errors import AatcError
        from aatc_cli.runtime.cache_file import load_cache, save_cache

        try:
            if argv[0] == "save":
                save_cache(self.cache, self.session, Path(argv[1]))
            else:
                sys.stdout.write(self.digest(load_cache(self.session, Path(argv[1]))))
        except AatcError as error:
            sys.stderr.write(f"Error: {error.message}\nHint: {error.hint}\n")
            sys.exit(error.exit_code)

    def start(self, argv: list[str], out: str, folder: str, **fault: Any) -> dict[str, Any]:
        """Fork a child; its output goes to files in ``out``."""
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            return {"pid": pid}
        code = 99
        try:
            for stream, name in ((0, os.devnull), (1, f"{out}/stdout"), (2, f"{out}/stderr")):
                handle = os.open(name, os.O_RDONLY if stream == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(handle, stream)
            counted = os.open(f"{out}/calls", os.O_WRONLY | os.O_CREAT)
            calls = self.suffer(folder, **fault)
            try:
                self.act(argv)
                code = 0
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
            sys.stdout.flush()
            sys.stderr.flush()
            calls.act = None
            os.write(counted, str(calls.count).encode())
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)

    def suffer(
        self,
        folder: str,
        act: str | None = None,
        at: int = 1,
        size: int | None = None,
        dies: bool = False,
        absent: list[str] | None = None,
        offline: bool = False,
        user: bool = False,
        cwd: str | None = None,
    ) -> Calls:
        """Set this child's fault up."""
        # an interrupt is a KeyboardInterrupt here as in a shell, whatever the starter of this process did with it
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if cwd is not None:
            os.chdir(cwd)
        if offline:
            socket.socket.connect = unreachable
            socket.create_connection = unreachable
            socket.getaddrinfo = unreachable
        if absent:
            Absent(absent)
        if size is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL if dies else signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        if user and os.geteuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        return Calls(folder, act, at)

    def wait(self, pid: int, after: float | None = None, signal_name: str = "SIGKILL") -> dict[str, Any]:
        """Wait for a child, and send it a signal after so many seconds."""
        began = time.monotonic()
        while True:
            found, status = os.waitpid(pid, 0 if after is None else os.WNOHANG)
            if found:
                return {"code": os.waitstatus_to_exitcode(status), "seconds": time.monotonic() - began}
            if after is not None and time.monotonic() - began >= after:
                os.kill(pid, getattr(signal, signal_name))
                after = None
            time.sleep(0.001)


def serve() -> None:
    """Answer every line until stdin ends; nothing but answers goes to the first stdout."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    server = Server()
    # until a child has its own handler an interrupt comes too early
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin:
        request = json.loads(line)
        answer = getattr(server, request.pop("do"))(**request)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve()
