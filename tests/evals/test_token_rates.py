"""Token rates: received attention by brute force, the one-pass evaluator against literal decoding, causality."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import pytest
import torch

from aatc_cli.config import Window
from aatc_cli.core import SIDES
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.layout import packed_tokens
from aatc_cli.core.rated import RatedCodec
from aatc_cli.core.received import received_attention
from aatc_cli.core.received_bins import watched_lags
from aatc_cli.core.rope import apply_rope
from aatc_cli.evals.forced.passes import forced_logits
from aatc_cli.evals.forced.scores import score_windows
from aatc_cli.evals.forced.teacher_forced import Method, method_logits
from aatc_cli.evals.forced.token_rates import rated_logits
from aatc_cli.models.adapter import attention_sites, rebias
from aatc_cli.models.loading import find_model, load_model

WINDOW = Window(sinks=2, recent=12, flush=4)
LENGTH = 61


@pytest.fixture(params=["tiny_llama", "tiny_qwen2"])
def model(request):
    return load_model(find_model(str(request.getfixturevalue(request.param)))).double()


def tokens_of(length: int = LENGTH, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 256, (1, length), generator=torch.Generator().manual_seed(seed))


def site_codec(seed: int, bits: int) -> TransformCodec:
    generator = torch.Generator().manual_seed(seed)
    encode = torch.randn(1, 32, 32, generator=generator, dtype=torch.float64) + 3 * torch.eye(32, dtype=torch.float64)
    ones = torch.ones(32, dtype=torch.float64)
    return TransformCodec(encode, torch.linalg.inv(encode), ones, torch.full((32,), bits), ones)


def rated(bits: tuple[int, ...], thresholds: list[float]) -> list[dict[str, RatedCodec]]:
    """Codecs of four layers, one transform per site and a width for every class."""
    edges = torch.tensor(thresholds, dtype=torch.float64)
    return [
        {
            side: RatedCodec(tuple(site_codec(10 * layer + i, width) for width in bits), edges)
            for i, side in enumerate(SIDES)
        }
        for layer in range(4)
    ]


# thresholds that spread the tokens of the tiny models over all classes (asserted below)
EDGES = [0.02, 0.1]
METHOD = Method("rated", rated((1, 3, 6), EDGES), WINDOW, "pre-rope")


def weights_of(query: torch.Tensor, keys: torch.Tensor, scaling: float) -> torch.Tensor:
    share = query.shape[1] // keys.shape[1]
    scores = query @ keys.repeat_interleave(share, 1).transpose(2, 3) * scaling
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


@pytest.mark.parametrize("length", [1, 40, 150])
def test_received_attention_is_that_of_full_weights(length):
    """Tiles and bands against every weight of a [T, T] matrix, one token and one query at a time."""
    generator = torch.Generator().manual_seed(length)
    query = torch.randn(2, 6, length, 8, generator=generator, dtype=torch.float64)
    keys = torch.randn(2, 2, length, 8, generator=generator, dtype=torch.float64)
    weights = weights_of(query, keys, 0.7)
    first, last = watched_lags(WINDOW)
    assert (first, last) == (4, 8)
    got = received_attention(query, keys, 0.7, WINDOW)
    assert got.shape == (2, length)
    for b in range(2):
        for i in range(length):
            wanted = sum(
                float(weights[b, j, t, i]) ** 2 for t in range(i + first, min(i + last + 1, length)) for j in range(6)
            )
            assert got[b, i] == pytest.approx(wanted, rel=1e-12, abs=1e-15)


@torch.no_grad()
def decode_with_rates(feed, model, method: Method, tokens: torch.Tensor):
    """Independent oracle: token by token, every token a list of what it received, coded when its block leaves."""
    sites, window = attention_sites(model), method.window
    first, last = watched_lags(window)
    kept = defaultdict(lambda: {"keys": [], "values": [], "raw": [], "received": [], "class": {}, "packed": 0})

    def attend(inputs):
        layer = kept[inputs.site.layer]
        codecs = method.codecs[inputs.site.layer]
        layer["keys"].append(inputs.key)
        layer["values"].append(inputs.value)
        layer["raw"].append((inputs.k_raw, inputs.v_raw, inputs.cos, inputs.sin))
        layer["received"].append(0.0)
        count = len(layer["keys"])
        while count - window.sinks - layer["packed"] > window.recent:
            for i in range(window.sinks + layer["packed"], window.sinks + layer["packed"] + window.flush):
                k_raw, v_raw, cos, sin = layer["raw"][i]
                chosen = sum(layer["received"][i] >= float(edge) for edge in codecs["k"].thresholds)
                layer["class"][i] = chosen
                heads, dim = inputs.key.shape[1], inputs.key.shape[3]
                k_hat = rebias(codecs["k"].codecs[chosen].reconstruct(k_raw), inputs.site.k_bias)
                v_hat = rebias(codecs["v"].codecs[chosen].reconstruct(v_raw), inputs.site.v_bias)
                layer["keys"][i] = apply_rope(k_hat.view(1, 1, heads, dim).transpose(1, 2), cos, sin)
                layer["values"][i] = v_hat.view(1, 1, heads, dim).transpose(1, 2)
            layer["packed"] += window.flush
        seen = [
            i
            for i in range(count)
            if codecs["k"].codecs[layer["class"].get(i, -1)].bits.any() or i not in layer["class"]
        ]
        share = inputs.query.shape[1] // inputs.key.shape[1]
        keys = torch.cat([layer["keys"][i] for i in seen], 2).repeat_interleave(share, 1)
        values = torch.cat([layer["values"][i] for i in seen], 2).repeat_interleave(share, 1)
        weights = ((inputs.query @ keys.transpose(2, 3)) * inputs.scaling).softmax(-1)
        for place, i in enumerate(seen):
            if first <= count - 1 - i <= last:
                layer["received"][i] += float(weights[0, :, 0, place].square().sum())
        return weights @ values

    return feed(model, sites, attend, tokens), {layer: part["class"] for layer, part in kept.items()}


@torch.no_grad()
def one_pass(model, method: Method, tokens: torch.Tensor):
    classes = {}
    logits = rated_logits(model, attention_sites(model), method, tokens, 0, classes.__setitem__)
    return logits, classes


@pytest.mark.parametrize("bits", [(1, 3, 6), (0, 3, 6)], ids=["three-rates", "eviction"])
def test_one_pass_equals_token_by_token(model, fed_one_by_one, bits):
    method = replace(METHOD, codecs=rated(bits, EDGES))
    tokens = tokens_of()
    expected, chosen = decode_with_rates(fed_one_by_one, model, method, tokens)
    got, classes = one_pass(model, method, tokens)
    assert (got - expected[:-1]).abs().max() < 1e-11 * expected.abs().max()
    for layer, found in classes.items():
        wanted = [chosen[layer][i] for i in sorted(chosen[layer])]
        assert found[0].tolist() == wanted
        assert sorted(chosen[layer]) == list(range(WINDOW.sinks, WINDOW.sinks + len(wanted)))
    counts = Counter(k for found in classes.values() for k in found[0].tolist())
    assert min(counts[k] for k in range(3)) >= 10


def test_one_class_everywhere_is_the_plain_codec(model):
    """Where every token falls into one class, the result is that class's own code, whatever the others are."""
    tokens = tokens_of()
    for k, edges in ((0, [1e6, 1e7]), (2, [-2.0, -1.0]), (1, [-1.0, 1e6])):
        method = replace(METHOD, codecs=rated((1, 3, 6), edges))
        alone = [{side: layer[side].codecs[k] for side in SIDES} for layer in method.codecs]
        wanted = method_logits(model, attention_sites(model), Method("alone", alone, WINDOW, "pre-rope"), tokens, 0)
        got, classes = one_pass(model, method, tokens)
        assert {c for found in classes.values() for c in found[0].tolist()} == {k}
        assert (got - wanted).abs().max() < 1e-11 * wanted.abs().max()


