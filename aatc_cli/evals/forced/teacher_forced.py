"""One forward pass that sees the compressed cache as decode would: exact near, reconstructed far, chosen by a mask.

Query t has t + 1 tokens in its cache. By the window rule (`core.layout.packed_tokens`) the oldest non-sink tokens are
packed in blocks; those it reads reconstructed, its sinks and recent window it reads exactly. All positions are scored
in one pass, which is what sequential decoding would have seen token by token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from aatc_cli.config import Window
from aatc_cli.core import Side
from aatc_cli.core.any_codec import AnyCodec, of_one_vector
from aatc_cli.core.attend import masked_attention
from aatc_cli.core.layout import packed_tokens
from aatc_cli.core.press.state import Pressed
from aatc_cli.errors import AatcError
from aatc_cli.evals.forced.exact_rows import as_held
from aatc_cli.models.adapter import AttentionSite, non_finite, rebias
from aatc_cli.models.attention import AttentionFunction, LayerInputs, attention_override, behind_prompt, scored_logits
from aatc_cli.models.capture import capture
from aatc_cli.runtime.second_pass import Reader

_TILE = 256

Codecs = Sequence[Mapping[Side, AnyCodec]]
Coordinates = Literal["pre-rope", "post-rope"]


@dataclass(frozen=True)
class Method:
    """A compressed cache to evaluate: one codec per layer and side, and the window it keeps exact.

    coordinates: what the codecs are given, keys before RoPE and vectors without projection bias ("pre-rope"), or both
    as the model's own cache holds them. A codec over all layers is the same object in every layer. press: which tokens
    stay, where some do not; reader: reads a prompt a second time, for a press that asks for it.
    """

    name: str
    codecs: Codecs
    window: Window
    coordinates: Coordinates
    press: Pressed | None = None
    reader: Reader | None = None


def method_logits(
    model: torch.nn.Module, sites: list[AttentionSite], method: Method, tokens: Tensor, first: int
) -> Tensor:
    """Logits of positions ``first`` .. T - 2 of a window [1, T] read through the compressed cache. -> [P, V].

    Codecs over all layers take several passes: `evals.forced.chunked`. Those of tiles: `evals.forced.tiles`.
    """
    with attention_override(model, sites, method_attention(method)):
        return scored_logits(model, tokens, first)


def method_attention(method: Method, prompt: int = 0) -> AttentionFunction:
    """The attention of a method that codes every layer and token alike, behind a prefill of ``prompt`` tokens."""

    def attend(inputs: LayerInputs) -> Tensor:
        codecs, inputs = method.codecs[inputs.site.layer], as_held(inputs, method.window)
        k_hat, v_hat = reconstruct(inputs, codecs, method.window.sinks, method.coordinates)
        return mixed_attention(inputs, k_hat, v_hat, method.window, prompt)

    return behind_prompt(prompt, attend)


def reconstruct(
    inputs: LayerInputs, codecs: Mapping[Side, AnyCodec], sinks: int, coordinates: Coordinates
) -> tuple[Tensor, Tensor]:
    """Keys (rotated) and values [B, H, T, D] as the cache would give them back.

    The codecs see the tokens behind the ``sinks``, so that the first they see is the first that is packed, and blocks
    of tokens begin where a cache's do. Raises `AatcError` for keys or values that are not finite, and when re-rotating
    the captured keys does not give the model's own keys, which means that the model's position embedding is not the one
    its architecture is known for.
    """
    check_inputs(inputs)
    heads, dim = inputs.key.shape[1], inputs.key.shape[3]

    def by_head(x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:-1], heads, dim).transpose(1, 2)

    def coded(x: Tensor, side: Side) -> Tensor:
        codec = of_one_vector(codecs[side])
        return torch.cat((x[:, :sinks], codec.reconstruct(x[:, sinks:])), 1)

    if coordinates == "post-rope":
        rows = [x.transpose(1, 2).flatten(2) for x in (inputs.key, inputs.value)]
        return by_head(coded(rows[0], "k")), by_head(coded(rows[1], "v"))
    site = inputs.site
    inputs.once("rotation", lambda: _check_rotation(inputs, by_head(rebias(inputs.k_raw, site.k_bias))))
    k_hat = by_head(rebias(coded(inputs.k_raw, "k"), site.k_bias))
    v_hat = by_head(rebias(coded(inputs.v_raw, "v"), site.v_bias))
    return inputs.rotate(k_hat), v_hat


def mixed_attention(inputs: LayerInputs, k_hat: Tensor, v_hat: Tensor, window: Window, start: int = 0) -> Tensor:
    """Causal attention over exact sinks and window and reconstructed rest, in tiles of queries.

    Of the queries from ``start`` on: [B, Hq, T - start, D].
    """
    parts = []
    for tile, queries in query_tiles(window, inputs, start):
        parts.append(tile_attention(tile, inputs, queries, (inputs.key, inputs.value), (k_hat, v_hat)))
    return torch.cat(parts, dim=2)


def query_tiles(window: Window, inputs: LayerInputs, start: int = 0) -> Iterator[tuple[Tile, Tensor]]:
    """Queries [B, Hq, n, D] of one layer from ``start`` on in tiles, and what each tile reads."""
    tiles = _tiles(window, start, inputs.query.shape[2], inputs.sliding_window, inputs.query.device)
    return zip(tiles, torch.split(inputs.query[:, :, start:], _TILE, dim=2), strict=True)


def tile_attention(
    tile: Tile, inputs: LayerInputs, queries: Tensor, exact: tuple[Tensor, Tensor], hats: tuple[Tensor, Tensor]
) -> Tensor:
    """Attention of the tile's queries over exact keys and values [B, H, T, D] and reconstructed ones, as it says."""
    keys, values = (
        torch.cat((full[:, :, : tile.sinks], hat[:, :, tile.far], full[:, :, tile.near]), dim=2)
        for full, hat in zip(exact, hats, strict=True)
    )
    site = inputs.site
    return masked_attention(queries, keys, values, tile.allowed, inputs.scaling, sinks=site.sinks, softcap=site.softcap)


