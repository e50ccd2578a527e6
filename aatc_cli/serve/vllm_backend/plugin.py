"""Entry point of vLLM's general plugins: makes the backend known, and changes nothing for any other backend."""

from __future__ import annotations

from importlib import import_module
from typing import Any

BACKEND = "aatc_cli.serve.vllm_backend.backend.TileBackend"


def register() -> None:
    """Register the backend under the name CUSTOM; its module is imported when somebody chooses it."""
    registry: Any = import_module("vllm.v1.attention.backends.registry")
    registry.register_backend(registry.AttentionBackendEnum.CUSTOM, BACKEND)
