"""Prompts that the model has seen: what every layer was given of them, and passes of tokens that stand behind.

A prompt attends to itself exactly whatever reads it later, so it need not go through the model again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from aatc_cli.models.adapter import AttentionSite, ExactLayer
from aatc_cli.models.attention import LayerInputs, attention_behind, attention_override, exact_attention


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
    def of(
        cls,
        model: Any,
        sites: list[AttentionSite],
        tokens: Tensor,
        held: Callable[[LayerInputs], LayerInputs] = lambda inputs: inputs,
    ) -> Self:
        """Put prompts [B, P] through the model. held: what is held of that which a layer was given; all of it."""
        layers: dict[int, LayerInputs] = {}
        exact: dict[int, tuple[Tensor, Tensor]] = {}

        def attend(inputs: LayerInputs) -> Tensor:
            layers[inputs.site.layer] = held(replace(inputs, seen=int(tokens.shape[1])))
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
    def behind(
        self,
        model: Any,
        sites: list[AttentionSite],
        tokens: Tensor,
        attend: Callable[[LayerInputs], Tensor],
        keep: int = 0,
    ) -> Tensor:
        """Logits of the last ``keep`` (0: all) of ``tokens`` [B, n] that stand behind the prompts. -> [B, n, V].

        attend: the attention [B, Hq, n, D] of these tokens, from what a layer is given of prompts and tokens together.
        """
        length = int(self.tokens.shape[1])
        places = torch.arange(length, length + tokens.shape[1], device=tokens.device)
        with attention_override(model, sites, lambda inputs: attend(self._joined(inputs)), self._exact_behind):
            logits: Tensor = model(
                input_ids=tokens, position_ids=places[None], use_cache=False, logits_to_keep=keep
            ).logits
        return logits

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


def plain_behind(inputs: LayerInputs) -> Tensor:
    """Exact attention of the tokens behind a prompt."""
    query = inputs.query[:, :, inputs.seen :]
    return attention_behind(inputs.site, query, inputs.key, inputs.value, inputs.scaling)
