"""Several processes under torchrun, and the comparison of what they and one process collect."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from aatc_cli.artifacts.artifact import Artifact, open_artifact
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import CollectSettings
from aatc_cli.config import Window
from aatc_cli.models.loading import find_model
from aatc_cli.profiles import TextMixture
from aatc_cli.stages.collect import CollectOptions, collect


def launch(arguments: Sequence[str], run: Path, processes: int, seconds: int = 300) -> subprocess.CompletedProcess[str]:
    """``aatc collect`` in ``processes`` processes; all of them are ended after ``seconds``, and the test fails."""
    # torchrun takes --run for an abbreviation of one of its own options, so the run is named by the environment
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "AATC_RUN": str(run)}
    command = [sys.executable, *launcher, "-m", "aatc_cli", "collect", *arguments]
    # a session of their own: ending torchrun alone would leave its processes waiting for one another
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as started:
        try:
            out, err = started.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            out, err = started.communicate()
            pytest.fail(f"{processes} processes were not done after {seconds} s: {out}{err}")
    return subprocess.CompletedProcess(command, started.returncode, out, err)


def compare(run: Path, other: Path, tolerance: float = 1e-12, gradients: float = 1e-12) -> Artifact:
    """Assert that Stats of ``other`` are those of ``run``: rows equal, sums up to their order; the other Stats.

    ``gradients`` is the tolerance of what loss gradients are summed to.
    """
    one, two = (open_artifact(place / "stats", "stats") for place in (run, other))
    assert two.manifest.results == one.manifest.results
    assert two.manifest.settings == one.manifest.settings
    assert two.manifest.tensors.keys() == one.manifest.tensors.keys()
    for name in one.manifest.tensors:
        expected, got = one.tensor(name), two.tensor(name)
        allowed = gradients if name.endswith(("_fisher", "_ranks")) else tolerance
        if name.endswith(("_rows", "o_gram")) and tolerance <= 1e-12:
            assert torch.equal(got, expected), name
        else:
            assert (got - expected).abs().max() <= allowed * expected.abs().max(), name
            assert expected.abs().max() > 0, name
    return two


@pytest.fixture(scope="session")
def torchrun() -> Callable[..., subprocess.CompletedProcess[str]]:
    return launch


@pytest.fixture(scope="session")
def same_stats() -> Callable[..., Artifact]:
    return compare


@pytest.fixture(scope="session")
def with_gradients(corpus: Path) -> Callable[[Path, Path], Run]:
    """Make a run with the Stats of a tiny model, loss gradients of half its windows, and nothing else."""

    def make(root: Path, model: Path) -> Run:
        run = Run(root / "run")
        settings = CollectSettings(samples=8, length=96, rows=384, fisher=4, window=Window(sinks=2, recent=8, flush=4))
        mixture = TextMixture(sources=[str(corpus)], samples=8, length=96)
        collect(run, "stats", find_model(str(model)), mixture, settings, CollectOptions())
        return run

    return make


@pytest.fixture(scope="session")
def evaluated() -> Callable[..., list[Path]]:
    """Write evaluations of a plan of a run as if they had been measured: KL by name of the text."""
    from aatc_cli.artifacts.evaluation import Evaluation, write_evaluation
    from aatc_cli.artifacts.plan import Plan

    def write(run: Path, name: str, plan: str | None = None, **kl: float) -> list[Path]:
        opened = Plan.open(run / "plans" / name)
        return [
            write_evaluation(
                run / "evals",
                Evaluation(
                    task="kl",
                    recipe=opened.recipe.name,
                    budget=opened.budget.label,
                    model=opened.model.name,
                    plan=plan or opened.digest,
                    bits=opened.mean_bits,
                    bits_at_context=3.8,
                    ratio=4.2,
                    context=64,
                    text=text,
                    text_sha256="s",
                    windows=1,
                    length=64,
                    stride=64,
                    first_position=0,
                    tokens_scored=63,
                    sinks=4,
                    recent=8,
                    flush=4,
                    kl_mean=mean,
                    kl_stderr=0.001,
                    seconds=1.5,
                    device="cpu",
                    dtype="float32",
                    versions={},
                ),
            )
            for text, mean in kl.items()
        ]

    return write
