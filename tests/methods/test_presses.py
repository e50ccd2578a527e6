"""Every press against a small implementation of its own: loops over whole attention matrices, no tiles, no masks."""

from __future__ import annotations

import math

import pytest
import torch

from aatc_cli.config import Window
from aatc_cli.core.press.choice import best, kept_count, share_out, share_over_layers
from aatc_cli.core.press.seen import LayerFacts, Prompt, step_angles
from aatc_cli.core.press.state import Pressed, PressState
from aatc_cli.core.rope import apply_rope
from aatc_cli.errors import AatcError
from aatc_cli.methods.registry import PRESSES, press_of

BATCH, HEADS, GROUP, LENGTH, DIM, WIDE = 2, 3, 2, 150, 8, 20
WINDOW = Window(sinks=3, recent=40, flush=16)
PACKED = 112
TRIED = [press.name for press in PRESSES if not press.nothing and not press.rereads]


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Layer:
    """Random queries, keys (both rotated), values and output projection, with their attention matrix."""

    def __init__(self, style: str = "half", sliding: int | None = None, softcap: float | None = None) -> None:
        rotary = 6
        angles = torch.tensor([0.9, 0.3, 0.05], dtype=torch.float64)
        where = torch.arange(LENGTH)[:, None] * angles
        # both ways of laying out pairs hold every angle twice
        table = torch.cat((where, where), 1) if style == "half" else where.repeat_interleave(2, 1)
        self.cos, self.sin, self.style = table.cos()[None], table.sin()[None], style
        self.raw = rand(BATCH, HEADS * GROUP, LENGTH, DIM, seed=1) + rand(1, HEADS * GROUP, 1, DIM, seed=7)
        self.query = apply_rope(self.raw, self.cos, self.sin, style)
        self.keys = apply_rope(rand(BATCH, HEADS, LENGTH, DIM, seed=2), self.cos, self.sin, style)
        self.values, self.output = rand(BATCH, HEADS, LENGTH, DIM, seed=3), rand(WIDE, HEADS * GROUP * DIM, seed=4)
        self.facts = LayerFacts(0.4, style, sliding, None, softcap, self.output)
        assert rotary == table.shape[1]
        scores = torch.zeros(BATCH, HEADS * GROUP, LENGTH, LENGTH, dtype=torch.float64)
        for head in range(HEADS * GROUP):
            products = self.query[:, head] @ self.keys[:, head // GROUP].mT * 0.4
            scores[:, head] = products if softcap is None else softcap * torch.tanh(products / softcap)
        lag = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
        hidden = (lag < 0) if sliding is None else (lag < 0) | (lag >= sliding)
        self.weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)

    @property
    def prompt(self) -> Prompt:
        return Prompt(self.query, self.keys, self.facts, step_angles(self.cos[0], self.sin[0]))

    def kept(self, name: str, share: float) -> torch.Tensor:
        """What is left after this prompt."""
        state = PressState.empty(Pressed(press_of(name), share), WINDOW, (BATCH, HEADS), torch.device("cpu"))
        state.received = state.received.double()
        state.see(self.prompt)
        state.settle(PACKED, self.facts, lambda: self.values)
        return state.kept


def top(scores: list[float], count: int) -> set[int]:
    """Places behind the sinks of the best scores, the later of equal ones."""
    return set(sorted(range(WINDOW.sinks, WINDOW.sinks + PACKED), key=lambda i: (-scores[i], -i))[:count])


def naive(layer: Layer, name: str, row: int, head: int) -> list[float]:
    """Scores of one kv head, written out."""
    mine = [layer.weights[row, head * GROUP + g] for g in range(GROUP)]
    values = layer.values[row, head]
    received = [sum(float(m[:, i].sum()) for m in mine) for i in range(LENGTH)]
    if name == "streaming-llm":
        return [float(i) for i in range(LENGTH)]
    if name == "h2o":
        return received
    if name == "vatp":
        return [math.inf if i < 20 else received[i] * float(values[i].abs().sum()) for i in range(LENGTH)]
    if name == "caote":
        total = sum(received)
        output = sum(received[i] / total * values[i] for i in range(LENGTH))
        shares = [r / total for r in received]
        return [a / (1 - a) * float((output - v).norm()) for a, v in zip(shares, values, strict=True)]
    assert name == "snapkv"
    mean = [sum(float(m[-32:, i].mean()) for m in mine) / GROUP for i in range(LENGTH)]
    padded = [0.0, 0.0, *mean, 0.0, 0.0]
    return [sum(padded[i : i + 5]) / 5 for i in range(LENGTH)]


