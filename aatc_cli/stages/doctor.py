"""doctor: is this installation sound? Packages, machine, kernels, and the pipeline on a model made on the spot."""

from __future__ import annotations

import platform
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory

from aatc_cli.console import working
from aatc_cli.errors import AatcError
from aatc_cli.version import __version__

REQUIRED = ("torch", "transformers", "numpy", "scipy", "safetensors", "pydantic", "typer", "rich", "jinja2")
# packages that parts of the tool need, and which
OPTIONAL = {
    "accelerate": "--device-map auto, .gguf models",
    "gguf": ".gguf models",
    "datasets": "hf: texts",
    "matplotlib": "figures of the report",
    "cupy": "fused kernels",
    "lm-eval": "eval gsm8k, mmlu-pro, math-500, longbench",
    "math-verify": "eval math-500",
}
_CUPY = ("cupy-cuda12x", "cupy-cuda13x", "cupy")
# below this a run of a small model does not fit
_LEAST_DISK, _LEAST_MEMORY = 1_000_000_000, 2_000_000_000


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. ``state`` is "ok", "absent" (nothing is wrong without it) or "failed"."""

    name: str
    state: str
    detail: str
    seconds: float = 0.0


@dataclass(frozen=True)
class Diagnosis:
    """All findings, in the order they were made."""

    findings: list[Finding]

    @property
    def failed(self) -> list[Finding]:
        """Those that need mending."""
        return [finding for finding in self.findings if finding.state == "failed"]


def diagnose(run: Path) -> Diagnosis:
    """Look at packages, machine and kernels, and run the selftest; about 20 seconds on a CPU.

    Nothing is raised for what is wrong: it is a finding. A failed selftest ends with the step that failed.
    """
    findings = [Finding("aatc", "ok", f"{__version__} on Python {platform.python_version()}"), *_packages()]
    findings += [_disk(run), *([] if _missing(findings) else _machine())]
    if not _missing(findings):
        findings += _selftest()
    return Diagnosis(findings)


def _missing(findings: list[Finding]) -> bool:
    return any(finding.state == "failed" and finding.name in REQUIRED for finding in findings)


def _packages() -> Iterator[Finding]:
    for name in REQUIRED:
        found = _version(name)
        yield Finding(name, "ok" if found else "failed", found or f"not installed: pip install {name}")
    for name, use in OPTIONAL.items():
        found = _version(name)
        yield Finding(name, "ok" if found else "absent", f"{found} ({use})" if found else f"needed for {use}")


def _version(name: str) -> str | None:
    # one package that is distributed under a name for every version of CUDA
    for distribution in _CUPY if name == "cupy" else (name,):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def _disk(run: Path) -> Finding:
    """Room where the run lies, or will lie."""
    place = run.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    state = "ok" if free >= _LEAST_DISK else "failed"
    return Finding("disk", state, f"{free / 1e9:.1f} GB free in {place}")


def _machine() -> Iterator[Finding]:
    import torch

    from aatc_cli.stages.inspecting.preflight import measure_machine

    machine = measure_machine("cpu")
    state = "ok" if machine.free >= _LEAST_MEMORY else "failed"
    yield Finding("memory", state, f"{machine.free / 1e9:.1f} GB free")
    rate = f"{machine.forward / 1e9:.0f} GFLOP/s in float32, {machine.float64 / 1e9:.0f} in float64"
    yield Finding("cpu", "ok", f"{torch.get_num_threads()} threads, {rate}")
    if not torch.cuda.is_available():
        yield Finding("gpu", "absent", "torch sees no CUDA device")
        yield Finding("kernels", "absent", "they need a CUDA device of compute capability 8 or above")
        return
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    free = torch.cuda.mem_get_info()[0]
    yield Finding("gpu", "ok", f"{', '.join(names)}; {free / 1e9:.1f} GB free, CUDA {torch.version.cuda}")
    yield _kernels()


def _kernels() -> Finding:
    """Compile the decode kernel and compare it with its twin in torch."""
    import torch

    from aatc_cli.config import Geometry, Window
    from aatc_cli.evals.bench.attention import CHECK_BOUND, FusedBench
    from aatc_cli.runtime.kernels.launch import fused_available

    if not fused_available():
        return Finding("kernels", "absent", "pip install 'aatc[cuda]'; compute capability 8 or above")
    geometry = Geometry(layers=1, heads=4, kv_heads=1, head_dim=128, hidden_size=512)
    window = Window(sinks=4, recent=128, flush=64)
    began = time.perf_counter()
    try:
        with working("compiling kernels"):
            bench = FusedBench.of(geometry, window, 2.0, 5e5, 1, 1024, torch.device("cuda"))
            _, error = bench.measure(1)
    except Exception as problem:  # a compiler, a driver or the device itself may fail in ways of their own
        return Finding("kernels", "failed", _told(problem), time.perf_counter() - began)
    state = "ok" if error < CHECK_BOUND else "failed"
    detail = f"compiled; relative error against torch {error:.2g}, bound {CHECK_BOUND:g}"
    return Finding("kernels", state, detail, time.perf_counter() - began)


def _selftest() -> Iterator[Finding]:
    """A finding per step, to the first that fails."""
    with working("selftest: importing"):
        from aatc_cli.stages.selftest import Selftest

    with TemporaryDirectory(prefix="aatc-doctor-") as folder:
        for name, step in Selftest(Path(folder)).steps:
            began = time.perf_counter()
            try:
                with working(f"selftest: {name}"):
                    detail, state = step(), "ok"
            except Exception as problem:  # whatever it is, the user has to see which step it was
                detail, state = _told(problem), "failed"
            yield Finding(f"selftest: {name}", state, detail, time.perf_counter() - began)
            if state == "failed":
                return


def _told(problem: Exception) -> str:
    return problem.message if isinstance(problem, AatcError) else f"{type(problem).__name__}: {problem}"