@torch.no_grad()
def test_behind_a_prompt_classes_are_of_what_the_prompt_received(model):
    """Where all classes code alike it is the plain codec; classes are by the model's own attention."""
    tokens, prompt = tokens_of(), 48
    places = torch.arange(prompt - 1, LENGTH - 1)
    sites, classes = attention_sites(model), {}
    alike = replace(METHOD, codecs=rated((3, 3, 3), EDGES))
    alone = [{side: layer[side].codecs[0] for side in SIDES} for layer in alike.codecs]
    got = forced_logits(model, sites, alike, tokens, places, prompt, classes.__setitem__)
    wanted = forced_logits(model, sites, Method("alone", alone, WINDOW, "pre-rope"), tokens, places, prompt)
    assert (got - wanted).abs().max() < 1e-11 * wanted.abs().max()
    exact = {}
    fine = replace(METHOD, codecs=rated((15, 15, 15), EDGES))
    rated_logits(model, sites, fine, tokens, 0, exact.__setitem__)
    for layer in range(4):
        leaving = packed_tokens(prompt + 1, WINDOW)
        assert torch.equal(classes[layer][:, :leaving], exact[layer][:, :leaving])


def test_nothing_after_a_token_left_changes_its_class(model):
    """Other tokens from position 40 on: the classes of what left the window before are the same."""
    tokens, other = tokens_of(), tokens_of()
    other[:, 40:] = tokens_of(seed=2)[:, 40:]
    _, before = one_pass(model, METHOD, tokens)
    _, after = one_pass(model, METHOD, other)
    gone = 40 - WINDOW.sinks - WINDOW.recent
    gone -= gone % WINDOW.flush
    assert gone > 20
    for layer in before:
        assert torch.equal(before[layer][:, :gone], after[layer][:, :gone])
    assert any(not torch.equal(before[layer], after[layer]) for layer in before)


def test_shares_are_those_of_all_windows(model):
    windows = torch.cat((tokens_of(), tokens_of(seed=2)))
    [scores] = score_windows(model, attention_sites(model), [METHOD], windows, 30, lambda name: None)
    found = [one_pass(model, METHOD, window[None])[1] for window in windows]
    for layer, shares in enumerate(scores.class_shares()):
        counts = Counter(k for classes in found for k in classes[layer][0].tolist())
        assert shares == pytest.approx([counts[k] / counts.total() for k in range(3)])


def test_sliding_layers_hide_what_lies_behind(tmp_path, new_model):
    folder = new_model(tmp_path / "sliding", family="mistral", sliding_window=24)
    model = load_model(find_model(str(folder))).double()
    tokens = tokens_of()
    expected = method_logits(
        model,
        attention_sites(model),
        Method("alone", [{s: layer[s].codecs[1] for s in SIDES} for layer in METHOD.codecs], WINDOW, "pre-rope"),
        tokens,
        0,
    )
    got, _ = one_pass(model, replace(METHOD, codecs=rated((1, 3, 6), [-1.0, 1e6])), tokens)
    assert (got - expected).abs().max() < 1e-11 * expected.abs().max()
