"""Where q, k, v, o and RoPE are in a model, and a refusal by name where this tool cannot compress its attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from aatc_cli.config import Geometry
from aatc_cli.core.rope import RopeStyle
from aatc_cli.errors import UnsupportedModelError
from aatc_cli.models.architectures import Architecture, architecture_of, supported
from aatc_cli.models.layer_kinds import layer_windows
from aatc_cli.models.placement import at_hand
from aatc_cli.profiles import explain


@dataclass(frozen=True)
class Tap:
    """Where queries, keys or values [B, T, heads * D] can be read: ``rows`` of the output of ``module``."""

    module: nn.Module
    rows: Callable[[Tensor], Tensor]

    def watch(self, seen: Callable[[Tensor], None]) -> RemovableHandle:
        """Call ``seen`` with the rows of every forward pass until the handle is removed."""
        return self.module.register_forward_hook(lambda module, inputs, output: seen(self.rows(output)))


@dataclass(frozen=True)
class AttentionSite:
    """One compressed attention layer: its modules and where keys are read before RoPE (projection, or key norm).

    layer counts compressed layers, place all layers of the model. k_bias and v_bias [C] are what the rows hold beside
    the projection of the input; None after a norm. sinks [J] and softcap as in `core.attend.masked_attention`.
    """

    layer: int
    place: int
    name: str
    module: nn.Module
    q: Tap
    k: Tap
    v: Tap
    o: nn.Linear
    k_bias: Tensor | None
    v_bias: Tensor | None
    normed: bool
    biases: tuple[str, ...]
    rope: RopeStyle
    sliding_window: int | None
    sinks: Tensor | None
    softcap: float | None


@dataclass(frozen=True)
class ExactLayer:
    """A sliding layer beside full ones: its cache is at most ``sliding_window`` tokens and stays as it is."""

    place: int
    name: str
    module: nn.Module
    sliding_window: int
    sinks: Tensor | None
    softcap: float | None


AttentionLayer = AttentionSite | ExactLayer


def geometry_of(config: Any) -> Geometry:
    """Cache geometry from a transformers configuration; raises `UnsupportedModelError` naming what is missing."""
    windows = layer_windows(config)
    text = config.get_text_config()
    heads: int = text.num_attention_heads
    exact = [window for window in windows if window.exact]
    try:
        return Geometry(
            layers=len(windows) - len(exact),
            heads=heads,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
            hidden_size=text.hidden_size,
            sliding_layers=len(exact),
            sliding_window=exact[0].tokens if exact else None,
            full_layers=tuple(place for place, window in enumerate(windows) if exact and not window.exact),
        )
    except ValidationError as error:
        problem = f"the configuration of {config.model_type} describes no attention: {explain(error)}"
        raise UnsupportedModelError(problem, "mend its config.json, or fetch it again") from error


def attention_sites(model: nn.Module) -> list[AttentionSite]:
    """The compressed layers of ``model`` in order; raises `UnsupportedModelError` for one this tool cannot read."""
    return [layer for layer in attention_layers(model) if isinstance(layer, AttentionSite)]


def attention_layers(model: nn.Module) -> list[AttentionLayer]:
    """All attention layers of ``model`` in order; raises `UnsupportedModelError` for one this tool cannot read."""
    config: Any = model.config
    geometry, windows = geometry_of(config), layer_windows(config)
    facts = architecture_of(config)
    found: dict[int, tuple[str, Any]] = {}
    for name, module in model.named_modules():
        place = getattr(module, "layer_idx", None)
        if isinstance(place, int) and isinstance(getattr(module, facts.output, None), nn.Linear):
            found[place] = (name, module)
    if sorted(found) != list(range(len(windows))):
        problem = f"{len(found)} of its {len(windows)} layers have an attention with {facts.output}"
        raise UnsupportedModelError(f"{config.model_type} is not supported: {problem}", supported())
    layers: list[AttentionLayer] = []
    sites = 0
    for place, window in enumerate(windows):
        name, module = found[place]
        extras = _extras(module, facts)
        if window.exact:
            assert window.tokens is not None
            layers.append(ExactLayer(place, name, module, window.tokens, *extras))
        else:
            mixed = geometry.sliding_layers > 0
            rope = facts.rope_full if facts.rope_full is not None and (mixed or window.tokens is None) else facts.rope
            layers.append(_site(sites, place, (name, module), facts, geometry, rope, window.tokens, extras))
            sites += 1
    return layers


def _extras(module: Any, facts: Architecture) -> tuple[Tensor | None, float | None]:
    with at_hand(module):
        sinks = getattr(module, facts.sinks).detach() if facts.sinks else None
    return sinks, getattr(module, facts.softcap) if facts.softcap else None


def _site(
    layer: int,
    place: int,
    attention: tuple[str, Any],
    facts: Architecture,
    geometry: Geometry,
    rope: RopeStyle,
    window: int | None,
    extras: tuple[Tensor | None, float | None],
) -> AttentionSite:
    name, module = attention
    taps: dict[str, Tap] = {}
    biases: dict[str, Tensor | None] = {}
    for part, heads in (("q", geometry.heads), ("k", geometry.kv_heads), ("v", geometry.kv_heads)):
        linear = getattr(module, facts.fused or f"{part}_proj", None)
        width = _width(facts, geometry, heads)
        if not isinstance(linear, nn.Linear) or linear.out_features != width:
            what = f"{name}.{facts.fused or part + '_proj'}"
            raise UnsupportedModelError(f"{what} does not give {width} numbers per token", supported())
        rows = _slice(part, facts, geometry)
        taps[part] = Tap(linear, rows)
        with at_hand(linear):
            biases[part] = None if linear.bias is None else rows(linear.bias)
    with_bias = tuple(part for part, bias in biases.items() if bias is not None)
    norms = {part: getattr(module, norm, None) for part, norm in zip("qk", facts.norms, strict=True)}
    for part, norm in norms.items():
        if norm is not None:
            taps[part] = Tap(norm, _heads_first if facts.heads_first else flatten_heads)
    normed = norms["k"] is not None
    return AttentionSite(
        layer=layer,
        place=place,
        name=name,
        module=module,
        q=taps["q"],
        k=taps["k"],
        v=taps["v"],
        o=getattr(module, facts.output),
        k_bias=None if normed else biases["k"],
        v_bias=biases["v"],
        normed=normed,
        biases=with_bias,
        rope=rope,
        sliding_window=window,
        sinks=extras[0],
        softcap=extras[1],
    )


def _width(facts: Architecture, geometry: Geometry, heads: int) -> int:
    if facts.projections == "separate":
        return heads * geometry.head_dim
    return (geometry.heads + 2 * geometry.kv_heads) * geometry.head_dim


def _slice(part: str, facts: Architecture, geometry: Geometry) -> Callable[[Tensor], Tensor]:
    """From the last dimension of a projection's output, or from its bias, to the rows of one part."""
    dim, q_end = geometry.head_dim, geometry.heads * geometry.head_dim
    if facts.projections == "by-head":
        index = "qkv".index(part)
        return lambda x: torch.unflatten(x, -1, (geometry.heads, 3, dim))[..., index, :].flatten(-2)
    if facts.projections == "stacked":
        k_end = q_end + geometry.channels
        span = {"q": slice(0, q_end), "k": slice(q_end, k_end), "v": slice(k_end, k_end + geometry.channels)}[part]
        return lambda x: x[..., span]
    return lambda x: x


def flatten_heads(x: Tensor) -> Tensor:
    """A hooked projection [B, T, C] or norm [B, T, H, D] as rows [B, T, C]."""
    return x if x.dim() == 3 else x.flatten(2)


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def debias(x: Tensor, bias: Tensor | None) -> Tensor:
    """The part of a projection's output that depends on its input: K = XW + b gives XW."""
    return x if bias is None else x - bias


def rebias(x: Tensor, bias: Tensor | None) -> Tensor:
    """Inverse of `debias`."""
    return x if bias is None else x + bias


def non_finite(x: Tensor) -> tuple[int, int] | None:
    """(sequence, position) of the first NaN or infinity in ``x`` [B, T, ...], or None."""
    if bool(torch.isfinite(x).all()):
        return None
    bad = (~torch.isfinite(x)).flatten(2).any(-1).nonzero()[0]
    return int(bad[0]), int(bad[1])
