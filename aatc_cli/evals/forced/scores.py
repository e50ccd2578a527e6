"""Score windows under several methods at once, so that the reference forward pass is shared."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from aatc_cli.core.joint import LayersCodec
from aatc_cli.core.metrics import kl_divergence, mean_and_stderr, negative_log_likelihood
from aatc_cli.evals.forced.chunked import chunked_logits
from aatc_cli.evals.forced.passes import attention_of
from aatc_cli.evals.forced.teacher_forced import Method, check_finite, check_model_rows
from aatc_cli.models.adapter import AttentionSite
from aatc_cli.models.attention import attention_override, scored_logits
from aatc_cli.models.placement import input_device

# positions compared at once: bounds the float64 copies of a large vocabulary
_POSITIONS = 256


@dataclass
class Scores:
    """Per-position results of one method, one entry per window. kl, nll, nll_reference [P]; agree [P] of 0 and 1."""

    kl: list[Tensor] = field(default_factory=list)
    nll: list[Tensor] = field(default_factory=list)
    nll_reference: list[Tensor] = field(default_factory=list)
    agree: list[Tensor] = field(default_factory=list)
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
        }


@torch.no_grad()
def score_windows(
    model: nn.Module,
    sites: list[AttentionSite],
    methods: Sequence[Method],
    windows: Tensor,
    first: int,
    after: Callable[[str], None],
) -> list[Scores]:
    """Score every method on every window [n, T] from position ``first`` on; ``after`` is told of each pass done."""
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
            logits = _logits(model, sites, method, tokens, first)
            check_finite(logits, method.name, index)
            _compare(scores, reference, logits, tokens[0, first + 1 :].to(logits.device))
            scores.seconds += time.perf_counter() - began
            after(method.name)
    return results


def _logits(model: nn.Module, sites: list[AttentionSite], method: Method, tokens: Tensor, first: int) -> Tensor:
    if isinstance(method.codecs[0]["k"], LayersCodec):
        return chunked_logits(model, sites, method, tokens, first)
    with attention_override(model, sites, attention_of(method)):
        return scored_logits(model, tokens, first)


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
