"""A prompt that goes through the model once, and the tokens behind it, read with the cache of any method.

Prompts attend to themselves exactly whatever the cache, so what every layer was given of one is the same for all
methods. Only the tokens behind it go through the model again, method by method.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from aatc_cli.core.joint import LayersCodec
from aatc_cli.evals.forced.chunked import chunked_logits_at
from aatc_cli.evals.forced.passes import attention_over
from aatc_cli.evals.forced.teacher_forced import Method
from aatc_cli.models.adapter import AttentionSite, ExactLayer
from aatc_cli.models.attention import LayerInputs, attention_behind, attention_override, exact_attention
from aatc_cli.models.placement import input_device

# bytes of prompts that are held beside the model
_ROOM, _ROOM_ON_CPU = 16 << 30, 1 << 30


@dataclass(frozen=True)
class SeenPrompts:
    """Prompts [B, P] that the model has seen: its logits [B, V] behind them, and what every layer was given.

    exact: keys and values [B, H, P, D] of the layers that no method codes, by their module.
    """

    tokens: Tensor
    last: Tensor
    layers: tuple[LayerInputs, ...]
    exact: dict[int, tuple[Tensor, Tensor]]

    @classmethod
    @torch.no_grad()
    def of(cls, model: Any, sites: list[AttentionSite], tokens: Tensor) -> SeenPrompts:
        """Put prompts [B, P] through the model."""
        layers: dict[int, LayerInputs] = {}
        exact: dict[int, tuple[Tensor, Tensor]] = {}

        def attend(inputs: LayerInputs) -> Tensor:
            layers[inputs.site.layer] = replace(inputs, seen=int(tokens.shape[1]))
            return exact_attention(inputs.site, inputs.query, inputs.key, inputs.value, inputs.scaling)

        def keep(layer: ExactLayer, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
            exact[id(layer.module)] = key, value
            return exact_attention(layer, query, key, value, scaling)

        with attention_override(model, sites, attend, keep):
            last: Tensor = model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits[:, -1]
        return cls(tokens, last, tuple(layers[layer] for layer in sorted(layers)), exact)

    @property
    def bytes(self) -> int:
        """Of all that is held."""
        held = [
            part for layer in self.layers for part in (layer.query, layer.key, layer.value, layer.k_raw, layer.v_raw)
        ]
        return sum(part.nbytes for part in (*held, *(part for pair in self.exact.values() for part in pair)))

    @torch.no_grad()
    def logits(self, model: Any, sites: list[AttentionSite], method: Method | None, behind: Tensor) -> Tensor:
        """Logits before each of the tokens ``behind`` [B, n] the prompts, of a method or exact. -> [B, n, V]."""
        first = self.last[:, None]
        if behind.shape[1] == 1:
            return first
        prompt, fed = int(self.tokens.shape[1]), behind[:, :-1]
        places = torch.arange(prompt, prompt + fed.shape[1], device=fed.device)
        if method is not None and isinstance(method.codecs[0]["k"], LayersCodec):
            whole = torch.cat((self.tokens, fed), 1)
            return torch.cat((first, chunked_logits_at(model, sites, method, whole, places, prompt, self.layers)), 1)
        function = _plain if method is None else attention_over(model, sites, method, self.tokens)
        with attention_override(model, sites, lambda inputs: function(self._joined(inputs)), self._exact_behind):
            rest: Tensor = model(input_ids=fed, position_ids=places[None], use_cache=False).logits
        return torch.cat((first, rest), 1)

    def _joined(self, inputs: LayerInputs) -> LayerInputs:
        """What a layer is given of the prompt and of the tokens behind it."""
        before = self.layers[inputs.site.layer]
        rows = len(self.tokens)
        return replace(
            before,
            query=torch.cat((before.query, inputs.query), 2),
            key=torch.cat((before.key, inputs.key), 2),
            value=torch.cat((before.value, inputs.value), 2),
            k_raw=torch.cat((before.k_raw, inputs.k_raw), 1),
            v_raw=torch.cat((before.v_raw, inputs.v_raw), 1),
            cos=torch.cat([part.expand(rows, -1, -1) for part in (before.cos, inputs.cos)], 1),
            sin=torch.cat([part.expand(rows, -1, -1) for part in (before.sin, inputs.sin)], 1),
        )

    def _exact_behind(self, layer: ExactLayer, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        keys, values = (
            torch.cat((old, new), 2) for old, new in zip(self.exact[id(layer.module)], (key, value), strict=True)
        )
        return attention_behind(layer, query, keys, values, scaling)


class Shelf:
    """Prompts that the model has seen, of one job, as many as there is room for; others are seen again."""

    def __init__(self, model: Any, sites: list[AttentionSite]) -> None:
        self.model, self.sites = model, sites
        self.kept: dict[int, SeenPrompts] = {}
        self.room = _ROOM if input_device(model).type == "cuda" else _ROOM_ON_CPU

    def seen(self, place: int, tokens: Tensor) -> SeenPrompts:
        """The prompts [B, P] that are called ``place``."""
        if place in self.kept:
            return self.kept[place]
        found = SeenPrompts.of(self.model, self.sites, tokens)
        if found.bytes <= self.room:
            self.kept[place] = found
            self.room -= found.bytes
        return found


def _plain(inputs: LayerInputs) -> Tensor:
    """Exact attention of the tokens behind a prompt."""
    query = inputs.query[:, :, inputs.seen :]
    return attention_behind(inputs.site, query, inputs.key, inputs.value, inputs.scaling)
