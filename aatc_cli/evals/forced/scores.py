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
from aatc_cli.core.stored_layer import StoredLayer
from aatc_cli.evals.forced.chunked import chunked_logits
from aatc_cli.evals.forced.passes import attention_of, forced_logits
from aatc_cli.evals.forced.stored import Spent, stored_attention, stored_layers
from aatc_cli.evals.forced.teacher_forced import Method, check_finite, check_model_rows
from aatc_cli.models.adapter import AttentionSite
from aatc_cli.models.attention import attention_override, logits_at, scored_logits
from aatc_cli.models.placement import input_device

# positions compared at once: bounds the float64 copies of a large vocabulary
_POSITIONS = 256


@dataclass
class Scores:
    """Per-position results of one method, one entry per window. kl, nll, nll_reference [P]; agree [P] of 0 and 1.

    bits: that a packed number of a window took, of codes without a fixed size. kept: of methods with a press, the share
    of the packed tokens that is left, by layer and kv head [L, H].
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
        """Shares of the packed tokens that a press left, by layer and kv head; None without one."""
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
) -> list[Scores]:
    """Score every method on every window [n, T] from position ``first`` on; ``after`` is told of each pass done.

    prompt: leading tokens of a window that enter the caches in one prefill, as `passes.forced_logits` has it.
    """
    results = [Scores() for _ in methods]
    device = input_device(model)
    for index, window in enumerate(windows):
        tokens = window[None].to(device)
        reference = scored_logits(model, tokens, first)
        if not bool(torch.isfinite(reference).all()):
            # where it began says more than where it ended; that takes one more pass, and only now
            check_model_rows(model, sites, tokens)
            check_finite(reference, "reference", index)
        after("reference")
        for method, scores in zip(methods, results, strict=True):
            began = time.perf_counter()
            logits = _logits(model, sites, method, tokens, range(first, tokens.shape[1] - 1), prompt, scores)
            check_finite(logits, method.name, index)
            _compare(scores, reference, logits, tokens[0, first + 1 :].to(logits.device))
            scores.seconds += time.perf_counter() - began
            after(method.name)
    return results


def _logits(
    model: nn.Module,
    sites: list[AttentionSite],
    method: Method,
    tokens: Tensor,
    positions: range,
    prompt: int,
    scores: Scores,
) -> Tensor:
    if isinstance(method.codecs[0]["k"], StoredLayer):
        return _stored(model, sites, method, tokens, positions, prompt, scores)
    left: dict[int, Tensor] = {}
    if not prompt and method.press is None:
        if isinstance(method.codecs[0]["k"], LayersCodec):
            return chunked_logits(model, sites, method, tokens, positions.start)
        with attention_override(model, sites, attention_of(method)):
            return scored_logits(model, tokens, positions.start)

    def keep(layer: int, kept: Tensor, packed: int) -> None:
        if method.press is not None and method.press.acts == "prompt":
            # what came later was not chosen from
            packed = packed_tokens(prompt, method.window)
        span = kept[..., method.window.sinks : method.window.sinks + packed]
        left[layer] = span.double().mean((0, 2)).cpu()

    logits = forced_logits(model, sites, method, tokens, torch.tensor(positions), prompt, keep)[0]
    if left:
        scores.kept.append(torch.stack([left[layer] for layer in sorted(left)]))
    return logits


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
    spent = Spent()
    with attention_override(model, sites, stored_attention(layers, method.window, None, prompt, spent)):
        logits = logits_at(model, tokens, torch.tensor(positions, device=tokens.device))[0]
    bits = spent.per_number()
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
