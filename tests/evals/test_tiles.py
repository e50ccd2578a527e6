"""Tiles: the one-pass evaluator against literal decoding token by token, causality, and what a class is."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
import torch

from aatc_cli.config import Window
from aatc_cli.core import SIDES
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.rope import apply_rope
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.core.tile_rule import TileRule
from aatc_cli.evals.forced.teacher_forced import Method, method_logits
from aatc_cli.evals.forced.tiles import tiled_logits
from aatc_cli.models.adapter import attention_sites, rebias
from aatc_cli.models.loading import find_model, load_model

WINDOW = Window(sinks=2, recent=32, flush=16)
RULE = TileRule((8, 4, 4))
LENGTH = 109


@pytest.fixture(params=["tiny_llama", "tiny_qwen2"])
def model(request):
    return load_model(find_model(str(request.getfixturevalue(request.param)))).double()


def tokens_of(length: int = LENGTH, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 256, (1, length), generator=torch.Generator().manual_seed(seed))


def codecs_of(bits: tuple[int, ...], groups: int, quantizer: str = "lloyd") -> list[dict[str, TileCodec]]:
    """Codecs of four layers of two kv heads of 16, one transform per site, a width for every class."""
    size, found = 32 // groups, []
    for layer in range(4):
        sides = {}
        for index, side in enumerate(SIDES):
            generator = torch.Generator().manual_seed(10 * layer + index)
            encode = torch.randn(groups, size, size, generator=generator, dtype=torch.float64) + 3 * torch.eye(size)
            ones = torch.ones(32, dtype=torch.float64)
            codec = TransformCodec(encode, torch.linalg.inv(encode), ones, ones.long(), ones, quantizer)
            sides[side] = TileCodec(codec, torch.tensor(bits)[:, None].expand(-1, 32).contiguous(), RULE)
        found.append(sides)
    return found


@torch.no_grad()
def decode(feed, model, codecs, rule: TileRule, window: Window, tokens: torch.Tensor):
    """Independent oracle: each kv head keeps lists of tokens and sums of what they received, and codes whole tiles."""
    sites = attention_sites(model)
    first = (window.recent - rule.tile) // 2
    last = window.recent - rule.tile
    kept = defaultdict(list)

    def coded(codec: TileCodec, k: int, raw, bias):
        rows = rebias(codec.of_class(k).reconstruct(raw), bias)
        return rows.view(1, 1, 2, 16).transpose(1, 2)

    def leave(inputs, memory):
        done = sum(entry["class"] is not None for entry in memory)
        tile = memory[window.sinks + done : window.sinks + done + rule.tile]
        for head in range(2):
            received = [sum(entry["received"]) if rule.order == "layer" else entry["received"][head] for entry in tile]
            ranking = sorted(range(rule.tile), key=lambda i: (received[i], i))
            limits = [sum(rule.quotas[: k + 1]) for k in range(len(rule.quotas))]
            for rank, i in enumerate(ranking):
                k = next(k for k, limit in enumerate(limits) if rank < limit)
                entry, site = tile[i], inputs.site
                codec = codecs[site.layer]
                key = apply_rope(coded(codec["k"], k, entry["raw"][0], site.k_bias), *entry["tables"])
                entry["key"][head] = key[0, head, 0]
                entry["value"][head] = coded(codec["v"], k, entry["raw"][1], site.v_bias)[0, head, 0]
                span = slice(16 * head, 16 * head + 16) if codec["k"].codec.groups == 2 else slice(0, 32)
                entry["seen"][head] = bool(codec["k"].bits[k, span].any() or codec["v"].bits[k, span].any())
                entry["class"] = (entry["class"] or {}) | {head: k}

    def attend(inputs):
        memory = kept[inputs.site.layer]
        memory.append(
            {
                "key": inputs.key[0, :, 0].clone(),
                "value": inputs.value[0, :, 0].clone(),
                "raw": (inputs.k_raw, inputs.v_raw),
                "tables": (inputs.cos, inputs.sin),
                "received": [0.0, 0.0],
                "seen": [True, True],
                "class": None,
            }
        )
        packed = sum(entry["class"] is not None for entry in memory)
        if len(memory) - window.sinks - packed > window.recent:
            leave(inputs, memory)
        out = torch.zeros_like(inputs.query)
        for j in range(inputs.query.shape[1]):
            head = j // (inputs.query.shape[1] // 2)
            seen = [i for i, entry in enumerate(memory) if entry["seen"][head]]
            keys = torch.stack([memory[i]["key"][head] for i in seen])
            values = torch.stack([memory[i]["value"][head] for i in seen])
            weights = (keys @ inputs.query[0, j, 0] * inputs.scaling).softmax(0)
            out[0, j, 0] = weights @ values
            for place, i in enumerate(seen):
                if first <= len(memory) - 1 - i <= last:
                    memory[i]["received"][head] += float(weights[place] ** 2)
        return out

    logits = feed(model, sites, attend, tokens)
    chosen = {}
    for layer, memory in kept.items():
        tokens_packed = [entry["class"] for entry in memory if entry["class"] is not None]
        chosen[layer] = [[entry[head] for entry in tokens_packed] for head in range(2)]
    return logits, chosen


@torch.no_grad()
def one_pass(model, codecs, rule: TileRule, tokens: torch.Tensor, window: Window = WINDOW):
    classes = {}
    sites = attention_sites(model)
    logits = tiled_logits(model, sites, codecs, rule, window, tokens, 0, classes.__setitem__)
    return logits, classes


@pytest.mark.parametrize("bits", [(1, 3, 6), (0, 3, 6)], ids=["three-widths", "dropped"])
@pytest.mark.parametrize(("order", "groups"), [("head", 2), ("layer", 2), ("layer", 1)])
def test_one_pass_equals_token_by_token(model, fed_one_by_one, bits, order, groups):
    codecs, rule, tokens = codecs_of(bits, groups), TileRule((8, 4, 4), order), tokens_of()
    expected, chosen = decode(fed_one_by_one, model, codecs, rule, WINDOW, tokens)
    got, classes = one_pass(model, codecs, rule, tokens)
    assert (got - expected[:-1]).abs().max() < 1e-10 * expected.abs().max()
    differ = 0
    for layer, found in classes.items():
        assert found.shape == (1, 2 if order == "head" else 1, 80)
        by_head = found[0].expand(2, -1).tolist()
        assert by_head == chosen[layer]
        differ += by_head[0] != by_head[1]
        for head in by_head:
            for tile in range(5):
                assert Counter(head[16 * tile : 16 * tile + 16]) == {0: 8, 1: 4, 2: 4}
    assert (differ > 0) == (order == "head")


def test_classes_alike_are_the_plain_codec(model):
    """Where every class has the same widths, the result is that of the codec without classes."""
    tokens, codecs = tokens_of(), codecs_of((3, 3, 3), 2)
    plain = [{side: layer[side].of_class(0) for side in SIDES} for layer in codecs]
    wanted = method_logits(model, attention_sites(model), Method("plain", plain, WINDOW, "pre-rope"), tokens, 0)
    got, _ = one_pass(model, codecs, RULE, tokens)
    assert (got - wanted).abs().max() < 1e-11 * wanted.abs().max()


def test_nothing_after_a_token_left_changes_its_class(model):
    """Other tokens from position 70 on: the classes of tiles that left the window before are the same."""
    codecs, tokens, other = codecs_of((1, 3, 6), 2), tokens_of(), tokens_of()
    other[:, 70:] = tokens_of(seed=2)[:, 70:]
    (_, before), (_, after) = (one_pass(model, codecs, RULE, text) for text in (tokens, other))
    for layer in before:
        assert torch.equal(before[layer][..., :48], after[layer][..., :48])
    assert any(not torch.equal(before[layer], after[layer]) for layer in before)


def test_chance_is_the_same_for_any_text(model):
    codecs, rule = codecs_of((1, 3, 6), 2), TileRule((8, 4, 4), "head", "chance")
    (_, one), (_, other) = (one_pass(model, codecs, rule, tokens_of(seed=seed)) for seed in (1, 2))
    for layer in one:
        assert torch.equal(one[layer], other[layer])
        assert Counter(one[layer][0, 0].tolist()) == {0: 40, 1: 20, 2: 20}
    assert not torch.equal(one[0], one[1])
    assert not torch.equal(one[0][:, 0], one[0][:, 1])


def test_sliding_layers_hide_what_lies_behind(tmp_path, new_model):
    folder = new_model(tmp_path / "sliding", family="mistral", sliding_window=40)
    model, tokens, codecs = load_model(find_model(str(folder))).double(), tokens_of(), codecs_of((3, 3, 3), 2)
    plain = [{side: layer[side].of_class(0) for side in SIDES} for layer in codecs]
    wanted = method_logits(model, attention_sites(model), Method("plain", plain, WINDOW, "pre-rope"), tokens, 0)
    got, _ = one_pass(model, codecs, RULE, tokens)
    assert (got - wanted).abs().max() < 1e-11 * wanted.abs().max()


@pytest.mark.parametrize("length", [1, 20, 34, 35, 50])
def test_short_texts(model, length):
    """Texts that end before, at and behind the first tile."""
    got, classes = one_pass(model, codecs_of((1, 3, 6), 2), RULE, tokens_of(length + 1))
    assert got.shape[0] == length
    assert classes[0].shape[2] == (0 if length + 1 <= 34 else 16 * -(-(length + 1 - 34) // 16))
