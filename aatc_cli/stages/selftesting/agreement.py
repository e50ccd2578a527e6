"""The packed cache token by token against the evaluator of text in one pass, in float64."""

from __future__ import annotations

from typing import Any

import torch

from aatc_cli.artifacts.plan import Plan
from aatc_cli.errors import AatcError
from aatc_cli.evals.forced.teacher_forced import Method, method_logits
from aatc_cli.models.adapter import attention_sites
from aatc_cli.models.loading import ModelSource, load_model, load_tokenizer
from aatc_cli.runtime.attach import attach_codecs
from aatc_cli.text.windows import consecutive_windows

# of the scale of the logits: the two ways add the same float64 numbers in another order
_AGREE = 1e-9


@torch.no_grad()
def packed_agrees(source: ModelSource, plan: Plan, text: str, length: int) -> str:
    """How far logits over the packed cache are from the evaluator's, and its bytes, for people.

    Raises `AatcError` where they differ, or where the cache holds other bytes than the byte law says.
    """
    tokenizer = load_tokenizer(source)
    ids = consecutive_windows(text, tokenizer.encode, length=length, limit=1, bos=tokenizer.bos).tokens
    model = load_model(source).double()
    codecs: list[dict[Any, Any]] = [
        {side: codec.to("cpu", torch.float64) for side, codec in layer.items()} for layer in plan.codecs("cpu")
    ]
    window = plan.recipe.window
    expected = method_logits(model, attention_sites(model), Method("", codecs, window, "pre-rope"), ids, 0)
    with attach_codecs(model, codecs, window) as session:
        cache = session.new_cache()
        rows = [model(ids[:, t : t + 1], **{session.keyword: cache}).logits[0, -1] for t in range(length - 1)]
        state: Any = cache.state
        live, predicted = state.bytes_live(), state.bytes_predicted()
    apart = float((torch.stack(rows) - expected).abs().max() / expected.abs().max())
    if live != predicted:
        raise AatcError(f"the cache holds {live} bytes, the byte law says {predicted}", "report this")
    if not apart < _AGREE:
        raise AatcError(f"packed cache and evaluator differ by {apart:.2g} of the logits", "report this")
    return f"differs from eval by {apart:.1g} of the logits; {live:,} bytes as predicted"
