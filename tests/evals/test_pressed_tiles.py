"""Tiles behind a press: against lists of kept tokens by hand, and their bytes against tiles that are really filled."""

from __future__ import annotations

import pytest
import torch

from aatc_cli.config import Geometry, HeadGroups, Window
from aatc_cli.core import SIDES
from aatc_cli.core.attend import attention_weights, weighted_values
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.layout import packed_tokens
from aatc_cli.core.press.choice import kept_count
from aatc_cli.core.press.state import Pressed
from aatc_cli.core.press.tile_layout import PressTileLayout
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.core.tile_layout import TileLayout
from aatc_cli.core.tile_rule import TileRule
from aatc_cli.errors import AatcError
from aatc_cli.evals.forced.passes import forced_logits
from aatc_cli.evals.forced.teacher_forced import Method
from aatc_cli.methods.registry import press_of
from aatc_cli.models.adapter import attention_sites
from aatc_cli.models.attention import attention_override
from aatc_cli.models.loading import find_model, load_model
from aatc_cli.profiles import load_recipe
from aatc_cli.runtime.second_pass import Reader

pytestmark = pytest.mark.usefixtures("float64")
WINDOW, RULE = Window(sinks=2, recent=32, flush=16), TileRule((8, 4, 4), "head")
# 64 tokens are packed behind the prompt and no others before the end
PROMPT, LENGTH, SHARE = 83, 98, 0.35


@pytest.fixture(scope="module")
def model(tiny_llama):
    return load_model(find_model(str(tiny_llama))).double()


