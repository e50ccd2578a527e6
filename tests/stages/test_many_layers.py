"""Memory of whiten and allocate does not grow with the layers of a model beyond the vectors that an allocation needs.

Both run in a process of their own, whose largest resident set the system counts: whatever holds memory, tensors,
buffers or arrays, is in it.
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
import re, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from aatc_cli.config import make_budget
from aatc_cli.profiles import load_recipe
from aatc_cli.stages.allocate import allocate
from aatc_cli.artifacts.run import Run
from aatc_cli.stages.whiten import Wanted, whiten
run = Run(Path(sys.argv[1]))
whiten(run, transform_stats=run.stats(), rate_stats=run.stats(), wanted=Wanted(transform="identity"))
allocate(run, load_recipe("paper").model_copy(update={"transform": "identity"}), [make_budget(bits=2.0)])
print(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])
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


def peak(run: Path, layers: int) -> float:
    """Largest resident set in MiB of whiten and allocate."""
    make_stats(run, layers)
    done = subprocess.run([sys.executable, "-c", PEAK, str(run)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1]) / 1024


def test_a_layer_at_a_time(tmp_path: Path) -> None:
    matrices = (MANY - FEW) * 2 * 2 * CHANNELS**2 * 4 / 2**20
    assert matrices == 40
    assert peak(tmp_path / "many", MANY) - peak(tmp_path / "few", FEW) < matrices / 2
