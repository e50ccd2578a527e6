"""What the first decoded logits of a packed cache must be: no time is worth anything if the numbers are wrong.

They are compared with those of one pass over all tokens in which the last query reads what the codecs give back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aatc_cli.config import Window
from aatc_cli.core import Side
from aatc_cli.core.any_codec import AnyCodec
from aatc_cli.core.attend import masked_attention
from aatc_cli.core.layout import packed_tokens
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.evals.forced.teacher_forced import reconstruct
from aatc_cli.evals.forced.tiles import tiles_attention
from aatc_cli.models.adapter import attention_sites
from aatc_cli.models.attention import AttentionFunction, LayerInputs, attention_override, exact_attention

# a code on a rounding tie may come out either way, and layers above follow: a fraction of what compression does
_TIES = 0.25
# attention in another order of sums, after some tens of layers, relative to the logits
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}
_ROUNDING_HALF = 5e-2


@torch.no_grad()
def expected_logits(
    model: torch.nn.Module, codecs: Sequence[Mapping[Side, AnyCodec]], window: Window, tokens: Tensor
) -> Tensor:
    """Logits [B, V] behind ``tokens`` [B, T + 1] when the first T are a prompt and the last one is decoded.

    The prompt attends to itself exactly; the last query reads packed tokens as the codecs reconstruct them, those of
    tiles at the rates of their classes.
    """
    first, prompt = codecs[0]["k"], tokens.shape[1] - 1
    tiled: Any = codecs
    attend = (
        tiles_attention(tiled, first.rule, window, None, prompt)
        if isinstance(first, TileCodec)
        else _last_query(codecs, window)
    )
    with attention_override(model, attention_sites(model), attend):
        found: Tensor = model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits[:, -1]
        return found


def _last_query(codecs: Sequence[Mapping[Side, AnyCodec]], window: Window) -> AttentionFunction:
    """Attention whose last query alone reads packed tokens as codecs of single vectors reconstruct them."""

    def attend(inputs: LayerInputs) -> Tensor:
        site, query = inputs.site, inputs.query
        prompt = exact_attention(site, query, inputs.key, inputs.value, inputs.scaling)
        span = slice(window.sinks, window.sinks + packed_tokens(query.shape[2], window))
        k_hat, v_hat = reconstruct(inputs, codecs[site.layer], 0, "pre-rope")
        keys, values = inputs.key.clone(), inputs.value.clone()
        keys[:, :, span], values[:, :, span] = k_hat[:, :, span], v_hat[:, :, span]
        seen = None
        if site.sliding_window is not None:
            distance = query.shape[2] - 1 - torch.arange(query.shape[2], device=query.device)
            seen = (distance < site.sliding_window)[None]
        last = masked_attention(
            query[:, :, -1:], keys, values, seen, inputs.scaling, sinks=site.sinks, softcap=site.softcap
        )
        return torch.cat((prompt[:, :, :-1], last), 2)

    return attend


def check_logits(got: Tensor, expected: Tensor, plain: Tensor) -> tuple[float, float]:
    """RMS difference of ``got`` to ``expected`` and its bound; infinite where anything is not finite. All [B, V].

    plain: logits with the uncompressed cache, which say how much compression changes.
    """
    dtype, (got, expected, plain) = got.dtype, (x.to(torch.float64) for x in (got, expected, plain))
    error, effect, size = (float(x.square().mean().sqrt()) for x in (got - expected, plain - expected, expected))
    bound = max(_TIES * effect, _ROUNDING.get(dtype, _ROUNDING_HALF) * size)
    finite = bool(torch.isfinite(got).all())
    return (error if finite else float("inf")), bound
