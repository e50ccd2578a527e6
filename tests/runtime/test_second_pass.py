"""What a second reading sees, against the attention matrices that transformers itself gives, renormalised by hand."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import AutoModelForCausalLM

from aatc_cli.config import Window
from aatc_cli.core.press.state import Pressed
from aatc_cli.core.tile_sizes import TILE
from aatc_cli.errors import AatcError
from aatc_cli.methods.registry import press_of
from aatc_cli.models.adapter import attention_sites
from aatc_cli.models.loading import find_model, load_model
from aatc_cli.runtime import second_pass
from aatc_cli.runtime.second_pass import FIRST_PART, LATER_PART, Reader, choices_over_layers, second_reading

LENGTH, SINKS = 90, 3
# the library's eager path takes its softmax in float32, whatever the dtype
NEAR = {"rtol": 1e-5, "atol": 1e-6}


def encode(text: str) -> list[int]:
    return list(text.encode())


def matrices(folder: str, text: list[int]) -> list[torch.Tensor]:
    """Attention of every layer [Hq, T, T] as the library's own eager path has it."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float64).eval()
    with torch.no_grad():
        return [a[0] for a in model(torch.tensor([text]), output_attentions=True, use_cache=False).attentions]


@pytest.mark.parametrize("chunk", [2048, 40])
def test_second_reading_against_whole_matrices(tiny_llama, monkeypatch, chunk):
    """One chunk, and three whose later ones follow eight tokens of the chunk before and see the sinks as well."""
    monkeypatch.setattr(second_pass, "_CHUNK", chunk)
    model = load_model(find_model(str(tiny_llama))).double()
    tokens = torch.randint(0, 256, (1, LENGTH), generator=torch.Generator().manual_seed(5))
    found = second_reading(model, attention_sites(model), tokens, encode, SINKS)
    prompt, heads = tokens[0].tolist(), found[0].largest.shape[1]
    for start in range(0, LENGTH, chunk):
        end = min(start + chunk, LENGTH)
        again = encode(LATER_PART) + prompt[start - 8 : start] if start else encode(FIRST_PART)
        text = prompt + again + prompt[start:end]
        for layer, whole in enumerate(matrices(str(tiny_llama), text)):
            seen = [*range(min(SINKS, start)), *range(start, end), *range(LENGTH, len(text))]
            behind = whole[:, LENGTH:]
            weights = behind[:, :, start:end] / behind[:, :, seen].sum(-1, keepdim=True)
            by_head = weights.unflatten(0, (heads, -1))
            largest, squares = by_head.amax((1, 2)), by_head.square().sum((1, 2))
            torch.testing.assert_close(found[layer].largest[0, :, start:end], largest, **NEAR)
            torch.testing.assert_close(found[layer].again[0, :, start:end], squares, **NEAR)
            for token in range(start, end):
                own = whole.unflatten(0, (heads, -1))[:, :, token + TILE : LENGTH, token]
                torch.testing.assert_close(found[layer].before[0, :, token], own.square().sum((1, 2)), **NEAR)


@pytest.mark.parametrize("chunk", [2048, 40])
def test_a_prompt_that_does_not_fit_twice_is_told_one_that_does(tiny_llama, monkeypatch, chunk):
    monkeypatch.setattr(second_pass, "_CHUNK", chunk)
    model = load_model(find_model(str(tiny_llama)))
    sites, most = attention_sites(model), int(model.config.max_position_embeddings)
    tokens = torch.zeros(1, most - 50, dtype=torch.long)
    with pytest.raises(AatcError, match=f"more than the model's context of {most}") as failure:
        second_reading(model, sites, tokens, encode, SINKS)
    hint = re.fullmatch(r"use a prompt of (\d+) or less", failure.value.hint or "")
    assert hint
    second_reading(model, sites, tokens[:, : int(hint[1])], encode, SINKS)


def test_kvzip_keeps_what_the_second_reading_looks_at_most(tiny_llama):
    """Of all heads of all layers the best, by hand from the library's matrices."""
    model = load_model(find_model(str(tiny_llama))).double()
    tokens = torch.randint(0, 256, (1, LENGTH), generator=torch.Generator().manual_seed(6))
    window = Window(sinks=SINKS, recent=16, flush=8)
    readings = second_reading(model, attention_sites(model), tokens, encode, SINKS)
    found = choices_over_layers(readings, Pressed(press_of("kvzip"), 0.25), window)
    text = tokens[0].tolist() + encode(FIRST_PART) + tokens[0].tolist()
    scores = []
    for layer, whole in enumerate(matrices(str(tiny_llama), text)):
        heads = found[layer].shape[1]
        for head, weights in enumerate(whole.unflatten(0, (heads, -1))):
            # 72 tokens are packed behind the sinks: 71 beyond the window, in whole blocks of 8
            for token in range(SINKS, SINKS + 72):
                scores.append((float(weights[:, LENGTH:, token].max()), layer, head, token))
    best = sorted(scores, reverse=True)[: 18 * heads * len(found)]
    expected = {place[1:] for place in best}
    kept = {(k, *place) for k, mask in enumerate(found) for place in (mask[0] >= 0).nonzero().tolist()}
    assert kept == expected


def test_prompts_read_together_are_read_as_alone(tiny_llama, monkeypatch):
    """A reader of several prompts, some of which it knows, gives every one what a reading of it alone gives."""
    monkeypatch.setattr(second_pass, "_AT_ONCE", 2 * LENGTH)
    model = load_model(find_model(str(tiny_llama))).double()
    sites = attention_sites(model)
    tokens = torch.randint(0, 256, (5, LENGTH), generator=torch.Generator().manual_seed(7))
    reader = Reader(encode)
    assert reader.readings(model, sites, tokens[1:2], SINKS) == reader.readings(model, sites, tokens[1:2], SINKS)
    for row, found in zip(tokens, reader.readings(model, sites, tokens, SINKS), strict=True):
        for mine, alone in zip(found, second_reading(model, sites, row[None], encode, SINKS), strict=True):
            torch.testing.assert_close(mine.largest, alone.largest, **NEAR)
            torch.testing.assert_close(mine.again, alone.again, **NEAR)
            torch.testing.assert_close(mine.before, alone.before, **NEAR)