def tokens_of() -> torch.Tensor:
    return torch.randint(0, 256, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def codecs_of(bits: tuple[int, ...]) -> list[dict[str, TileCodec]]:
    found = []
    for layer in range(4):
        sides = {}
        for index, side in enumerate(SIDES):
            generator = torch.Generator().manual_seed(10 * layer + index)
            encode = torch.randn(2, 16, 16, generator=generator, dtype=torch.float64) + 3 * torch.eye(16)
            ones = torch.ones(32, dtype=torch.float64)
            codec = TransformCodec(encode, torch.linalg.inv(encode), ones, ones.long(), ones, "lloyd", scale_bits=8)
            sides[side] = TileCodec(codec, torch.tensor(bits)[:, None].expand(-1, 32).clone(), RULE)
        found.append(sides)
    return found


def method_of(bits, name: str | None, share: float = SHARE) -> Method:
    pressed = None if name is None else Pressed(press_of(name), share)
    return Method("tiles", codecs_of(bits), WINDOW, "pre-rope", pressed, Reader(lambda text: list(text.encode())))


@pytest.mark.parametrize("name", ["snapkv", "critical-kv", "expected-attention", "kvzip"])
def test_a_share_of_one_is_no_press(model, name):
    places = torch.arange(PROMPT, LENGTH)
    found, expected = (
        forced_logits(model, attention_sites(model), method_of((1, 3, 6), press, 1.0), tokens_of(), places, PROMPT)
        for press in (name, None)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("bits", [(1, 3, 6), (0, 2, 5)])
@pytest.mark.parametrize("name", ["snapkv", "kvzip"])
def test_what_stays_fills_tiles_head_by_head(model, name, bits):
    left = {}
    method, places = method_of(bits, name), torch.arange(PROMPT, LENGTH)

    def keep(layer, kept, packed):
        assert packed == 64
        left[layer] = kept

    found = forced_logits(model, attention_sites(model), method, tokens_of(), places, PROMPT, keep)
    with torch.no_grad(), attention_override(model, attention_sites(model), by_hand(method, left)):
        expected = model(input_ids=tokens_of(), use_cache=False).logits[:, PROMPT:]
    assert (found - expected).abs().max() < 1e-9 * expected.abs().max()
    if name == "snapkv":
        assert (left[0][:, :, 2:66].sum(-1) == kept_count(64, SHARE)).all()


def by_hand(method, left):
    """Attention with lists of the tokens that stay, cut into tiles and ranked by what each received of the prompt."""
    first, last = RULE.lags(WINDOW.recent)

    def attend(inputs):
        layer, (batch, heads, length, dim) = inputs.site.layer, inputs.key.shape
        exact = attention_weights(
            inputs.query, inputs.key, torch.ones(length, length).tril().bool(), inputs.scaling
        ).unflatten(1, (heads, -1))
        keys, values = inputs.key.clone(), inputs.value.clone()
        allowed = torch.ones(batch, heads, 1, length, length).tril().bool()
        coded = {
            side: [
                method.codecs[layer][side].of_class(k).reconstruct(raw).unflatten(-1, (heads, dim)).transpose(1, 2)
                for k in range(3)
            ]
            for side, raw in zip(SIDES, (inputs.k_raw, inputs.v_raw), strict=True)
        }
        turned = [inputs.rotate(part) for part in coded["k"]]
        for row in range(batch):
            for head in range(heads):
                stay = [i for i in range(2, 66) if bool(left[layer][row, head, i])]
                for start in range(0, len(stay), 16):
                    tile = stay[start : start + 16]
                    received = {
                        i: sum(
                            float(exact[row, head, :, t, i].square().sum())
                            for t in range(i + first, min(i + last, PROMPT - 1) + 1)
                        )
                        for i in tile
                    }
                    ranked = sorted(tile, key=lambda i: (received[i], i))
                    for place, token in enumerate(ranked, start=16 - len(tile)):
                        k = 0 if place < 8 else 1 if place < 12 else 2
                        keys[row, head, token] = turned[k][row, head, token]
                        values[row, head, token] = coded["v"][k][row, head, token]
                        if not method.codecs[layer]["k"].bits[k].any():
                            allowed[row, head, 0, PROMPT:, token] = False
                for token in set(range(2, 66)) - set(stay):
                    allowed[row, head, 0, PROMPT:, token] = False
        plain = attention_weights(inputs.query, inputs.key, torch.ones(length, length).tril().bool(), inputs.scaling)
        weights = attention_weights(inputs.query, keys, allowed, inputs.scaling)
        prompt = weighted_values(plain, inputs.value)[:, :, :PROMPT]
        return torch.cat((prompt, weighted_values(weights, values)[:, :, PROMPT:]), 2)

    return attend


GEOMETRY = Geometry(layers=2, heads=4, kv_heads=2, head_dim=32, hidden_size=128)
LAW = Window(sinks=4, recent=128, flush=64)


def planned() -> list[list[dict[str, list[int]]]]:
    drawn = torch.Generator().manual_seed(3)
    return [
        [{side: torch.randint(0, 7, (64,), generator=drawn).tolist() for side in SIDES} for _ in range(2)]
        for _ in range(3)
    ]


def test_bytes_are_whole_tiles_of_every_head():
    rule, bits = TileRule((32, 16, 16), "head"), planned()
    whole = TileLayout.of_classes(GEOMETRY, LAW, HeadGroups.both(2), bits, rule, 8)
    tokens = 4 + 640 + 128
    tags = 2 * 2 * 640 // 8
    assert PressTileLayout.of(whole, bits, 1.0).bytes(tokens) == whole.bytes(tokens) + tags
    # 192 tokens of 640 fill three tiles; 200 begin a fourth
    for keep, tiles in ((0.3, 3), (0.3125, 4)):
        found = PressTileLayout.of(whole, bits, keep)
        per_head = found.bytes(tokens) - whole.bytes(4 + 128) - tags
        assert per_head == tiles * round(sum(tile.total for tile in whole.tiles))
    law = PressTileLayout.of(whole, bits, 0.3)
    assert law.bits_packed == pytest.approx(0.3 * whole.bits_packed + 1 / 64, rel=1e-3)
    assert law.mean_bits == pytest.approx(0.3 * whole.mean_bits)
    assert sum(map(sum, law.token_bytes())) == pytest.approx(sum(tile.total for tile in whole.tiles) / 64)
    uneven = law.of_prompt(tokens, [[0.1, 0.5], [0.3, 0.3]])
    one, other = law.by_head[0]
    more = sum(tile.total for tile in law.by_head[1]) * 3 + one.total + 5 * other.total
    assert uneven.bytes(tokens) == whole.bytes(4 + 128) + tags + round(more)
    # what comes later is kept whole
    assert uneven.bytes(tokens + 64) - uneven.bytes(tokens) == round(sum(t.total for t in whole.tiles)) + 2 * 2 * 8
    assert packed_tokens(tokens + 64, LAW) == 704


def test_which_presses_go_with_tiles():
    assert load_recipe("loss-aware-tiles+kvzip-0.4").pressed
    with pytest.raises(AatcError, match="take tokens out of tiles again"):
        load_recipe("loss-aware-tiles+h2o-0.4")
