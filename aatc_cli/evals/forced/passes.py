"""One pass of any method over windows: the attention that its codecs ask for, and logits of chosen positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from aatc_cli.core.joint import LayersCodec
from aatc_cli.core.stored_layer import StoredLayer
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.evals.forced.chunked import chunked_logits_at
from aatc_cli.evals.forced.pressed import OnKept, choices_ahead, pressed_attention
from aatc_cli.evals.forced.pressed_tiles import pressed_tiles
from aatc_cli.evals.forced.stored import stored_attention, stored_layers
from aatc_cli.evals.forced.teacher_forced import Method, method_attention
from aatc_cli.evals.forced.tiles import OnClasses, tile_codecs, tiles_attention
from aatc_cli.models.adapter import AttentionSite
from aatc_cli.models.attention import AttentionFunction, attention_override, logits_at


def attention_of(method: Method, prompt: int = 0, on_classes: OnClasses | None = None) -> AttentionFunction:
    """The attention of a method that codes layer by layer, behind a prefill of ``prompt`` tokens.

    on_classes: told the classes of packed tokens of every layer, by methods that have some. Raises `ValueError` for
    codecs over all layers, which take several passes.
    """
    codec = method.codecs[0]["k"]
    if isinstance(codec, LayersCodec):
        raise ValueError(f"{method.name} codes all layers together")
    if isinstance(codec, TileCodec):
        return tiles_attention(tile_codecs(method), codec.rule, method.window, on_classes, prompt)
    if isinstance(codec, StoredLayer):
        return stored_attention(stored_layers(method.codecs), method.window, None, prompt)
    return method_attention(method, prompt)


@torch.no_grad()
def forced_logits(
    model: nn.Module,
    sites: list[AttentionSite],
    method: Method,
    tokens: Tensor,
    positions: Tensor,
    prompt: int = 0,
    on_kept: OnKept | None = None,
    on_classes: OnClasses | None = None,
) -> Tensor:
    """Logits of rising ``positions`` [n] of windows [B, T] read through the compressed cache. -> [B, n, V].

    The first ``prompt`` tokens enter the cache in one prefill: they see one another exactly, and what is packed of
    them is packed behind it, as the caches of `runtime` do. Without a prompt every token is decoded by itself. Tokens
    behind the last position change nothing, so windows may be filled up there. on_kept: told by methods with a press
    what is left in every layer; on_classes: by those with classes the ones of packed tokens.
    """
    if isinstance(method.codecs[0]["k"], LayersCodec):
        return chunked_logits_at(model, sites, method, tokens, positions, prompt)
    with attention_override(
        model, sites, attention_over(model, sites, method, tokens[:, :prompt], on_kept, on_classes)
    ):
        return logits_at(model, tokens, positions.to(tokens.device))


def attention_over(
    model: nn.Module,
    sites: list[AttentionSite],
    method: Method,
    prompts: Tensor,
    on_kept: OnKept | None = None,
    on_classes: OnClasses | None = None,
) -> AttentionFunction:
    """As `attention_of`, of methods with a press too, behind prefills of ``prompts`` [B, P]."""
    prompt = int(prompts.shape[1])
    if method.press is None:
        return attention_of(method, prompt, on_classes)
    chosen = choices_ahead(model, sites, method, prompts)
    if isinstance(method.codecs[0]["k"], TileCodec):
        return pressed_tiles(method, prompt, chosen, on_kept, on_classes)
    return pressed_attention(method, prompt, chosen, on_kept)
