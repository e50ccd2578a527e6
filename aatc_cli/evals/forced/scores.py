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
from aatc_cli.evals.forced.chunked import chunked_logits_at
from aatc_cli.evals.forced.passes import attention_of, forced_logits
from aatc_cli.evals.forced.stored import Spent, stored_attention, stored_layers
from aatc_cli.evals.forced.teacher_forced import Method, check_finite, check_model_rows
from aatc_cli.models.adapter import AttentionSite
from aatc_cli.models.attention import attention_override, logits_at, scored_batch
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
        """Mean KL and top-1 agreement with errors over windows, KL of every window, quantiles over positions."""
        windows = [float(kl.mean()) for kl in self.kl]
        mean, stderr = mean_and_stderr(windows)
        top1, top1_stderr = mean_and_stderr([float(agree.to(torch.float64).mean()) for agree in self.agree])
        return {
            "kl_mean": mean,
            "kl_stderr": stderr,
            "kl_windows": windows,
            **quantiles(torch.cat(self.kl)),
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


def quantiles(kl: Tensor) -> dict[str, float]:
    """Quantiles of KL [n] by the name of their field in an `Evaluation`: the greatest value not above each share."""
    ordered = kl.to(torch.float64).sort().values
    last = ordered.numel() - 1
    shares = {"kl_p50": 0.5, "kl_p90": 0.9, "kl_p99": 0.99, "kl_p999": 0.999, "kl_max": 1.0}
    return {name: float(ordered[int(share * last)]) for name, share in shares.items()}


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

    The reference's pass is shared by all methods. prompt: leading tokens of a window that enter the caches in one
    prefill, as `passes.forced_logits` has it. batch: windows that go through the model together.
    """
    results = [Scores() for _ in methods]
    device = input_device(model)
    for start in range(0, windows.shape[0], batch):
        tokens = windows[start : start + batch].to(device)
        reference = scored_batch(model, tokens, first)
        if not bool(torch.isfinite(reference).all()):
            # where it began says more than where it ended; that takes one more pass, and only now
            for index, window in enumerate(tokens, start):
                check_model_rows(model, sites, window[None])
                check_finite(reference[index - start], "reference", index)
        after("reference")
        for method, scores in zip(methods, results, strict=True):
            began = time.perf_counter()
            logits = _logits(model, sites, method, tokens, range(first, tokens.shape[1] - 1), prompt, scores)
            for row, mine in enumerate(logits):
                check_finite(mine, method.name, start + row)
                _compare(scores, reference[row], mine, tokens[row, first + 1 :].to(mine.device))
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
    """Logits [B, n, V] of windows [B, T] at ``positions``."""
    if isinstance(method.codecs[0]["k"], StoredLayer):
        rows = [_stored(model, sites, method, window[None], positions, prompt, scores) for window in tokens]
        return torch.stack(rows)
    if not prompt and method.press is None:
        if isinstance(method.codecs[0]["k"], LayersCodec):
            return chunked_logits_at(model, sites, method, tokens, torch.arange(positions.start, positions.stop))
        with attention_override(model, sites, attention_of(method)):
            return scored_batch(model, tokens, positions.start)
    left, classes = dict[int, Tensor](), dict[int, Tensor]()

    def keep(layer: int, kept: Tensor, packed: int) -> None:
        # of a prompt what came later was not chosen from
        at_end = method.press is not None and method.press.acts == "prompt"
        packed = packed_tokens(prompt, method.window) if at_end else packed
        left[layer] = kept[..., method.window.sinks : method.window.sinks + packed]

    logits = forced_logits(model, sites, method, tokens, torch.tensor(positions), prompt, keep, classes.__setitem__)
    if method.press is not None:
        shares = [_shares(left[layer], classes.get(layer), method.press) for layer in sorted(left)]
        scores.kept += torch.stack(shares, 1).cpu()
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
    """As `_logits` of one window [1, T], of a storage code, whose codes may take bits that no plan says. -> [n, V]."""
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