@dataclass(frozen=True)
class Tile:
    """What a tile of queries reads: exact sinks, reconstructed ``far`` tokens, exact ``near`` ones; who sees what."""

    sinks: int
    far: slice
    near: slice
    allowed: Tensor  # [queries, sinks + far + near]


# the same for every layer of a pass on one device, and for every pass over windows of one length
@lru_cache(maxsize=32)
def _tiles(window: Window, start: int, length: int, sliding: int | None, device: torch.device) -> tuple[Tile, ...]:
    starts = range(start, length, _TILE)
    return tuple(make_tile(window, start, min(start + _TILE, length), sliding, device) for start in starts)


def make_tile(window: Window, start: int, end: int, sliding: int | None, device: torch.device) -> Tile:
    """The tile of the queries ``start`` .. ``end`` - 1."""
    places = torch.arange(end)
    sinks = min(window.sinks, end)
    near_from = window.sinks + packed_tokens(start + 1, window)
    # more sinks than tokens so far leave nothing to be packed, and nothing behind the end
    far_until = min(window.sinks + packed_tokens(end, window), end)
    far, near = slice(sinks, max(far_until, sinks)), slice(min(near_from, end), end)
    queries = places[start:end, None]
    until = torch.tensor([[window.sinks + packed_tokens(t + 1, window)] for t in range(start, end)])
    # a token between near_from and far_until is packed for the tile's last query and exact for its first: it stands
    # in both parts, and the mask shows every query one of the two
    seen = (places[:sinks] <= queries, places[far] < until, (places[near] >= until) & (places[near] <= queries))
    allowed = torch.cat(seen, dim=1)
    if sliding is not None:
        allowed &= queries - torch.cat((places[:sinks], places[far], places[near])) < sliding
    return Tile(sinks, far, near, allowed.to(device))


def _check_rotation(inputs: LayerInputs, keys: Tensor) -> None:
    """Raise `AatcError` when ``keys`` [B, H, T, D] from before RoPE, rotated again, are not the model's own."""
    site = inputs.site
    if not torch.allclose(inputs.rotate(keys), inputs.key, rtol=2e-2, atol=2e-2 * float(inputs.key.abs().amax())):
        raise AatcError(
            f"the rotary embedding of {site.name} is not the one known of its architecture ({site.rope})",
            "load the model with the code of transformers itself",
        )


def check_inputs(inputs: LayerInputs) -> None:
    """`check_rows` of a layer's inputs, once of a prompt that many methods read: asking makes a GPU wait."""
    inputs.once("finite", lambda: check_rows(inputs.site.layer, inputs.k_raw, inputs.v_raw))


def check_rows(layer: int, keys: Tensor, values: Tensor, first: int = 0) -> None:
    """Raise `AatcError` naming layer and token of the first keys or values [B, T, C] that are not finite.

    ``first`` is the number of the first token given.
    """
    for what, rows in (("keys", keys), ("values", values)):
        bad = non_finite(rows)
        if bad is not None:
            raise AatcError(
                f"the {what} of layer {layer} are not finite at token {first + bad[1]}",
                "run with --dtype float32 or bfloat16; float16 overflows in some models",
            )


def check_model_rows(model: torch.nn.Module, sites: list[AttentionSite], tokens: Tensor) -> None:
    """Raise `AatcError`, as `check_rows`, for the model's own keys and values of a window [1, T]."""
    with capture(sites, lambda layer, q, k, v: check_rows(layer, k, v)):
        scored_logits(model, tokens, tokens.shape[1] - 2)


def check_finite(logits: Tensor, name: str, window: int) -> None:
    """Raise `AatcError` naming the method, window and first position whose logits are not finite."""
    bad = ~torch.isfinite(logits).all(-1)
    if bool(bad.any()):
        raise AatcError(
            f"{name}: logits are not finite in window {window}, scored position {int(bad.nonzero()[0])}",
            "run with --dtype float32; if it persists, the statistics do not fit this model",
        )
