"""Watch queries, keys and values before RoPE, layer by layer, without touching modeling code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from aatc_cli.models.adapter import AttentionSite, debias

# called once per layer and forward pass with q, k, v: [B, T, heads * D], [B, T, C], [B, T, C]
OnLayer = Callable[[int, Tensor, Tensor, Tensor], None]


@contextmanager
def capture(sites: list[AttentionSite], on_layer: OnLayer) -> Iterator[None]:
    """Call ``on_layer(layer, q, k, v)`` as each attention layer finishes; hooks are gone when the block ends.

    Keys and values have their projection bias removed; queries keep theirs, since attention reads the whole query.
    Only one layer's tensors are alive at a time.
    """
    seen: dict[str, Tensor] = {}
    handles: list[Any] = []

    def keep(name: str, bias: Tensor | None) -> Callable[[Tensor], None]:
        def take(rows: Tensor) -> None:
            seen[name] = debias(rows, bias).detach()

        return take

    def finish(layer: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            on_layer(layer, seen.pop("q"), seen.pop("k"), seen.pop("v"))

        return hook

    try:
        for site in sites:
            handles.append(site.q.watch(keep("q", None)))
            handles.append(site.k.watch(keep("k", site.k_bias)))
            handles.append(site.v.watch(keep("v", site.v_bias)))
            handles.append(site.module.register_forward_hook(finish(site.layer)))
        yield
    finally:
        for handle in handles:
            handle.remove()
