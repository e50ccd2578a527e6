"""What was decoded with a live cache beside one pass of the uncompressed model over the same tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from aatc_cli.core.metrics import kl_divergence, mean_and_stderr, negative_log_likelihood
from aatc_cli.evals.accumulate.decoding import Stretch
from aatc_cli.evals.accumulate.result import STRETCHES, AccumulateRow
from aatc_cli.evals.accumulate.settings import Way
from aatc_cli.evals.forced.scores import quantiles
from aatc_cli.evals.forced.teacher_forced import check_finite
from aatc_cli.models.attention import logits_at

# positions whose logits are compared at once, in float64
_AT_ONCE = 256


@dataclass
class Compared:
    """Every decoded position of every window: KL, likelihoods and agreement, one tensor [n] a window and stretch."""

    kl: dict[int, list[Tensor]] = field(default_factory=dict)
    nll: dict[int, list[Tensor]] = field(default_factory=dict)
    uncompressed: dict[int, list[Tensor]] = field(default_factory=dict)
    agree: dict[int, list[Tensor]] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, model: object, stretch: Stretch, name: str, first: int) -> None:
        """Score a stretch of the windows from number ``first`` on; raises `AatcError` for logits not finite.

        The uncompressed model reads all tokens so far in one pass, with nothing packed.
        """
        tokens, logits = stretch.tokens, stretch.logits
        length, count = tokens.shape[1], logits.shape[1]
        positions = torch.arange(length - 1 - count, length - 1, device=tokens.device)
        reference = logits_at(model, tokens, positions)
        for row in range(tokens.shape[0]):
            check_finite(logits[row], name, first + row)
            for begin in range(0, count, _AT_ONCE):
                part = slice(begin, begin + _AT_ONCE)
                p, q, right = reference[row, part], logits[row, part], tokens[row, length - count :][part]
                kept = (
                    (self.kl, kl_divergence(p, q)),
                    (self.nll, negative_log_likelihood(q, right)),
                    (self.uncompressed, negative_log_likelihood(p, right)),
                    (self.agree, p.argmax(-1) == q.argmax(-1)),
                )
                for store, values in kept:
                    store.setdefault(first + row, []).append(values.to(torch.float64).cpu())

    def row(self, way: Way) -> AccumulateRow:
        """Means and quantiles of all of it."""
        kl, nll, own, agree = (
            [torch.cat(store[window]) for window in sorted(store)]
            for store in (self.kl, self.nll, self.uncompressed, self.agree)
        )
        windows = [float(each.mean()) for each in kl]
        mean, stderr = mean_and_stderr(windows)
        change, change_stderr = mean_and_stderr([float((a - b).mean()) for a, b in zip(nll, own, strict=True)])
        by_place = torch.stack(kl).mean(0)
        return AccumulateRow(
            way=way,
            tokens=sum(each.numel() for each in kl),
            kl_mean=mean,
            kl_stderr=stderr,
            kl_windows=windows,
            **quantiles(torch.cat(kl)),
            stretches=[float(part.mean()) for part in by_place.tensor_split(STRETCHES)],
            top1=float(torch.cat(agree).mean()),
            nll=float(torch.cat(nll).mean()),
            nll_uncompressed=float(torch.cat(own).mean()),
            nll_change=change,
            nll_change_stderr=change_stderr,
        )
