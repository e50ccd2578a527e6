"""Prompts that go through the model once give what a whole pass gives, for every kind of method."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import CollectSettings
from aatc_cli.config import make_budget
from aatc_cli.evals.forced.behind import SeenPrompts
from aatc_cli.evals.forced.passes import forced_logits
from aatc_cli.evals.forced.subject_method import method_of
from aatc_cli.evals.opened import Opened, open_subjects
from aatc_cli.evals.subjects import EvalOptions, Subject
from aatc_cli.models.adapter import attention_sites
from aatc_cli.models.attention import logits_at
from aatc_cli.models.loading import find_model
from aatc_cli.profiles import TextMixture, load_recipe
from aatc_cli.runtime.second_pass import Reader
from aatc_cli.stages.allocate import allocate
from aatc_cli.stages.collect import CollectOptions, collect
from aatc_cli.stages.whiten import Wanted, whiten

# a tile leaves after 196 tokens, while the answer to the first is read; prompts are read twice within 512 tokens
PROMPTS, ANSWER = (180, 205), 24
RECIPES = ("paper", "loss-aware-tiles", "kivi", "kvtc", "kvzip", "loss-aware-tiles+kvzip-0.5")


@pytest.fixture(scope="module")
def opened(tiny_llama: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """Plans of one class, of tiles, of all layers together, and behind a press, alone and with tiles."""
    run = Run(tmp_path_factory.mktemp("behind") / "run")
    settings = CollectSettings(samples=4, length=260, rows=64, fisher=4)
    source = find_model(str(tiny_llama))
    collect(run, "stats", source, TextMixture(sources=[str(corpus)], samples=4, length=260), settings, CollectOptions())
    subjects = [Subject(load_recipe("fp16"), None)]
    for name in RECIPES:
        recipe = load_recipe(name)
        whiten(run, transform_stats=run.stats(), rate_stats=run.stats(), wanted=Wanted.by(recipe))
        subjects.append(Subject(recipe, allocate(run, recipe, [make_budget(bits=3)])[0]))
    return open_subjects("ruler", run, source, subjects, EvalOptions(dtype="float32", batch=2))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_prompt_seen_once_gives_what_whole_passes_give(opened: Opened, prompt: int) -> None:
    model, reader = opened.model(), Reader(opened.tokenizer.encode)
    sites = attention_sites(model)
    tokens = torch.randint(0, 256, (2, prompt + ANSWER), generator=torch.Generator().manual_seed(prompt))
    places = torch.arange(prompt - 1, prompt + ANSWER - 1)
    seen = SeenPrompts.of(model, sites, tokens[:, :prompt])
    for subject in opened.subjects:
        method = None if subject.plan is None else method_of(subject, sites, opened.options, reader)
        whole = (
            logits_at(model, tokens, places)
            if method is None
            else forced_logits(model, sites, method, tokens, places, prompt)
        )
        # twice: what is remembered of the prompt is not changed by reading it
        for _ in range(2):
            found = seen.logits(model, sites, method, tokens[:, prompt:])
            assert torch.allclose(found, whole, rtol=1e-4, atol=1e-5), subject.name
        alone = seen.logits(model, sites, method, tokens[:, prompt : prompt + 1])
        assert torch.equal(alone, found[:, :1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_gpu_says_what_a_cpu_says(opened: Opened, prompt: int) -> None:
    """What a prompt's tokens receive is asked of a fused kernel there, and codecs arrive without being waited for."""
    there = replace(opened, options=replace(opened.options, device="cuda"), _model=None)
    tokens = torch.randint(0, 256, (2, prompt + ANSWER), generator=torch.Generator().manual_seed(prompt))
    found: dict[str, list[torch.Tensor]] = {}
    for each in (opened, there):
        model, reader = each.model(), Reader(each.tokenizer.encode)
        sites, mine = attention_sites(model), tokens.to(each.options.device)
        seen = SeenPrompts.of(model, sites, mine[:, :prompt])
        for subject in each.subjects:
            method = None if subject.plan is None else method_of(subject, sites, each.options, reader)
            logits = seen.logits(model, sites, method, mine[:, prompt:])
            found.setdefault(subject.name, []).append(logits.cpu())
    for name, (here, gpu) in found.items():
        off = float((gpu - here).square().mean().sqrt() / here.square().mean().sqrt())
        print(f"{name} behind {prompt} tokens: relative RMS {off:.2g}")
        assert off < 1e-3, name
