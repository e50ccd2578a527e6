"""Tokens that are given, read in one pass by what the evaluator makes of a cache that is built token by token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from aatc_cli.evals.accumulate.decoding import Stretch
from aatc_cli.evals.forced.passes import forced_logits
from aatc_cli.evals.forced.subject_method import method_of
from aatc_cli.evals.opened import Opened
from aatc_cli.evals.subjects import Subject
from aatc_cli.models.adapter import attention_sites
from aatc_cli.models.attention import logits_at
from aatc_cli.runtime.second_pass import Reader


@dataclass
class AtOnce:
    """The model of a call; the first ``prompt`` tokens of all windows enter a cache in one prefill."""

    opened: Opened
    prompt: int

    @cached_property
    def reader(self) -> Reader:
        """Reads prompts twice, for presses that ask for it."""
        return Reader(self.opened.tokenizer.encode)

    def stretch(self, subject: Subject, tokens: Tensor) -> Stretch:
        """``tokens`` [B, T], of which all behind the prompt but the last are decoded, with the subject's logits."""
        model = self.opened.model()
        places = torch.arange(self.prompt, tokens.shape[1] - 1, device=tokens.device)
        if subject.plan is None:
            return Stretch(tokens, logits_at(model, tokens, places))
        sites = attention_sites(model)
        method = method_of(subject, sites, self.opened.options, self.reader)
        return Stretch(tokens, forced_logits(model, sites, method, tokens, places, self.prompt))
