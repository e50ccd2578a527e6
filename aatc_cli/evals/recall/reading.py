"""Windows read by the uncompressed cache and by every subject, at the tokens of second mentions alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.evals.forced.passes import forced_logits
from aatc_cli.evals.forced.subject_method import method_of
from aatc_cli.evals.forced.teacher_forced import Method, check_finite
from aatc_cli.evals.opened import Opened
from aatc_cli.evals.recall.result import RecallToken
from aatc_cli.evals.subjects import Subject
from aatc_cli.models.adapter import attention_sites
from aatc_cli.models.attention import logits_at
from aatc_cli.models.placement import input_device
from aatc_cli.runtime.second_pass import Reader as PromptReader
from aatc_cli.text.mentions import Mention


@dataclass
class Seen:
    """What a subject saw so far."""

    tokens: list[RecallToken] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class Reference:
    """One window [1, T] and what the uncompressed cache makes of its mentions, token by token.

    first, again: positions [n] of the tokens in both mentions; unread and logprob [n] of the right token there; best
    [n]: the most likely token at the second.
    """

    window: int
    tokens: Tensor
    first: Tensor
    again: Tensor
    kinds: Sequence[str]
    unread: Tensor
    logprob: Tensor
    best: Tensor


class Reader:
    """The model of a call with the methods of its subjects; ``seen`` by the subject's name."""

    def __init__(self, opened: Opened, subjects: Sequence[Subject]) -> None:
        self.model = opened.model()
        self.sites = attention_sites(self.model)
        self.seen = {subject.name: Seen() for subject in subjects}
        again = PromptReader(opened.tokenizer.encode)
        self.methods = {s.name: method_of(s, self.sites, opened.options, again) for s in subjects}

    def reference(self, index: int, window: Tensor, places: Sequence[Mention]) -> Reference:
        """The uncompressed cache at both mentions of ``places`` in a window [T]; raises `AatcError`, not finite."""
        first = torch.tensor([m.first + j for m in places for j in range(m.size)])
        again = torch.tensor([m.again + j for m in places for j in range(m.size)])
        tokens = window[None].to(input_device(self.model))
        wanted = torch.tensor(sorted({*first.tolist(), *again.tolist()})) - 1
        logits = logits_at(self.model, tokens, wanted.to(tokens.device))[0]
        check_finite(logits, "reference", index)
        right = window[wanted + 1].to(logits.device)
        place = torch.searchsorted(wanted, torch.stack((first, again)) - 1)
        logprob, best = _logprobs(logits, right).cpu(), logits.argmax(-1).cpu()
        kinds = [m.kind for m in places for _ in range(m.size)]
        return Reference(index, tokens, first, again, kinds, logprob[place[0]], logprob[place[1]], best[place[1]])

    def read(self, subject: Subject, references: Sequence[Reference]) -> None:
        """What the subject makes of the second mentions of some windows of one length, read together.

        Raises `AatcError` for logits not finite.
        """
        method, classes = self.methods[subject.name], dict[int, Tensor]()
        tokens = torch.cat([reference.tokens for reference in references])
        wanted = torch.tensor(sorted({place for one in references for place in one.again.tolist()})) - 1
        logits = forced_logits(
            self.model, self.sites, method, tokens, wanted, on_classes=lambda k, found: classes.update({k: found.cpu()})
        )
        for row, reference in enumerate(references):
            check_finite(logits[row], method.name, reference.window)
            mine = {layer: found[row : row + 1] for layer, found in classes.items()}
            place = torch.searchsorted(wanted, reference.again - 1).to(logits.device)
            self.seen[subject.name].tokens += _tokens_of(
                reference, logits[row, place], _shares(method, mine, reference.first)
            )


def _tokens_of(reference: Reference, logits: Tensor, shares: Tensor | None) -> list[RecallToken]:
    """The tokens of a window's second mentions, from the logits [n, V] before each and their shares of classes."""
    true = reference.tokens[0].cpu()[reference.again]
    logprob, best = _logprobs(logits, true.to(logits.device)).cpu(), logits.argmax(-1).cpu()
    return [
        RecallToken.model_validate(
            {
                "window": reference.window,
                "first": int(reference.first[i]),
                "again": int(reference.again[i]),
                "kind": kind,
                "unread": float(reference.unread[i]),
                "reference": float(reference.logprob[i]),
                "logprob": float(logprob[i]),
                "first_of_reference": bool(reference.best[i] == true[i]),
                "first_of_all": bool(best[i] == true[i]),
                "agree": bool(reference.best[i] == best[i]),
                "classes": None if shares is None else shares[i].tolist(),
            }
        )
        for i, kind in enumerate(reference.kinds)
    ]


def _logprobs(logits: Tensor, right: Tensor) -> Tensor:
    """Log-probability [n] of the ``right`` tokens [n], in float64."""
    return torch.log_softmax(logits.to(torch.float64), -1).gather(1, right[:, None])[:, 0]


def _shares(method: Method, classes: dict[int, Tensor], first: Tensor) -> Tensor | None:
    """Share [n, classes] of the layers and orders that put the packed tokens at ``first`` into each class."""
    codec = method.codecs[0]["k"]
    if not isinstance(codec, TileCodec) or not classes:
        return None
    # sinks have no class, and their shares are nothing
    place = first - method.window.sinks
    orders = torch.cat([found[0][:, place.clamp_min(0)] for found in classes.values()])
    shares = torch.nn.functional.one_hot(orders, codec.classes).to(torch.float64).mean(0)
    return shares * (place >= 0)[:, None]
