"""Teacher-forced evaluation of presses: every query sees what decoding would have left in its cache.

A prompt attends to itself exactly. When it ends, and later whenever a block leaves the window, the press says which of
the packed tokens stay; between two flushes all queries see the same tokens. What is told to the press, and in which
order, is what the simulated cache tells it (`runtime.pressed.store`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from aatc_cli.config import Window
from aatc_cli.core.attend import attention_weights, weighted_values
from aatc_cli.core.layout import packed_tokens
from aatc_cli.core.press.seen import LayerFacts, Prompt, step_angles
from aatc_cli.core.press.state import Pressed, PressState
from aatc_cli.errors import AatcError
from aatc_cli.evals.forced.teacher_forced import Method, reconstruct
from aatc_cli.models.adapter import AttentionSite
from aatc_cli.models.attention import AttentionFunction, LayerInputs, exact_attention
from aatc_cli.runtime.second_pass import choices_over_layers

# told of every layer: the tokens [B, H, T] that are left, and how many are packed
OnKept = Callable[[int, Tensor, int], None]


def pressed_attention(
    method: Method, prompt: int, chosen: Sequence[Tensor] = (), on_kept: OnKept | None = None
) -> AttentionFunction:
    """The attention of a method with a press over texts whose first ``prompt`` tokens are a prefill.

    chosen: what a press that reads prompts twice leaves of them, by layer [B, H, prompt].
    """
    pressed = method.press
    assert pressed is not None

    def attend(inputs: LayerInputs) -> Tensor:
        (batch, heads), layer = inputs.key.shape[:2], inputs.site.layer
        state = PressState.empty(pressed, method.window, (batch, heads), inputs.key.device, layer)
        state.chosen = chosen[layer] if chosen else None
        hats = reconstruct(inputs, method.codecs[layer], method.window.sinks, method.coordinates)
        out = _Decoding(inputs, method.window, facts_of(inputs.site, inputs.scaling, pressed), state, hats).run(prompt)
        if on_kept is not None:
            on_kept(layer, state.kept, state.packed)
        return out

    return attend


def choices_ahead(model: nn.Module, sites: list[AttentionSite], method: Method, prompts: Tensor) -> list[Tensor]:
    """What a press that reads prompts twice leaves of ``prompts`` [B, P], by layer [B, H, P]: classes, or -1.

    Of others nothing.
    Raises `AatcError` where nobody gave the method the means to ask for the prompt again.
    """
    pressed = method.press
    if pressed is None or not pressed.rule.rereads or not prompts.shape[1]:
        return []
    if method.reader is None:
        raise AatcError(f"press {pressed.rule.name} needs a tokenizer, to ask for the prompt again", "use aatc eval")
    readings = method.reader.readings(model, sites, prompts, method.window.sinks)
    rows = [choices_over_layers(of_prompt, pressed, method.window) for of_prompt in readings]
    return [torch.cat(parts, 0) for parts in zip(*rows, strict=True)]


def facts_of(site: AttentionSite, scaling: float, pressed: Pressed) -> LayerFacts:
    """What a press is told of a layer."""
    output = site.o.weight if pressed.rule.output else None
    return LayerFacts(scaling, site.rope, site.sliding_window, site.sinks, site.softcap, output)


class _Decoding:
    """One layer's way through a text: exact vectors, of which the packed ones are replaced by ``hats``."""

    def __init__(
        self, inputs: LayerInputs, window: Window, facts: LayerFacts, state: PressState, hats: tuple[Tensor, Tensor]
    ) -> None:
        self.inputs, self.window, self.facts, self.state, self.hats = inputs, window, facts, state, hats
        self.held = inputs.key.clone(), inputs.value.clone()

    def run(self, prompt: int) -> Tensor:
        """Attention of all queries, or of those behind a prompt that was seen before, [B, Hq, n, D]."""
        length, parts = int(self.inputs.query.shape[2]), []
        if prompt:
            self._prompt(prompt)
            if not self.inputs.seen:
                parts.append(exact_attention(self.inputs.site, *self._first(prompt), self.inputs.scaling))
        start = prompt
        while start < length:
            self._leave(packed_tokens(start + 1, self.window))
            end = min(self.window.sinks + self.state.packed + self.window.recent, length)
            parts.append(self._decode(start, end))
            start = end
        return torch.cat(parts, 2)

    def _prompt(self, count: int) -> None:
        query, key, _ = self._first(count)
        self.state.see(Prompt(query, key, self.facts, step_angles(self.inputs.cos[0], self.inputs.sin[0])))
        self._leave(packed_tokens(count, self.window))

    def _first(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of the first ``count`` tokens."""
        inputs = self.inputs
        return inputs.query[:, :, :count], inputs.key[:, :, :count], inputs.value[:, :, :count]

    def _leave(self, packed: int) -> None:
        """``packed`` tokens are no longer in the window."""
        before, tokens = self.state.packed, self.state.tokens
        fresh = slice(self.window.sinks + before, self.window.sinks + packed)
        at_end = self.state.pressed.acts == "prompt"
        exact = self.inputs.value
        if packed > before:
            for held, hat in zip(self.held, self.hats, strict=True):
                held[:, :, fresh] = hat[:, :, fresh]
        self.state.settle(packed, self.facts, lambda: (exact if at_end else self.held[1])[:, :, :tokens])

    def _decode(self, start: int, end: int) -> Tensor:
        """Queries ``start`` .. ``end`` - 1, between two flushes."""
        self.state.extend(end - self.state.tokens)
        places = torch.arange(end, device=self.held[0].device)
        lag = places[start:, None] - places
        allowed = (lag >= 0) & self.state.kept[:, :, None, None]
        if self.facts.sliding is not None:
            allowed &= lag < self.facts.sliding
        weights = attention_weights(
            self.inputs.query[:, :, start:end],
            self.held[0][:, :, :end],
            allowed,
            self.facts.scaling,
            sinks=self.facts.sinks,
            softcap=self.facts.softcap,
        )
        self.state.pay(weights)
        return weighted_values(weights, self.held[1][:, :, :end]).to(self.inputs.query.dtype)
