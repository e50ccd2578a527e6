"""LongBench v1: prompt templates, cut in the middle, and scores, as its own evaluation sets them.

Bai et al., "LongBench: A Bilingual, Multitask Benchmark for Long Context Understanding", 2024; lengths as in the
paper's section "Benchmarks": 4096 tokens of prompt and the new tokens of `NEW_TOKENS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PROMPT_TOKENS = 4096
TEMPLATES = {
    "triviaqa": (
        "Answer the question based on the given passage. Only give me the answer and do not output any other "
        "words. The following are some examples.\n\n{context}\n\n{input}"
    ),
    "qasper": (
        "You are given a scientific article and a question. Answer the question as concisely as you can, using "
        "a single phrase or sentence if possible. If the question cannot be answered based on the information "
        'in the article, write "unanswerable". If the question is a yes/no question, answer "yes", "no", or '
        '"unanswerable". Do not provide any explanation.\n\nArticle: {context}\n\n Answer the question based '
        "on the above article as concisely as you can, using a single phrase or sentence if possible. If the "
        'question cannot be answered based on the information in the article, write "unanswerable". If the '
        'question is a yes/no question, answer "yes", "no", or "unanswerable". Do not provide any '
        "explanation.\n\nQuestion: {input}\n\nAnswer:"
    ),
    "trec": (
        "Please determine the type of the question below. Here are some examples of questions.\n\n{context}\n{input}"
    ),
    "samsum": (
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n{context}\n\n{input}"
    ),
    "lcc": "Please complete the code given below. \n{context}Next line of code:\n",
    "repobench-p": "Please complete the code given below. \n{context}{input}Next line of code:\n",
    "qmsum": (
        "You are given a meeting transcript and a query containing a question or instruction. Answer the query "
        "in one or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based on the above "
        "meeting transcript in one or more sentences.\n\nQuery: {input}\nAnswer:"
    ),
    "multi_news": (
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}\n\n"
        "Now, write a one-page summary of all the news.\n\nSummary:"
    ),
}
NEW_TOKENS = {
    "triviaqa": 32,
    "qasper": 128,
    "trec": 64,
    "samsum": 128,
    "lcc": 64,
    "repobench-p": 64,
    "qmsum": 512,
    "multi_news": 512,
}
# few-shot examples and code are continued as plain text, whatever the model
PLAIN = frozenset({"trec", "triviaqa", "samsum", "lcc", "repobench-p"})
METRICS = {
    "triviaqa": "qa_f1_score",
    "qasper": "qa_f1_score",
    "trec": "classification_score",
    "samsum": "rouge_score",
    "lcc": "code_sim_score",
    "repobench-p": "code_sim_score",
    "qmsum": "rouge_score",
    "multi_news": "rouge_score",
}
_FIRST_LINE = frozenset({"trec", "triviaqa", "samsum"})


def prompt(
    subset: str, record: dict[str, Any], encode: Callable[[str], list[int]], decode: Callable[[list[int]], str]
) -> str:
    """The prompt of a record; one of more than `PROMPT_TOKENS` tokens keeps its first and its last half of them."""
    text = TEMPLATES[subset].format(context=record["context"], input=record["input"])
    tokens = encode(text)
    if len(tokens) <= PROMPT_TOKENS:
        return text
    half = PROMPT_TOKENS // 2
    return decode(tokens[:half]) + decode(tokens[-half:])


def best_score(subset: str, record: dict[str, Any], answer: str) -> float:
    """The best score of an answer over the record's references, by lm-eval's functions for this subset's metric."""
    from lm_eval.tasks.longbench import metrics

    if subset in _FIRST_LINE:
        answer = answer.lstrip("\n").split("\n")[0]
    measure = getattr(metrics, METRICS[subset])
    classes = record.get("all_classes")
    return max(float(measure(answer, reference, all_classes=classes)) for reference in record["answers"])
