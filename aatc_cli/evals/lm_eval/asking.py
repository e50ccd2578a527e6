"""Benchmarks by lm-eval with a compressed cache inside its model class. lm-eval is imported when one is run."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from aatc_cli.errors import AatcError
from aatc_cli.evals.lm_eval import longbench
from aatc_cli.evals.lm_eval.records import Record, Splits

_LETTERS = "ABCDEFGHIJ"
# the paper gives no number for GSM8K: this is lm-eval's own
_GSM8K_TOKENS = 256
_NEEDED = ("lm_eval", "math_verify", "jieba", "fuzzywuzzy", "rouge")


class Attachment(Protocol):
    """What a subject's cache yields while it is attached."""

    def new_cache(self) -> Any:
        """An empty cache."""
        ...


class Attachable(Protocol):
    """A cache under evaluation, attached to the model for every batch."""

    def attached(self) -> AbstractContextManager[Attachment]:
        """Bring the model's attention to caches that the attachment makes."""
        ...


@dataclass(frozen=True)
class Question:
    """How one subtask is put to lm-eval: its configuration without data, and which of its numbers is the score."""

    config: dict[str, Any]
    metric: str
    filter: str = "none"
    chat: bool = True


def require_harness() -> None:
    """Raise `AatcError` when a package that benchmarks need is not installed."""
    from importlib.util import find_spec

    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise AatcError(f"this benchmark needs {', '.join(missing)}", "install them: pip install 'aatc[bench]'")


def question(
    benchmark: str, subtask: str, encode: Callable[[str], list[int]], decode: Callable[[list[int]], str]
) -> Question:
    """The settings of the paper's section "Benchmarks" for one subtask."""
    if benchmark == "gsm8k":
        return Question(_gsm8k(), "exact_match", "flexible-extract")
    if benchmark == "mmlu-pro":
        return Question(_mmlu(subtask), "exact_match", "letter")
    if benchmark == "math-500":
        return Question(_asked("math-500", math_prompt, 2048, [], _math_score), "score")
    return Question(
        _asked(
            f"longbench_{subtask}",
            lambda record: longbench.prompt(subtask, record, encode, decode),
            longbench.NEW_TOKENS[subtask],
            ["\n"] if subtask == "samsum" else [],
            lambda record, answer: longbench.best_score(subtask, record, answer),
        ),
        "score",
        chat=subtask not in longbench.PLAIN,
    )


def _asked(
    name: str, text: Callable[[Record], str], room: int, until: list[str], measure: Callable[[Record, str], float]
) -> dict[str, Any]:
    return {
        "task": f"aatc_{name}",
        "output_type": "generate_until",
        "test_split": "test",
        "doc_to_text": text,
        "doc_to_target": "",
        "num_fewshot": 0,
        "target_delimiter": "",
        "process_results": lambda record, answers: {"score": measure(record, answers[0])},
        "metric_list": [{"metric": "score", "aggregation": "mean", "higher_is_better": True}],
        "generation_kwargs": {"do_sample": False, "until": until, "max_gen_toks": room},
    }


def _gsm8k() -> dict[str, Any]:
    """lm-eval's own task of eight worked examples, scored by the last number of the answer, without its data."""
    import lm_eval.tasks
    import yaml

    path = Path(lm_eval.tasks.__path__[0]) / "gsm8k" / "gsm8k-cot.yaml"
    config: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    kept = {name: value for name, value in config.items() if name not in ("dataset_path", "dataset_name", "tag")}
    generation = config["generation_kwargs"] | {"max_gen_toks": _GSM8K_TOKENS}
    return kept | {"task": "aatc_gsm8k", "num_fewshot": 8, "generation_kwargs": generation}


def _mmlu(subject: str) -> dict[str, Any]:
    return {
        "task": f"aatc_mmlu_pro_{subject}",
        "output_type": "generate_until",
        "test_split": "test",
        "fewshot_split": "validation",
        "num_fewshot": 5,
        "fewshot_config": {"sampler": "first_n"},
        "description": f"The following are multiple choice questions about {subject.replace('_', ' ')}. "
        "Answer each with the letter of the right option only.\n\n",
        "doc_to_text": mmlu_prompt,
        "doc_to_target": "answer",
        "generation_kwargs": {"do_sample": False, "until": ["Question:"], "max_gen_toks": 32},
        "filter_list": [
            {
                "name": "letter",
                "filter": [{"function": "regex", "regex_pattern": rf"\b([{_LETTERS}])\b"}, {"function": "take_first"}],
            }
        ],
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }


def mmlu_prompt(record: Record) -> str:
    """A question with lettered options, open at the letter of the answer."""
    options = "\n".join(f"{letter}. {text}" for letter, text in zip(_LETTERS, record["options"], strict=False))
    return f"Question:\n{record['question']}\nOptions:\n{options}\nAnswer:"


def math_prompt(record: Record) -> str:
    """A problem with the request to reason and to box the answer."""
    return (
        f"Problem:\n{record['problem']}\n\nReason step by step, and put your final answer within \\boxed{{}}.\n\n"
        "Solution:"
    )


def _math_score(record: Record, text: str) -> float:
    return float(same_answer(record["answer"], last_boxed(text)))


def last_boxed(text: str) -> str | None:
    """What the last \\boxed{...} of ``text`` holds, braces matched; None without one that is closed."""
    for start in reversed([match.end() for match in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        for place in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[start:place]
    return None


def same_answer(gold: str, answer: str | None) -> bool:
    """Whether two LaTeX expressions are equal: by math-verify, or as strings in lm-eval's normal form for MATH."""
    if answer is None:
        return False
    from lm_eval.tasks.hendrycks_math.utils import is_equiv
    from math_verify import parse, verify

    if verify(parse(f"${gold}$"), parse(f"${answer}$")):
        return True
    return bool(is_equiv(gold, answer))


def ask(
    model: Any, tokenizer: Any, keyword: str, cache: Attachable, asked: Question, splits: Splits, chat: bool, batch: int
) -> list[float]:
    """The score of every test record of ``splits`` with the subject's cache under lm-eval's generation."""
    from datasets import Dataset
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)

    class CachedLM(HFLM):  # type: ignore[misc]
        """lm-eval's model class; every batch is generated with a new cache of the subject."""

        def _model_generate(self, *args: Any, **kwargs: Any) -> Any:
            with cache.attached() as attachment:
                return super()._model_generate(*args, **kwargs, **{keyword: attachment.new_cache()})

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
            return super().generate_until(requests, disable_tqdm=disable_tqdm or not sys.stderr.isatty())

    data = {split: Dataset.from_list(rows) for split, rows in splits.items()}
    config = asked.config | {"custom_dataset": lambda **_: data}
    results = simple_evaluate(
        model=CachedLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch),
        tasks=[config],
        apply_chat_template=chat and asked.chat,
        bootstrap_iters=0,
        log_samples=True,
        verbosity="ERROR",
    )
    rows = results["samples"][config["task"]]
    return [float(row[asked.metric]) for row in rows if row["filter"] == asked.filter]
