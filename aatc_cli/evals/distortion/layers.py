"""Predicted against measured error of the attention output, per layer, side and width, on a real model.

The theorem prices noise of one head in one decode step. On a model, query heads that share a cache share its noise and
add up in the residual stream, so the prediction couples them (`core.distortion.coupled_*`); the paper's plain sum over
heads is reported beside it. Only what a decode step would read packed is made noisy: not its sinks, not its window.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from aatc_cli.artifacts.evaluation import DistortionRow
from aatc_cli.config import Window
from aatc_cli.core import SIDES, Side
from aatc_cli.core.attend import softmax_with_sinks
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.distortion import coupled_key_distortion, coupled_value_distortion
from aatc_cli.core.layout import packed_tokens
from aatc_cli.core.rope import unapply_rope
from aatc_cli.errors import AatcError
from aatc_cli.evals.forced.teacher_forced import check_rows, mixed_attention
from aatc_cli.models.adapter import AttentionSite, rebias
from aatc_cli.models.attention import LayerInputs, attention_override, scored_logits

UNIFORM_WIDTHS = (2, 3, 4, 6, 8)


@dataclass
class _Sums:
    """Accumulated over queries: predicted, diagonal prediction, measured, and the output's own squared norm."""

    predicted: float = 0.0
    diagonal: float = 0.0
    measured: float = 0.0
    signal: float = 0.0


@dataclass(frozen=True)
class _Step:
    """One decode step of one layer in float64: J query heads, T tokens, D head dim, M model width."""

    weights: Tensor  # [J, T] attention of the exact cache
    query: Tensor  # [J, D] rotated, times the logit scaling
    values: Tensor  # [J, T, M] v_i W_O per head
    output: Tensor  # [J, M] per head; their sum is the attention output
    packed: Tensor  # [T] bool: read from the packed cache
    hidden: Tensor  # [T] bool: behind the layer's sliding window
    sinks: Tensor | None  # [J, 1] logits without a value


@torch.no_grad()
def measure_distortion(
    model: nn.Module,
    sites: list[AttentionSite],
    codecs: list[dict[Side, TransformCodec]],
    window: Window,
    windows: Tensor,
    positions: Sequence[int],
    after: Callable[[], None],
) -> list[DistortionRow]:
    """Rows for every layer, side and width: the plan's own widths and `UNIFORM_WIDTHS`, averaged over queries.

    windows [n, T]; ``positions`` are the query positions measured in every window. Raises `AatcError` for a model that
    caps its scores: the prediction is of scores that are linear in the key.
    """
    if any(site.softcap is not None for site in sites):
        raise AatcError("the distortion of capped attention scores is not predicted", "use aatc eval kl or perplexity")
    table: dict[tuple[int, Side, float, bool], _Sums] = defaultdict(_Sums)

    def attend(inputs: LayerInputs) -> Tensor:
        _measure_layer(inputs, codecs[inputs.site.layer], window, positions, table)
        after()
        return mixed_attention(inputs, inputs.key, inputs.value, window)

    device = next(model.parameters()).device
    for tokens in windows:
        with attention_override(model, sites, attend):
            scored_logits(model, tokens[None].to(device), tokens.numel() - 2)
    return [
        DistortionRow(
            layer=layer,
            side=side,
            bits=bits,
            plan=plan,
            predicted=sums.predicted / sums.signal,
            predicted_diagonal=sums.diagonal / sums.signal,
            measured=sums.measured / sums.signal,
        )
        for (layer, side, bits, plan), sums in sorted(table.items())
    ]


def _measure_layer(
    inputs: LayerInputs,
    codecs: dict[Side, TransformCodec],
    window: Window,
    positions: Sequence[int],
    table: dict[tuple[int, Side, float, bool], _Sums],
) -> None:
    check_rows(inputs.site.layer, inputs.k_raw, inputs.v_raw)
    heads, kv_heads, dim = inputs.query.shape[1], inputs.key.shape[1], inputs.key.shape[3]
    share = heads // kv_heads
    output_rows = inputs.site.o.weight.to(torch.float64).T.reshape(heads, dim, -1)
    keys = inputs.key[0].to(torch.float64).repeat_interleave(share, 0)
    values = torch.einsum("jtd,jdm->jtm", inputs.value[0].to(torch.float64).repeat_interleave(share, 0), output_rows)
    steps = [_step(inputs, keys, values, window, t) for t in positions]
    for side in SIDES:
        codec = codecs[side]
        basis = _head_basis(codec, kv_heads, dim).repeat_interleave(share, 0)
        predict = _key_predictor(inputs, steps, basis) if side == "k" else _value_predictor(steps, basis, output_rows)
        raw = inputs.k_raw[0] if side == "k" else inputs.v_raw[0]
        for bits, plan, trial in _trials(codec):
            noise = trial.noise(raw).to(torch.float64)
            noisy = _reconstructed(inputs, side, trial, kv_heads, dim).repeat_interleave(share, 0)
            if side == "v":
                noisy = torch.einsum("jtd,jdm->jtm", noisy, output_rows)
            sums = table[(inputs.site.layer, side, bits, plan)]
            for index, step in enumerate(steps):
                count = step.packed.numel()
                predicted, diagonal = predict(index, noise[:count] * step.packed[:, None])
                sums.predicted += float(predicted)
                sums.diagonal += float(diagonal)
                sums.measured += _measured(side, step, keys[:, :count], noisy[:, :count])
                sums.signal += float(step.output.sum(0).square().sum())


