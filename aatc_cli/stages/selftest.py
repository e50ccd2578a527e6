"""The selftest of doctor: every stage on a tiny random model, and the packed cache against the evaluator of text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from aatc_cli.artifacts.evaluation import Evaluation
from aatc_cli.artifacts.plan import Plan
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import CollectSettings
from aatc_cli.config import make_budget
from aatc_cli.console import hushed
from aatc_cli.errors import AatcError
from aatc_cli.evals import find_task
from aatc_cli.evals.call import Call
from aatc_cli.evals.forced.teacher_forced import Method, method_logits
from aatc_cli.evals.kl.settings import Settings
from aatc_cli.evals.subjects import EvalOptions, Subject
from aatc_cli.models.adapter import attention_sites
from aatc_cli.models.loading import ModelSource, find_model, load_model, load_tokenizer
from aatc_cli.models.tiny import write_tiny_llama
from aatc_cli.profiles import TextMixture, load_recipe
from aatc_cli.runtime.attach import attach_codecs
from aatc_cli.stages.allocate import allocate, check
from aatc_cli.stages.collect import collect
from aatc_cli.stages.collecting.settings import CollectOptions
from aatc_cli.stages.eval import evaluate
from aatc_cli.stages.whiten import whiten
from aatc_cli.text.windows import consecutive_windows

_SAMPLES, _LENGTH = 6, 192
_TEXT = "builtin:python-docs"
# of the scale of the logits: the two ways add the same float64 numbers in another order
_AGREE = 1e-9


@dataclass
class Selftest:
    """The steps in their order, each on what the one before left in ``folder``; a step returns what it found."""

    folder: Path
    _plans: list[Plan] = field(default_factory=list)

    @property
    def steps(self) -> list[tuple[str, Callable[[], str]]]:
        """Name and function of every step."""
        return [
            ("model", self._model),
            ("collect", self._collect),
            ("whiten", self._whiten),
            ("allocate", self._allocate),
            ("eval", self._eval),
            ("packed cache", self._packed),
        ]

    @property
    def _run(self) -> Run:
        return Run(self.folder / "run")

    @property
    def _source(self) -> ModelSource:
        return find_model(str(self.folder / "model"))

    def _model(self) -> str:
        write_tiny_llama(self.folder / "model")
        return "a random Llama of 4 layers"

    def _collect(self) -> str:
        settings = CollectSettings(samples=_SAMPLES, length=_LENGTH, rows=256)
        mixture = TextMixture(sources=[_TEXT], samples=_SAMPLES, length=_LENGTH)
        with hushed():
            collect(self._run, "stats", self._source, mixture, settings, CollectOptions())
        return f"{_SAMPLES} windows of {_LENGTH} tokens"

    def _whiten(self) -> str:
        stats = self._run.stats()
        with hushed():
            manifest = whiten(self._run, transform_stats=stats, rate_stats=stats)
        return f"digest {manifest.digest[:12]}"

    def _allocate(self) -> str:
        with hushed():
            self._plans += allocate(self._run, load_recipe("paper"), [make_budget(bits=3.0)])
        if check(self._plans[0]):
            raise AatcError("the plan is not derived again to the same widths", "report this: it must never happen")
        return f"3 bits, derived twice alike; digest {self._plans[0].digest[:12]}"

    def _eval(self) -> str:
        settings = Settings(text=(f"{_TEXT}-test",), length=_LENGTH, limit=1, first=140)
        subjects = [Subject(load_recipe("fp16"), None), Subject(self._plans[0].recipe, self._plans[0])]
        call = Call(self._run, EvalOptions(), self._source, subjects=subjects)
        with hushed():
            found = evaluate(find_task("kl"), call, settings)
        low, high = (one.kl_mean if isinstance(one, Evaluation) else None for one in found)
        if low is None or high is None or not low < high < 10:
            raise AatcError(f"KL of {low} nats uncompressed and {high} at 3 bits", "report this: it must never happen")
        return f"KL {low:.2g} nats in float16, {high:.2g} at 3 bits"

    @torch.no_grad()
    def _packed(self) -> str:
        """Logits token by token over the packed cache, and in one pass of the evaluator, in float64."""
        plan = self._plans[0]
        tokenizer = load_tokenizer(self._source)
        ids = consecutive_windows(_TEXT, tokenizer.encode, length=_LENGTH, limit=1, bos=tokenizer.bos).tokens
        model = load_model(self._source).double()
        codecs: list[dict[Any, Any]] = [
            {side: codec.to("cpu", torch.float64) for side, codec in layer.items()} for layer in plan.codecs("cpu")
        ]
        window = plan.recipe.window
        expected = method_logits(model, attention_sites(model), Method("", codecs, window, "pre-rope"), ids, 0)
        with attach_codecs(model, codecs, window) as session:
            cache = session.new_cache()
            rows = [model(ids[:, t : t + 1], **{session.keyword: cache}).logits[0, -1] for t in range(_LENGTH - 1)]
            state: Any = cache.state
            live, predicted = state.bytes_live(), state.bytes_predicted()
        apart = float((torch.stack(rows) - expected).abs().max() / expected.abs().max())
        if live != predicted:
            raise AatcError(f"the cache holds {live} bytes, the byte law says {predicted}", "report this")
        if not apart < _AGREE:
            raise AatcError(f"packed cache and evaluator differ by {apart:.2g} of the logits", "report this")
        return f"differs from eval by {apart:.1g} of the logits; {live:,} bytes as predicted"
