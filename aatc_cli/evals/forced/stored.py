"""Teacher-forced evaluation of the storage code: one pass, each layer coded from what is decoded of those below.

Classes are told apart by the attention that tokens received from exact rows, as after a prefill: whoever stores a
prefix holds all of it exactly, and a reader takes the classes from the codes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aatc_cli.config import Window
from aatc_cli.core import Side
from aatc_cli.core.attend import masked_attention
from aatc_cli.core.layout import packed_tokens
from aatc_cli.core.received import received_by_head
from aatc_cli.core.stored_layer import AnyCodes, StoredLayer
from aatc_cli.core.stored_rate import RateControl
from aatc_cli.core.tile_rule import TileRule
from aatc_cli.evals.forced.exact_rows import as_held
from aatc_cli.evals.forced.teacher_forced import check_rows, query_tiles
from aatc_cli.models.adapter import rebias
from aatc_cli.models.attention import AttentionFunction, LayerInputs, behind_prompt

# told of every layer: its codes, their classes [B, orders, P] and the vectors [B, P, 2 C] that they decode to
OnCoded = Callable[[int, AnyCodes, Tensor, Tensor], None]


@dataclass
class Spent:
    """Bits that the codes of a window took, of layers whose codes have no fixed size, and numbers that were coded."""

    bits: float = 0.0
    numbers: int = 0

    def per_number(self) -> float | None:
        """Bits of a packed number with all that goes with it; None where the plan says it."""
        return self.bits / self.numbers if self.numbers else None


def stored_layers(codecs: Sequence[Mapping[Side, object]]) -> list[StoredLayer]:
    """The layers of a method that is a storage code."""
    found = []
    for layer in codecs:
        stored = layer["k"]
        assert isinstance(stored, StoredLayer)
        found.append(stored)
    return found


def stored_attention(
    layers: Sequence[StoredLayer],
    window: Window,
    on_coded: OnCoded | None = None,
    prompt: int = 0,
    spent: Spent | None = None,
) -> AttentionFunction:
    """The attention of a stored cache in one pass over all layers, behind a prefill of ``prompt`` tokens.

    Codes without a fixed size take the bits of their plan in every chunk (`core.stored_rate`), which ``spent`` is told.
    """
    below: deque[Tensor] = deque(maxlen=max(1, *(layer.maps.layers for layer in layers)))
    control: list[RateControl] = []

    def attend(inputs: LayerInputs) -> Tensor:
        layer, held = inputs.site.layer, as_held(inputs, window)
        if not layer:
            below.clear()
            if layers[0].variable and not control:
                control.append(RateControl(layers, held.key.shape[1]))
        check_rows(layer, held.k_raw, held.v_raw)
        packed = slice(window.sinks, window.sinks + packed_tokens(held.query.shape[2], window))
        classes = classes_in(held, layers[layer].rule, window, packed)
        rows = torch.cat((held.k_raw, held.v_raw), -1)[:, packed].to(layers[layer].codes[0].encode.dtype)
        lower = [each.to(rows.device) for each in below]
        codes: AnyCodes
        if control and rows.shape[1]:
            codes, decoded = control[0].encode(layer, rows, lower, classes)
            if spent is not None and layer == len(layers) - 1:
                spent.bits += float(control[0].bits.sum())
                spent.numbers += len(layers) * decoded.numel()
        else:
            codes, decoded = layers[layer].encode(rows, lower, classes)
        below.appendleft(decoded)
        whole = layers[layer].placed(decoded)
        if on_coded is not None:
            on_coded(layer, codes, classes, whole)
        return _read(held, layers[layer], whole, classes, window, prompt)

    return behind_prompt(prompt, attend)


def classes_in(inputs: LayerInputs, rule: TileRule, window: Window, packed: slice) -> Tensor:
    """Classes [B, orders, P] of the tokens in ``packed`` by what they received from exact rows."""
    site = inputs.site
    received = received_by_head(
        inputs.query,
        inputs.key,
        inputs.scaling,
        rule.lags(window.recent),
        sliding=inputs.sliding_window,
        sinks=site.sinks,
        softcap=site.softcap,
    )
    by_order = received if rule.order == "head" else received.sum(1, keepdim=True)
    return rule.classes_of(by_order[..., packed], 0, site.layer)


def _read(
    inputs: LayerInputs, layer: StoredLayer, decoded: Tensor, classes: Tensor, window: Window, start: int
) -> Tensor:
    """Attention of the queries from ``start`` on over exact sinks and window and decoded vectors [B, P, 2 C]."""
    packed = slice(window.sinks, window.sinks + decoded.shape[1])
    site, (heads, dim) = inputs.site, inputs.key.shape[1::2]
    keys, values = (
        torch.unflatten(rebias(part.to(inputs.k_raw.dtype), bias), -1, (heads, dim)).transpose(1, 2)
        for part, bias in zip(decoded.chunk(2, -1), (site.k_bias, site.v_bias), strict=True)
    )
    hats = inputs.key.clone(), inputs.value.clone()
    whole = torch.zeros_like(inputs.key)
    whole[:, :, packed] = keys.to(whole.dtype)
    hats[0][:, :, packed] = inputs.rotate(whole)[:, :, packed]
    hats[1][:, :, packed] = values.to(hats[1].dtype)
    kept = layer.kept()
    seen = None if kept is None else _seen(inputs, kept, classes, packed)
    parts = []
    for tile, queries in query_tiles(window, inputs, start):
        held_keys, held_values = (
            torch.cat((full[:, :, : tile.sinks], hat[:, :, tile.far], full[:, :, tile.near]), 2)
            for full, hat in zip((inputs.key, inputs.value), hats, strict=True)
        )
        allowed = tile.allowed
        if seen is not None:
            exact = seen.new_ones(*seen.shape[:2], tile.near.stop - tile.near.start)
            known = torch.cat((seen[..., : tile.sinks], seen[..., tile.far], exact), -1)
            allowed = allowed & known[:, :, None]
        parts.append(
            masked_attention(
                queries, held_keys, held_values, allowed, inputs.scaling, sinks=site.sinks, softcap=site.softcap
            )
        )
    return torch.cat(parts, 2)


def _seen(inputs: LayerInputs, kept: Tensor, classes: Tensor, packed: slice) -> Tensor:
    """Whether a query head sees a token once it is packed: bool [B, Hq, T]."""
    batch, heads, length = inputs.query.shape[0], inputs.key.shape[1], inputs.query.shape[2]
    of_head = kept.repeat_interleave(heads // kept.shape[1], 1)
    seen = torch.ones(batch, heads, length, dtype=torch.bool, device=classes.device)
    by_head = classes.expand(-1, heads, -1)
    seen[:, :, packed] = of_head[by_head, torch.arange(heads, device=classes.device)[:, None]]
    return seen.repeat_interleave(inputs.query.shape[1] // heads, 1)
