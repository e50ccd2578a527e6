"""One text of a call: its windows, what all subjects share on it, and how that becomes an Evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aatc_cli.artifacts.evaluation import Evaluation
from aatc_cli.console import say
from aatc_cli.core.layout import fp16_bytes, packed_tokens
from aatc_cli.errors import AatcError
from aatc_cli.evals.opened import Opened
from aatc_cli.evals.subjects import Subject
from aatc_cli.evals.windows.seen import seen_share
from aatc_cli.evals.windows.settings import WindowSettings
from aatc_cli.models.limits import check_tokens
from aatc_cli.text.windows import Windows, consecutive_windows


@dataclass(frozen=True)
class Frame:
    """Windows of one text, and what is asked of them. seen: by subject, the share that it was calibrated on."""

    opened: Opened
    settings: WindowSettings
    windows: Windows
    seen: Mapping[str, float | None]

    @classmethod
    def of(cls, opened: Opened, settings: WindowSettings, text: str) -> Frame:
        """Read and cut the text; raises `AatcError` for one that is too short or has tokens the model does not."""
        tokenizer = opened.tokenizer
        windows = consecutive_windows(
            text, tokenizer.encode, length=settings.length, limit=settings.limit or None, bos=tokenizer.bos
        )
        check_tokens(windows.tokens, opened.config)
        plans = {subject.name: subject.plan for subject in opened.subjects if subject.plan is not None}
        seen = {name: seen_share(plan, windows, tokenizer.bos) for name, plan in plans.items()}
        return cls(opened, settings, windows, seen)

    def say_seen(self) -> None:
        """Say which subjects were calibrated on this very text."""
        by_share: dict[str, list[str]] = {}
        for name, share in self.seen.items():
            if share:
                by_share.setdefault(f"{share:.0%}", []).append(name)
        for told, names in by_share.items():
            say(f"eval: {told} of {self.text} is calibration text of {', '.join(names)}: its figures flatter a plan")

    @property
    def text(self) -> str:
        """Name of the text."""
        return self.windows.records[0].name

    def protocol(self) -> dict[str, Any]:
        """All that determines a number on these windows beside its subject."""
        s, record = self.settings, self.windows.records[0]
        return self.opened.protocol(
            tokens=self.windows.digest,
            text=record.sha256,
            windows=self.windows.tokens.shape[0],
            length=s.length,
            stride=self._stride,
            first=s.first_position,
            queries=s.measured_queries,
            **({"prompt": s.prompt_tokens} if s.prompt_tokens else {}),
        )

    def evaluation(
        self, subject: Subject, seconds: float, measured: dict[str, Any], kept: list[list[float]] | None = None
    ) -> Evaluation:
        """The record of one subject with what was measured. kept: of a press, what kv heads keep, by layer."""
        s, tokens, window = self.settings, self.windows.tokens, subject.recipe.window
        layout = subject.plan.layout if subject.plan else None
        origin = self.opened.origin(subject)
        if layout is not None and kept is not None:
            # of a number of tokens the share is that of this text
            even = subject.recipe.choices.press.spread == "head" and layout.keep <= 1
            layout = layout.of_prompt(s.prompt_tokens, () if even else kept)
            origin |= {"bits": layout.mean_bits, "bits_packed": layout.bits_packed}
            measured = measured | {"kept_share": sum(map(sum, kept)) / (len(kept) * layout.geometry.kv_heads)}
        scored = s.length - 1 - s.first_position if s.measured_queries is None else s.measured_queries
        return Evaluation.model_validate(
            {
                **origin,
                "task": self.opened.task,
                "protocol": self.protocol(),
                "seconds": seconds,
                "bits_at_context": layout.bits_at(s.length) if layout else 16.0,
                "ratio": layout.ratio(s.length) if layout else 1.0,
                "bytes_total": layout.bytes(s.length) if layout else self._uncompressed,
                "context": s.length,
                "text": self.text,
                "text_sha256": self.windows.records[0].sha256,
                "windows": tokens.shape[0],
                "length": s.length,
                "stride": self._stride,
                "first_position": s.first_position,
                "tokens_scored": tokens.shape[0] * scored,
                "queries": s.measured_queries,
                "sinks": window.sinks,
                "recent": window.recent,
                "flush": window.flush,
                "calibration_share": self.seen.get(subject.name),
                **measured,
            }
        )

    @property
    def _uncompressed(self) -> int:
        return fp16_bytes(self.opened.identity.geometry, self.settings.length)

    @property
    def _stride(self) -> int:
        return self.settings.length - int(self.opened.tokenizer.bos is not None)


def check_packed(subject: Subject, tokens: int, option: str = "--length") -> None:
    """Raise `AatcError` when no query of ``tokens`` tokens reads a packed one: nothing would be measured."""
    window = subject.recipe.window
    if subject.plan is not None and packed_tokens(tokens - 1, window) == 0:
        # the last query of a window reads all of it but the last token, and one more than fits is packed
        least = window.sinks + window.recent + 2
        raise AatcError(
            f"{tokens} tokens lie within the {window.sinks} sinks and the window of {window.recent} that "
            f"{subject.name} keeps exact: nothing of its compression would be measured",
            f"use {option} {least} or more",
        )
