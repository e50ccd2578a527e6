"""Gemma 3 270M, where ``python -m aatc_cli.models.embedded FOLDER --model gemma3-270m`` has brought it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from aatc_cli.config import Window
from aatc_cli.evals.forced.teacher_forced import Method, method_logits
from aatc_cli.models.adapter import attention_sites, geometry_of
from aatc_cli.models.loading import find_model, load_model, load_tokenizer
from aatc_cli.profiles import load_model_profile
from aatc_cli.runtime.attach import attach_codecs
from aatc_cli.text.builtin import builtin_documents

FOLDER = Path(os.environ.get("AATC_MODELS", Path(__file__).parents[2] / ".models")) / "gemma3-270m"


@pytest.mark.real
@pytest.mark.slow
@torch.no_grad()
def test_real_text_beyond_the_sliding_window(codecs):
    if not (FOLDER / "config.json").is_file():
        pytest.skip(f"{FOLDER} is not there")
    source = find_model(str(FOLDER))
    model, tokenizer = load_model(source), load_tokenizer(source)
    geometry = geometry_of(model.config)
    assert geometry == load_model_profile("gemma-3-270m-it").geometry
    text = "\n\n".join(document for document, _ in zip(builtin_documents("python-docs-test"), range(20), strict=False))
    ids = torch.tensor([[tokenizer.bos, *tokenizer.encode(text)[:559]]])
    own = model(ids).logits[0]
    # a model that reads: less than four nats per token on this text
    assert torch.nn.functional.cross_entropy(own[:-1], ids[0, 1:]) < 4
    errors = {}
    for bits in (16, 4):
        sites = codecs(geometry.layers, geometry.channels, 1, bits, dtype=torch.float32)
        expected = method_logits(model, attention_sites(model), Method("test", sites, Window(), "pre-rope"), ids, 530)
        with attach_codecs(model, sites, Window()) as session:
            cache = session.new_cache()
            model(ids[:, :530], **{session.keyword: cache})
            rows = [model(ids[:, t : t + 1], **{session.keyword: cache}).logits[0, -1] for t in range(530, 560)]
            assert cache.state.bytes_live() == cache.state.bytes_predicted()
        errors[bits] = (torch.stack(rows) - own[530:]).abs().max() / own.abs().max()
        # token by token the prompt attends exactly, in the evaluator it does not: they agree where nothing is lost
        if bits == 16:
            assert (expected - own[530:559]).abs().max() < 2e-2 * own.abs().max()
    assert errors[16] < 2e-2
    assert errors[4] > 5 * errors[16]
