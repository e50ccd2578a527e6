"""What the first decoded logits of a packed cache must be: no time is worth anything if the numbers are wrong.

They are compared with those of one pass over all tokens in which the last query reads what the codecs give back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aatc_cli.config import Window
from aatc_cli.evals.forced.passes import forced_logits
from aatc_cli.evals.forced.teacher_forced import Codecs, Method
from aatc_cli.models.adapter import attention_sites

# a code on a rounding tie may come out either way, and layers above follow: a fraction of what compression does
_TIES = 0.25
# attention in another order of sums, after some tens of layers, relative to the logits
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}
_ROUNDING_HALF = 5e-2


@torch.no_grad()
def expected_logits(model: torch.nn.Module, codecs: Codecs, window: Window, tokens: Tensor) -> Tensor:
    """Logits [B, V] behind ``tokens`` [B, T + 1] when the first T are a prompt and the last one is decoded.

    The prompt attends to itself exactly; the last query reads packed tokens as the codecs reconstruct them.
    """
    method = Method("expected", codecs, window, "pre-rope")
    prompt = tokens.shape[1] - 1
    places = torch.tensor([prompt])
    return forced_logits(model, attention_sites(model), method, tokens, places, prompt)[:, 0]


def check_logits(got: Tensor, expected: Tensor, plain: Tensor) -> tuple[float, float]:
    """RMS difference of ``got`` to ``expected`` and its bound; infinite where anything is not finite. All [B, V].

    plain: logits with the uncompressed cache, which say how much compression changes.
    """
    dtype, (got, expected, plain) = got.dtype, (x.to(torch.float64) for x in (got, expected, plain))
    error, effect, size = (float(x.square().mean().sqrt()) for x in (got - expected, plain - expected, expected))
    bound = max(_TIES * effect, _ROUNDING.get(dtype, _ROUNDING_HALF) * size)
    finite = bool(torch.isfinite(got).all())
    return (error if finite else float("inf")), bound
