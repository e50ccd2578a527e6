"""Memory of whiten and allocate does not grow with the layers of a model beyond the vectors that an allocation needs.

Each run is a process of its own, forked from one that has everything imported; the system counts its largest resident
set: whatever holds memory, tensors, buffers or arrays, is in it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from aatc_cli.artifacts.artifact import ArtifactWriter
from aatc_cli.artifacts.manifest import ModelIdentity
from aatc_cli.artifacts.stats import CollectSettings
from aatc_cli.config import Geometry
from aatc_cli.core.stats import LayerStats
from aatc_cli.profiles import dump

CHANNELS, DIM, ROWS = 256, 64, 32
FEW, MANY = 8, 48
PEAK = """
import os, re, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from aatc_cli.config import make_budget
from aatc_cli.profiles import load_recipe
from aatc_cli.stages.allocate import allocate
from aatc_cli.artifacts.run import Run
from aatc_cli.stages.whiten import Wanted, whiten
for folder in sys.argv[1:]:
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        continue
    run = Run(Path(folder))
    whiten(run, transform_stats=run.stats(), rate_stats=run.stats(), wanted=Wanted(transform="identity"))
    allocate(run, load_recipe("paper").model_copy(update={"transform": "identity"}), [make_budget(bits=2.0)])
    print(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1], flush=True)
    os._exit(0)
"""

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system counts no resident set")


def make_stats(run: Path, layers: int) -> None:
    """Stats of a model of ``layers`` layers that never was."""
    geometry = Geometry(layers=layers, heads=8, kv_heads=CHANNELS // DIM, head_dim=DIM, hidden_size=512)
    model = ModelIdentity(
        name="many",
        revision=None,
        architecture="llama",
        config_hash="c" * 64,
        weights_fingerprint="w" * 64,
        tokenizer_hash="t" * 64,
        geometry=geometry,
    )
    samples, length = 4, 128
    settings = CollectSettings(samples=samples, length=length, rows=ROWS)
    tokens = samples * (length - settings.skip_first)
    with ArtifactWriter(run / "stats", "stats") as writer:
        for layer in range(layers):
            generator = torch.Generator().manual_seed(layer)
            stats = LayerStats.empty(geometry, ROWS, torch.eye(DIM).expand(geometry.kv_heads, DIM, DIM))
            q, k, v = (torch.randn(64, n, generator=generator) for n in (8 * DIM, CHANNELS, CHANNELS))
            stats.update(q.unflatten(1, (8, DIM)), k, v, torch.arange(ROWS))
            for name, tensor in stats.tensors().items():
                writer.add(f"layers.{layer}.{name}", tensor)
        writer.commit(
            settings=dump(settings), model=model, results={"windows": samples, "tokens": tokens, "fisher_windows": 0}
        )


def peaks(runs: dict[Path, int]) -> list[float]:
    """Largest resident sets in MiB of whiten and allocate of runs with so many layers."""
    for run, layers in runs.items():
        make_stats(run, layers)
    done = subprocess.run([sys.executable, "-c", PEAK, *map(str, runs)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [int(line) / 1024 for line in done.stdout.split()[-len(runs) :]]


def test_a_layer_at_a_time(tmp_path: Path) -> None:
    matrices = (MANY - FEW) * 2 * 2 * CHANNELS**2 * 4 / 2**20
    assert matrices == 40
    few, many = peaks({tmp_path / "few": FEW, tmp_path / "many": MANY})
    assert many - few < matrices / 2
