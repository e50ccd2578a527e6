"""What collect will cost on this machine, before it runs: products counted from shapes, timed on a few matrices."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from aatc_cli.config import Geometry
from aatc_cli.profiles import ModelProfile
from aatc_cli.stages.inspecting.stats_size import ROWS, stats_bytes

# what collect takes without a profile
SAMPLES, LENGTH = 32, 1024
_SECONDS = 0.1
_SIZE = 1024


@dataclass(frozen=True)
class Work:
    """Floating-point operations and bytes of one collect run over ``tokens`` tokens."""

    tokens: int
    forward: float  # in the model's dtype
    statistics: float  # in float64
    model_bytes: int
    activation_bytes: int
    stats_bytes: int

    @property
    def memory(self) -> int:
        """Bytes at the same time: model, activations, sums and rows."""
        return self.model_bytes + self.activation_bytes + self.stats_bytes


@dataclass(frozen=True)
class Machine:
    """Measured speeds in operations per second, and the bytes of memory that are free."""

    device: str
    forward: float
    float64: float
    free: int


def collect_work(
    model: nn.Module,
    geometry: Geometry,
    samples: int = SAMPLES,
    length: int = LENGTH,
    rows: int = ROWS,
    *,
    itemsize: int = 4,
    below: int = 0,
) -> Work:
    """Operations and memory of collect for ``model``, whose weights need not be there (device meta).

    Every weight of a linear layer in the body takes a product and a sum per token, an expert's only for the tokens it
    is given; attention takes 4 T^2 J D per layer and window. The statistics take 2 N (2 C^2 + J D^2) per compressed
    layer, and 8 N C^2 for itself and each of the ``below`` layers that it is multiplied with.
    """
    tokens = samples * length
    layers = geometry.layers + geometry.sliding_layers
    attention = 4.0 * samples * length**2 * geometry.heads * geometry.head_dim * layers
    sums = 2 * geometry.channels**2 + geometry.heads * geometry.head_dim**2
    sums += 4 * geometry.channels**2 * (below + 1 if below else 0)
    config: Any = model.config
    text = config.get_text_config()
    widest = max(int(getattr(text, "intermediate_size", 0) or 0), geometry.heads * geometry.head_dim)
    return Work(
        tokens=tokens,
        forward=2.0 * tokens * _weights_per_token(model) + attention,
        statistics=2.0 * tokens * geometry.layers * sums,
        model_bytes=itemsize * sum(parameter.numel() for parameter in model.parameters()),
        # a layer's input, its residual and two of its widest products, and the statistics' float64 copies
        activation_bytes=length * (itemsize * (2 * geometry.hidden_size + 2 * widest) + 24 * geometry.channels),
        stats_bytes=stats_bytes(geometry, min(rows, tokens), below),
    )


def _weights_per_token(model: nn.Module) -> float:
    """Weights of the body that one token is multiplied with; embeddings are looked up, the head does not run."""
    config: Any = model.config
    text = config.get_text_config()
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 1
    share = (getattr(text, "num_experts_per_tok", None) or experts) / experts
    body = model.get_decoder() if hasattr(model, "get_decoder") else model  # type: ignore[operator]
    looked_up = {id(module.weight) for module in body.modules() if isinstance(module, nn.Embedding)}
    total = 0.0
    for name, parameter in body.named_parameters():
        if parameter.dim() > 1 and id(parameter) not in looked_up:
            total += parameter.numel() * (share if ".experts." in name else 1.0)
    return total


def measure_machine(device: str | None = None) -> Machine:
    """Speed of matrix products on ``device``, or on the GPU if there is one, and its free memory. Under a second."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    free = torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else _free_memory()
    return Machine(device, _speed(dtype, device), _speed(torch.float64, device), free)


def _speed(dtype: torch.dtype, device: str) -> float:
    left = torch.ones(_SIZE, _SIZE, dtype=dtype, device=device)
    right, done = left.clone(), 0
    left @ right  # the first product also starts threads and libraries

    def clock() -> float:
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter()

    start = clock()
    while (spent := clock() - start) < _SECONDS or not done:
        left @ right
        done += 1
    return 2.0 * _SIZE**3 * done / spent


def _free_memory() -> int:
    """Bytes that can be had without swapping: what the system says is available, or all there is."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            found = dict(line.split(":", 1) for line in lines)
        return int(found["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def seconds(work: Work, machine: Machine) -> float:
    """Time of collect: a model reaches about half the speed of bare products, between them it moves memory."""
    return 2.0 * work.forward / machine.forward + work.statistics / machine.float64


def next_command(reference: str, profile: ModelProfile | None, device: str) -> str:
    """The collect command for this model on this machine."""
    parts = ["aatc collect", *(["--profile", profile.name] if profile else []), "--model", reference]
    return " ".join([*parts, *(["--device", device] if device != "cpu" else [])])
