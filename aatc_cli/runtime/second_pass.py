"""A second pass over a prompt: what its tokens receive when the model reads it once more, told to repeat it.

Behind the prompt comes an instruction and then a chunk of the prompt again. Of every layer the largest weight is kept
that a query behind the prompt, of any query head of a kv head, pays a token of that chunk; the softmax is over sinks,
the chunk and what stands behind the prompt, with the sum of the squares of all of them. Source: KVzip (2505.23416).
What the prompt's tokens paid one another while it was read first is seen on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from aatc_cli.config import Window
from aatc_cli.core.attend import attention_weights
from aatc_cli.core.layout import packed_tokens
from aatc_cli.core.press.reading import Reading
from aatc_cli.core.press.state import Pressed
from aatc_cli.core.received import received_within
from aatc_cli.core.tile_sizes import TILE
from aatc_cli.models.adapter import AttentionSite
from aatc_cli.models.attention import LayerInputs
from aatc_cli.models.limits import check_length
from aatc_cli.runtime.seen_prompts import SeenPrompts, plain_behind

# the words of the instruction, for the beginning of a prompt and for later parts of it
FIRST_PART, LATER_PART = (
    "\n\nWrite out all of the text above again:\n",
    "\n\nWrite out the text above again from here:\n",
)
# tokens of a chunk, and those of the chunk before that tell where a later one begins
_CHUNK, _LEAD = 2048, 8
# prompts whose second reading is remembered, and tokens of prompts that are read together
_KNOWN, _AT_ONCE = 64, 16384
# queries whose weights are held at once
_TILE = 256

Encode = Callable[[str], list[int]]


def choices_over_layers(readings: Sequence[Reading], pressed: Pressed, window: Window) -> list[Tensor]:
    """What a press that reads prompts twice leaves of one, from `second_reading`, by layer [1, H, P].

    -1 is evicted, others are classes, of which codes without any have the class 0.
    """
    length = int(readings[0].largest.shape[2])
    packed = packed_tokens(length, window)
    places = torch.arange(length, device=readings[0].largest.device)
    among = (places >= window.sinks) & (places < window.sinks + packed)
    return pressed.rule.over_readings(readings, among, packed, pressed)


@dataclass
class Reader:
    """Reads prompts twice with one tokenizer, and remembers those of a batch, which several presses ask for in turn."""

    encode: Encode
    _known: dict[tuple[int, ...], list[Reading]] = field(default_factory=dict)
    _of: tuple[nn.Module, int] | None = None

    def readings(self, model: nn.Module, sites: list[AttentionSite], tokens: Tensor, sinks: int) -> list[list[Reading]]:
        """`second_reading` of every one of the prompts ``tokens`` [B, P], by itself."""
        names = [tuple(row) for row in tokens.tolist()]
        if self._of is None or self._of[0] is not model or self._of[1] != sinks:
            self._known, self._of = {}, (model, sinks)
        fresh = [place for place, name in enumerate(names) if name not in self._known]
        if fresh and len(self._known) + len(fresh) > _KNOWN:
            self._known, fresh = {}, list(range(len(names)))
        size = max(_AT_ONCE // tokens.shape[1], 1)
        for start in range(0, len(fresh), size):
            part = fresh[start : start + size]
            found = second_reading(model, sites, tokens[part], self.encode, sinks)
            for row, place in enumerate(part):
                self._known[names[place]] = [reading.row(row) for reading in found]
        return [self._known[name] for name in names]


@torch.no_grad()
def second_reading(model: Any, sites: list[AttentionSite], tokens: Tensor, encode: Encode, sinks: int) -> list[Reading]:
    """What the tokens of prompts ``tokens`` [B, P] of one length receive in every compressed layer.

    encode: tokens of the instruction. Raises `AatcError` where prompt and second reading together are more than the
    model's context.
    """
    length = int(tokens.shape[1])
    found: list[list[Reading]] = [[] for _ in sites]
    chunks = [slice(start, min(start + _CHUNK, length)) for start in range(0, length, _CHUNK)]
    texts = [_again(tokens, chunk, encode) for chunk in chunks]
    longest = length + max(int(text.shape[1]) for text in texts)
    check_length(longest, model.config, "a prompt of", beside=longest - length)
    # what the prompt's tokens paid one another is the same whichever chunk is read again
    own: list[Tensor] = []

    def held(inputs: LayerInputs) -> LayerInputs:
        own.append(_own(inputs))
        # keys and values are read again, and nothing else: of a long prompt the rest is most of the memory
        query, k_raw, v_raw = (_blank(part) for part in (inputs.query, inputs.k_raw, inputs.v_raw))
        return replace(inputs, query=query, k_raw=k_raw, v_raw=v_raw)

    seen = SeenPrompts.of(model, sites, tokens, held)
    for chunk, text in zip(chunks, texts, strict=True):

        def attend(inputs: LayerInputs, chunk: slice = chunk) -> Tensor:
            layer = inputs.site.layer
            found[layer].append(_reading(inputs, length, chunk, min(sinks, chunk.start), own[layer]))
            return plain_behind(inputs)

        seen.behind(model, sites, text, attend, keep=1)
    return [Reading.joined(parts) for parts in found]


def _again(tokens: Tensor, chunk: slice, encode: Encode) -> Tensor:
    """What is read behind prompts [B, P]: the instruction, some tokens before a later chunk, and the chunk."""
    told = tokens.new_tensor([encode(LATER_PART if chunk.start else FIRST_PART)]).expand(len(tokens), -1)
    return torch.cat((told, tokens[:, max(chunk.start - _LEAD, 0) : chunk.start], tokens[:, chunk]), 1)


def _reading(inputs: LayerInputs, length: int, chunk: slice, sinks: int, own: Tensor) -> Reading:
    """What the tokens of ``chunk`` receive from the queries behind ``length`` tokens, and from those before."""
    query, heads, site = inputs.query[:, :, length:], inputs.key.shape[1], inputs.site
    keys = torch.cat((inputs.key[:, :, :sinks], inputs.key[:, :, chunk], inputs.key[:, :, length:]), 2)
    count, before = int(query.shape[2]), int(keys.shape[2] - query.shape[2])
    places = torch.arange(count, device=query.device)
    best = query.new_zeros(query.shape[0], heads, before - sinks, dtype=torch.promote_types(query.dtype, torch.float32))
    squares = torch.zeros_like(best)
    for start in range(0, count, _TILE):
        part = query[:, :, start : start + _TILE]
        seen = places <= places[start : start + _TILE, None]
        allowed = torch.cat((seen.new_ones(seen.shape[0], before), seen), 1)
        weights = attention_weights(part, keys, allowed, inputs.scaling, sinks=site.sinks, softcap=site.softcap)
        by_head = torch.unflatten(weights[..., sinks:before], 1, (heads, -1))
        best = torch.maximum(best, by_head.amax((2, 3)))
        squares += by_head.square().sum((2, 3))
    return Reading(best, squares, own[..., chunk])


def _blank(like: Tensor) -> Tensor:
    """Zeros in the shape of a tensor that take the memory of one."""
    return like.new_zeros(()).expand(like.shape)


def _own(inputs: LayerInputs) -> Tensor:
    """What the tokens of the prompt receive of one another, of all queries that stand a tile behind: [B, H, P]."""
    site = inputs.site
    return received_within(
        inputs.query,
        inputs.key,
        inputs.value,
        inputs.scaling,
        (TILE, inputs.seen),
        sliding=site.sliding_window,
        sinks=site.sinks,
        softcap=site.softcap,
    )
