"""Score windows under several methods at once, so that the reference forward pass is shared."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from aatc_cli.core.joint import LayersCodec
from aatc_cli.core.layout import packed_tokens
from aatc_cli.core.metrics import kl_divergence, mean_and_stderr, negative_log_likelihood
from aatc_cli.core.press.state import Pressed
from aatc_cli.core.stored_layer import StoredLayer
from aatc_cli.evals.forced.chunked import chunked_logits
from aatc_cli.evals.forced.passes import attention_of, forced_logits
from aatc_cli.evals.forced.stored import Meter, stored_attention, stored_layers
from aatc_cli.evals.forced.teacher_forced import Method, check_finite, check_model_rows
from aatc_cli.models.adapter import AttentionSite, geometry_of
from aatc_cli.models.attention import attention_override, logits_at, scored_logits
from aatc_cli.models.placement import input_device

# positions compared at once: bounds the float64 copies of a large vocabulary
_POSITIONS = 256


@dataclass
class Scores:
    """Per-position results of one method, one entry per window. kl, nll, nll_reference [P]; agree [P] of 0 and 1.

    bits: that a packed number of a window took, of codes without a fixed size. kept: of methods with a press, the share
    of the packed tokens that is left, by layer and kv head [L, H], or class by class of every head [L, H n].
    """

    kl: list[Tensor] = field(default_factory=list)
    nll: list[Tensor] = field(default_factory=list)
    nll_reference: list[Tensor] = field(default_factory=list)
    agree: list[Tensor] = field(default_factory=list)
    bits: list[float] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    seconds: float = 0.0

    def kl_summary(self) -> dict[str, Any]:
        """Mean KL and top-1 agreement with standard errors over windows, KL of every window, kl_p99 over positions."""
        windows = [float(kl.mean()) for kl in self.kl]
        mean, stderr = mean_and_stderr(windows)
        top1, top1_stderr = mean_and_stderr([float(agree.to(torch.float64).mean()) for agree in self.agree])
        everything = torch.cat(self.kl).to(torch.float64).sort().values
        last = everything.numel() - 1
        return {
            "kl_mean": mean,
            "kl_stderr": stderr,
            "kl_windows": windows,
            "kl_p99": float(everything[int(0.99 * last)]),
            "kl_p999": float(everything[int(0.999 * last)]),
            "top1": top1,
            "top1_stderr": top1_stderr,
        }

    def kept_shares(self) -> list[list[float]] | None:
        """Shares of the packed tokens that a press left, by layer and kv head (and class); None without one."""
        if not self.kept:
            return None
        shares: list[list[float]] = torch.stack(self.kept).to(torch.float64).mean(0).tolist()
        return shares

    def nll_summary(self) -> dict[str, Any]:
        """nll with its standard error over windows, the reference's on the same positions, and both by window."""
        windows = [float(nll.mean()) for nll in self.nll]
        own = [float(nll.mean()) for nll in self.nll_reference]
        mean, stderr = mean_and_stderr(windows)
        return {
            "nll": mean,
            "nll_stderr": stderr,
            "nll_reference": mean_and_stderr(own)[0],
            "nll_windows": windows,
            "nll_reference_windows": own,
            **({"bits_packed": sum(self.bits) / len(self.bits)} if self.bits else {}),
        }


@torch.no_grad()
def score_windows(
    model: nn.Module,
    sites: list[AttentionSite],
    methods: Sequence[Method],
    windows: Tensor,
    first: int,
    after: Callable[[str], None],
    prompt: int = 0,
    batch: int = 1,
) -> list[Scores]:
    """Score every method on every window [n, T] from position ``first`` on; ``after`` is told of each pass done.

    prompt: leading tokens of a window that enter the caches in one prefill, as `passes.forced_logits` has it. batch:
    windows in one pass.
    """
    results = [Scores() for _ in methods]
    device = input_device(model)
    for index, part in zip(range(0, len(windows), batch), torch.split(windows, batch), strict=True):
        tokens = part.to(device)
        reference = _reference(model, tokens, first)
        if not bool(torch.isfinite(reference).all()):
            # where it began says more than where it ended; that takes one more pass, and only now
            check_model_rows(model, sites, tokens)
            check_finite(reference, "reference", index)
        after("reference")
        for method, scores in zip(methods, results, strict=True):
            began = time.perf_counter()
            logits = _logits(model, sites, method, tokens, range(first, tokens.shape[1] - 1), prompt, scores)
            check_finite(logits, method.name, index)
            for own, exact, window in zip(logits, reference, tokens, strict=True):
                _compare(scores, exact, own, window[first + 1 :].to(logits.device))
            scores.seconds += time.perf_counter() - began
            after(method.name)
    return results


