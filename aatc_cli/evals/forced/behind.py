"""A prompt that goes through the model once, and the tokens behind it, read with the cache of any method.

Prompts attend to themselves exactly whatever the cache, so what every layer was given of one is the same for all
methods. Only the tokens behind it go through the model again, method by method.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aatc_cli.core.joint import LayersCodec
from aatc_cli.evals.forced.chunked import chunked_logits_at
from aatc_cli.evals.forced.passes import attention_over
from aatc_cli.evals.forced.teacher_forced import Method
from aatc_cli.models.adapter import AttentionSite
from aatc_cli.models.placement import input_device
from aatc_cli.runtime.seen_prompts import SeenPrompts as Seen
from aatc_cli.runtime.seen_prompts import plain_behind

# bytes of prompts that are held beside the model: of a GPU at most a third of what is free
_ROOM, _ROOM_ON_CPU = 32 << 30, 1 << 30


class SeenPrompts(Seen):
    """Prompts that the model has seen, and what it says behind them with the cache of a method."""

    @torch.no_grad()
    def logits(self, model: Any, sites: list[AttentionSite], method: Method | None, behind: Tensor) -> Tensor:
        """Logits before each of the tokens ``behind`` [B, n] the prompts, of a method or exact. -> [B, n, V]."""
        first = self.last[:, None]
        if behind.shape[1] == 1:
            return first
        prompt, fed = int(self.tokens.shape[1]), behind[:, :-1]
        if method is not None and isinstance(method.codecs[0]["k"], LayersCodec):
            whole = torch.cat((self.tokens, fed), 1)
            places = torch.arange(prompt, prompt + fed.shape[1], device=fed.device)
            return torch.cat((first, chunked_logits_at(model, sites, method, whole, places, prompt, self.layers)), 1)
        function = plain_behind if method is None else attention_over(model, sites, method, self.tokens)
        return torch.cat((first, self.behind(model, sites, fed, function)), 1)


class Shelf:
    """Prompts that the model has seen, of one job, as many as there is room for; others are seen again."""

    def __init__(self, model: Any, sites: list[AttentionSite]) -> None:
        self.model, self.sites = model, sites
        self.kept: dict[int, SeenPrompts] = {}
        device = input_device(model)
        self.room = min(_ROOM, torch.cuda.mem_get_info(device)[0] // 3) if device.type == "cuda" else _ROOM_ON_CPU

    def seen(self, place: int, tokens: Tensor) -> SeenPrompts:
        """The prompts [B, P] that are called ``place``."""
        if place in self.kept:
            return self.kept[place]
        found = SeenPrompts.of(self.model, self.sites, tokens)
        if found.bytes <= self.room:
            self.kept[place] = found
            self.room -= found.bytes
        return found
