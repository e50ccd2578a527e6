"""The engines of this process: one for every model that vLLM has made with the backend."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from aatc_cli.serve.vllm_backend.engine import TileEngine
from aatc_cli.serve.vllm_backend.numbers import in_float32
from aatc_cli.serve.vllm_backend.start import open_engine

_SERVED: dict[int, Served] = {}


@dataclass
class Served:
    """A `TileEngine`, vLLM's attention layers by name, and the model runner, known from its first step on."""

    engine: TileEngine
    layers: Any
    runner: Any = None
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        numbered = [(int(found[1]), name) for name in self.layers if (found := re.search(r"layers\.(\d+)\.", name))]
        self.names = [name for _, name in sorted(numbered)]

    def page_bytes(self, name: str) -> int:
        """Bytes of a block of the layer of this name."""
        return self.engine.page_bytes[self.names.index(name)]

    def bind(self) -> None:
        """Tell the engine where the blocks of its layers are now."""
        self.engine.caches = [_tensor(self.layers[name].kv_cache) for name in self.names]


def served_of(config: Any) -> Served:
    """What serves a vLLM configuration, opened at the first call; raises as `open_engine`."""
    layers = config.compilation_config.static_forward_context
    found = _SERVED.get(id(layers))
    if found is None:
        device = torch.empty(0, device=config.device_config.device).device
        with in_float32():
            found = _SERVED[id(layers)] = Served(open_engine(config, device), layers)
    return found


def known(config: Any) -> Served | None:
    """What serves a vLLM configuration, if its backend has opened it."""
    return _SERVED.get(id(config.compilation_config.static_forward_context))


def _tensor(cache: Any) -> Tensor:
    found: Tensor = cache[0] if isinstance(cache, (list, tuple)) else cache
    return found