def _reference(model: nn.Module, tokens: Tensor, first: int) -> Tensor:
    """The model's own logits [B, P, V] at the scored positions."""
    if tokens.shape[0] == 1:
        return scored_logits(model, tokens, first)[None]
    return logits_at(model, tokens, torch.arange(first, tokens.shape[1] - 1, device=tokens.device))


def _logits(
    model: nn.Module,
    sites: list[AttentionSite],
    method: Method,
    tokens: Tensor,
    positions: range,
    prompt: int,
    scores: Scores,
) -> Tensor:
    """Logits [B, P, V] of windows [B, T]; what codes or presses found of each window goes to ``scores``."""
    if isinstance(method.codecs[0]["k"], StoredLayer):
        rows = [_stored(model, sites, method, window[None], positions, prompt, scores) for window in tokens]
        return torch.stack(rows)
    if not prompt and method.press is None and tokens.shape[0] == 1:
        if isinstance(method.codecs[0]["k"], LayersCodec):
            return chunked_logits(model, sites, method, tokens, positions.start)[None]
        with attention_override(model, sites, attention_of(method)):
            return scored_logits(model, tokens, positions.start)[None]
    left, classes = dict[int, Tensor](), dict[int, Tensor]()

    def keep(layer: int, kept: Tensor, packed: int) -> None:
        # of a prompt what came later was not chosen from
        at_end = method.press is not None and method.press.acts == "prompt"
        packed = packed_tokens(prompt, method.window) if at_end else packed
        left[layer] = kept[..., method.window.sinks : method.window.sinks + packed]

    logits = forced_logits(model, sites, method, tokens, torch.tensor(positions), prompt, keep, classes.__setitem__)
    if method.press is not None:
        shares = [_shares(left[layer], classes.get(layer), method.press) for layer in sorted(left)]
        scores.kept += list(torch.stack(shares, 1).cpu())
    return logits


def _shares(kept: Tensor, classes: Tensor | None, press: Pressed) -> Tensor:
    """Shares of the packed tokens that are left: ``kept`` [B, H, P] -> [B, H], or [B, H n] of a press with classes."""
    each = kept[..., None]
    if press.levels is not None and classes is not None:
        names = torch.arange(press.classes, device=kept.device)
        each = each & (classes[..., : kept.shape[2], None] == names)
    return each.double().mean(2).flatten(1)


def _stored(
    model: nn.Module,
    sites: list[AttentionSite],
    method: Method,
    tokens: Tensor,
    positions: range,
    prompt: int,
    scores: Scores,
) -> Tensor:
    """As `_logits`, of a storage code, whose codes may take bits that no plan says."""
    layers = stored_layers(method.codecs)
    meter = Meter(layers, geometry_of(model.config).kv_heads)
    with attention_override(model, sites, stored_attention(layers, method.window, meter.add, prompt)):
        logits = logits_at(model, tokens, torch.tensor(positions, device=tokens.device))[0]
    bits = meter.per_number()
    scores.bits += [] if bits is None else [bits]
    return logits


def _compare(scores: Scores, reference: Tensor, logits: Tensor, targets: Tensor) -> None:
    parts: list[tuple[Tensor, ...]] = []
    for start in range(0, targets.numel(), _POSITIONS):
        rows = slice(start, start + _POSITIONS)
        parts.append(
            (
                kl_divergence(reference[rows], logits[rows]),
                negative_log_likelihood(logits[rows], targets[rows]),
                negative_log_likelihood(reference[rows], targets[rows]),
                (reference[rows].argmax(-1) == logits[rows].argmax(-1)).to(torch.float32),
            )
        )
    kl, nll, nll_reference, agree = (torch.cat(column).cpu() for column in zip(*parts, strict=True))
    scores.kl.append(kl)
    scores.nll.append(nll)
    scores.nll_reference.append(nll_reference)
    scores.agree.append(agree)