def _trials(codec: TransformCodec) -> list[tuple[float, bool, TransformCodec]]:
    """(width, is the plan's, codec): the plan's own widths and every uniform one."""
    own = float(codec.bits.to(torch.float64).mean())
    uniform = [(float(b), False, codec.with_bits(torch.full_like(codec.bits, b))) for b in UNIFORM_WIDTHS]
    return [(own, True, codec), *uniform]


# from the index of a decode step and the noise variances [T, C] to (coupled, diagonal) distortion
Predictor = Callable[[int, Tensor], tuple[Tensor, Tensor]]


def _key_predictor(inputs: LayerInputs, steps: list[_Step], basis: Tensor) -> Predictor:
    terms = []
    for step in steps:
        residual = step.values - step.output[:, None]
        gram = torch.einsum("jtm,ktm->tjk", residual, residual)
        terms.append((step.weights, _effective_queries(inputs, step, basis), gram))
    return lambda index, noise: coupled_key_distortion(*terms[index], noise)


def _value_predictor(steps: list[_Step], basis: Tensor, output_rows: Tensor) -> Predictor:
    readout = torch.einsum("jcd,jdm->jcm", basis, output_rows)
    gram = torch.einsum("jcm,kcm->cjk", readout, readout)
    return lambda index, noise: coupled_value_distortion(steps[index].weights, gram, noise)


def _step(inputs: LayerInputs, keys: Tensor, values: Tensor, window: Window, t: int) -> _Step:
    query = inputs.query[0, :, t].to(torch.float64) * inputs.scaling
    hidden = torch.arange(t + 1, device=keys.device) <= t - (inputs.sliding_window or t + 1)
    sinks = None if inputs.site.sinks is None else inputs.site.sinks.to(torch.float64)[:, None]
    weights = _attention(query, keys[:, : t + 1], hidden, sinks)
    seen = values[:, : t + 1]
    packed = torch.zeros(t + 1, dtype=torch.bool, device=keys.device)
    packed[window.sinks : window.sinks + packed_tokens(t + 1, window)] = True
    return _Step(weights, query, seen, torch.einsum("jt,jtm->jm", weights, seen), packed, hidden, sinks)


def _attention(query: Tensor, keys: Tensor, hidden: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax weights [J, T] of rotated, scaled queries [J, D] over keys [J, T, D]."""
    return softmax_with_sinks(torch.einsum("jd,jtd->jt", query, keys).masked_fill(hidden, float("-inf")), sinks)


def _head_basis(codec: TransformCodec, kv_heads: int, dim: int) -> Tensor:
    """Decode rows as every kv head sees them: [H, C, D], zero where a latent belongs to another head group."""
    groups, size, _ = codec.decode.shape
    full = codec.decode.new_zeros(groups, size, groups, size, dtype=torch.float64)
    for group in range(groups):
        full[group, :, group] = codec.decode[group].to(torch.float64)
    return full.reshape(groups * size, kv_heads, dim).transpose(0, 1)


def _effective_queries(inputs: LayerInputs, step: _Step, basis: Tensor) -> Tensor:
    """Latent query of every head for every token: rotate q back by the token's position, then through B. [J, T, C]."""
    count = step.packed.numel()
    tables = (inputs.cos[:1, :count].to(torch.float64), inputs.sin[:1, :count].to(torch.float64))
    turned = unapply_rope(step.query[None, :, None].expand(-1, -1, count, -1), *tables, inputs.site.rope)[0]
    return torch.einsum("jtd,jcd->jtc", turned, basis)


def _reconstructed(inputs: LayerInputs, side: Side, codec: TransformCodec, kv_heads: int, dim: int) -> Tensor:
    """Keys (rotated) or values [H, T, D] as the cache gives them back, in float64."""
    raw, bias = (inputs.k_raw, inputs.site.k_bias) if side == "k" else (inputs.v_raw, inputs.site.v_bias)
    vectors = rebias(codec.reconstruct(raw), bias)
    vectors = vectors.reshape(*vectors.shape[:-1], kv_heads, dim).transpose(1, 2)
    return (inputs.rotate(vectors) if side == "k" else vectors)[0].to(torch.float64)


def _measured(side: Side, step: _Step, keys: Tensor, noisy: Tensor) -> float:
    """Squared norm of the true error of the summed output when the packed tokens are read from the cache."""
    packed = step.packed[None, :, None]
    if side == "k":
        mixed = torch.where(packed, noisy, keys)
        weights = _attention(step.query, mixed, step.hidden, step.sinks)
        output = torch.einsum("jt,jtm->jm", weights, step.values)
    else:
        output = torch.einsum("jt,jtm->jm", step.weights, torch.where(packed, noisy, step.values))
    return float((output - step.output).sum(0).square().sum())