LAYERS = {
    "plain": Layer(),
    "interleaved": Layer("interleaved"),
    "sliding": Layer(sliding=60),
    "capped": Layer(softcap=2.0),
}


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("name", ["streaming-llm", "h2o", "vatp", "caote", "snapkv"])
def test_of_every_head_the_best_stay(layer, name):
    for share in (0.3, 0.07):
        kept = layer.kept(name, share)
        for row in range(BATCH):
            for head in range(HEADS):
                expected = top(naive(layer, name, row, head), kept_count(PACKED, share))
                held = set(kept[row, head].nonzero().flatten().tolist())
                near = {i for i in range(LENGTH) if i < WINDOW.sinks or i >= WINDOW.sinks + PACKED}
                assert held == expected | near


def adaptive(scores: torch.Tensor, count: int) -> list[int]:
    """AdaKV by hand: [H] places of heads with scores [H, T] that share count each, a fifth of it theirs anyway."""
    span = range(WINDOW.sinks, WINDOW.sinks + PACKED)
    safe = math.floor(count * 0.2)
    first = {(h, i) for h in range(HEADS) for i in top(scores[h].tolist(), safe)}
    rest = sorted(((h, i) for h in range(HEADS) for i in span if (h, i) not in first), key=lambda p: -scores[p])
    taken = [*first, *rest[: count * HEADS - len(first)]]
    return [sum(h == head for h, _ in taken) for head in range(HEADS)]


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_critical_kv_in_two_stages_with_places_shared_out(layer):
    kept = layer.kept("critical-kv", 0.25)
    count = kept_count(PACKED, 0.25)
    for row in range(BATCH):
        base = torch.tensor([naive(layer, "snapkv", row, head) for head in range(HEADS)], dtype=torch.float64)
        counts = adaptive(base, count)
        assert sum(counts) == count * HEADS
        for head in range(HEADS):
            norms = torch.zeros(LENGTH, dtype=torch.float64)
            for g in range(GROUP):
                q = head * GROUP + g
                projected = layer.values[row, head] @ layer.output[:, q * DIM : (q + 1) * DIM].T
                norms += projected.abs().sum(-1) / GROUP
            first = top(base[head].tolist(), int(counts[head] * 0.5))
            second = ((base[head] + 1e-4) * norms).tolist()
            ranked = [i for i in sorted(top(second, PACKED), key=lambda i: -second[i]) if i not in first]
            expected = first | set(ranked[: counts[head] - len(first)])
            span = kept[row, head, WINDOW.sinks : WINDOW.sinks + PACKED]
            assert set((span.nonzero().flatten() + WINDOW.sinks).tolist()) == expected
    assert (kept.sum(-1) != kept.sum(-1)[0, 0]).any()


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_expected_attention_is_the_mean_over_a_normal_of_mean_rotations(style):
    layer = LAYERS["plain"] if style == "half" else LAYERS["interleaved"]
    kept = layer.kept("expected-attention", 0.25)
    angles = torch.tensor([0.9, 0.3, 0.05], dtype=torch.float64)
    turn = torch.eye(DIM, dtype=torch.float64) * 0
    for ahead in range(512):
        one = torch.eye(DIM, dtype=torch.float64)
        for pair, angle in enumerate(angles * (LENGTH + ahead)):
            a, b = (pair, pair + 3) if style == "half" else (2 * pair, 2 * pair + 1)
            one[a, a] = one[b, b] = angle.cos()
            one[a, b], one[b, a] = -angle.sin(), angle.sin()
        turn += one / 512
    scores = torch.zeros(BATCH, HEADS, LENGTH, dtype=torch.float64)
    for row in range(BATCH):
        for head in range(HEADS * GROUP):
            queries = layer.raw[row, head, 4:]
            mean, covariance = turn @ queries.mean(0), turn @ torch.cov(queries.T, correction=0) @ turn.T
            keys, values = layer.keys[row, head // GROUP], layer.values[row, head // GROUP]
            logit = [float(k @ mean) * 0.4 + float(k @ covariance @ k) * 0.16 / 2 for k in keys[4:]]
            weights = torch.tensor(logit, dtype=torch.float64).softmax(0)
            norms = (values @ layer.output[:, head * DIM : (head + 1) * DIM].T).norm(dim=-1)
            scores[row, head // GROUP, 4:] += weights * norms[4:] / GROUP
    count = kept_count(PACKED, 0.25)
    for row in range(BATCH):
        for head, places in enumerate(adaptive(scores[row], count)):
            span = kept[row, head, WINDOW.sinks : WINDOW.sinks + PACKED]
            assert set((span.nonzero().flatten() + 3).tolist()) == top(scores[row, head].tolist(), places)


@pytest.mark.parametrize("name", TRIED)
def test_no_share_beyond_what_is_there(name):
    """Everything at a share of one, sinks and window alone where the share is no token; never a NaN."""
    layer = LAYERS["plain"]
    assert layer.kept(name, 1.0).all()
    near = torch.ones(LENGTH, dtype=torch.bool)
    near[WINDOW.sinks : WINDOW.sinks + PACKED] = False
    assert torch.equal(layer.kept(name, 0.001), near.expand(BATCH, HEADS, LENGTH))


@pytest.mark.parametrize("name", [name for name in TRIED if press_of(name).acts == "flush"])
def test_what_is_evicted_never_comes_back(name):
    """Later blocks, other sums: of the packed tokens so many are left, and all of them were left before."""
    layer, share = LAYERS["plain"], 0.3
    state = PressState.empty(Pressed(press_of(name), share), WINDOW, (BATCH, HEADS), torch.device("cpu"))
    before = torch.ones(BATCH, HEADS, 0, dtype=torch.bool)
    for packed in (16, 48, 64, PACKED):
        tokens = WINDOW.sinks + packed + WINDOW.recent
        state.extend(min(tokens, LENGTH) - state.tokens)
        state.pay(layer.weights[:, :, tokens - 20 : tokens, : state.tokens])
        state.settle(packed, layer.facts, lambda: layer.values[:, :, : state.tokens])
        span = state.kept[..., WINDOW.sinks : WINDOW.sinks + packed]
        assert (span.sum(-1) == kept_count(packed, share)).all()
        assert not (state.kept[..., : before.shape[2]] & ~before).any()
        assert state.kept[..., WINDOW.sinks + packed :].all()
        before = state.kept


def test_a_prompt_press_leaves_later_tokens_alone():
    layer = LAYERS["plain"]
    state = PressState.empty(Pressed(press_of("snapkv"), 0.25), WINDOW, (BATCH, HEADS), torch.device("cpu"))
    state.see(layer.prompt)
    state.settle(PACKED, layer.facts, lambda: layer.values)
    first = state.kept
    state.extend(32)
    state.settle(PACKED + 32, layer.facts, lambda: pytest.fail("nobody asks for values"))
    assert torch.equal(state.kept[..., :LENGTH], first)
    assert state.kept[..., LENGTH:].all()


def test_kvzip_shares_places_over_layers_and_asks_for_a_second_pass():
    scores = [rand(1, HEADS, LENGTH, seed=layer) * (1 + layer) for layer in range(4)]
    candidates = torch.zeros(1, HEADS, LENGTH, dtype=torch.bool)
    candidates[..., 3:115] = True
    masks = share_over_layers(scores, candidates, 10)
    joined = sorted(float(scores[k][0, h, i]) for k in range(4) for h in range(HEADS) for i in range(3, 115))
    for mask, score in zip(masks, scores, strict=True):
        assert torch.equal(mask, candidates & (score >= joined[-10 * HEADS * 4]))
    state = PressState.empty(Pressed(press_of("kvzip"), 0.5), WINDOW, (BATCH, HEADS), torch.device("cpu"))
    state.see(LAYERS["plain"].prompt)
    with pytest.raises(AatcError, match="kvzip reads a prompt a second time"):
        state.settle(PACKED, LAYERS["plain"].facts, lambda: LAYERS["plain"].values)


def test_ties_go_to_the_later_token_and_to_no_stranger():
    scores = torch.tensor([[[1.0, 1.0, 1.0, -torch.inf, 5.0]]])
    candidates = torch.tensor([[[True, True, True, True, False]]])
    for count, places in ((1, [2]), (2, [1, 2]), (4, [0, 1, 2, 3]), (9, [0, 1, 2, 3])):
        found = best(scores, candidates, torch.tensor([[count]]))
        assert found[0, 0].nonzero().flatten().tolist() == places
    assert share_out(scores, candidates, 2, 0.5).tolist() == [[2]]


def test_counts_are_what_a_share_allows():
    assert [kept_count(n, 0.25) for n in (0, 3, 4, 16, 17)] == [0, 0, 1, 4, 4]
    assert kept_count(1000, 0.3) == 300
    assert kept_count(7, 1.0) == 7


def test_places_are_shared_by_bytes():
    """Heads of twice the bytes count twice: the best are taken while all fit, which even shares would take as well."""
    scores, costs = rand(2, 3, 40, seed=9), torch.tensor([0.5, 1.0, 1.5])
    candidates = torch.ones(2, 3, 40, dtype=torch.bool)
    [mask] = share_over_layers([scores], candidates, 10, costs)
    assert torch.equal(share_out(scores, candidates, 10, 0.0, costs), mask.sum(-1))
    for row in range(2):
        spent, expected = 0.0, set()
        for _, head, token in sorted(
            ((float(scores[row, h, t]), h, t) for h in range(3) for t in range(40)), reverse=True
        ):
            spent += float(costs[head])
            if spent > 30:
                break
            expected.add((head, token))
        assert {tuple(place) for place in mask[row].nonzero().tolist()} == expected
