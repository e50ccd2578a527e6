"""The storage code, teacher-forced: against tiles where nothing is predicted, and against chunks of bytes read back."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from aatc_cli.config import Window
from aatc_cli.core import SIDES
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.predictive import LayerMaps, read_before, units_of
from aatc_cli.core.rope import apply_rope
from aatc_cli.core.stored_chunk import StoredCode
from aatc_cli.core.stored_layer import StoredLayer
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.core.tile_rule import TileRule
from aatc_cli.evals.forced.stored import stored_attention
from aatc_cli.evals.forced.tiles import tiled_logits
from aatc_cli.models.adapter import attention_sites, rebias
from aatc_cli.models.attention import attention_override, scored_logits
from aatc_cli.models.loading import find_model, load_model

WINDOW = Window(sinks=2, recent=32, flush=16)
RULE = TileRule((8, 4, 4))
LENGTH, FIRST = 109, 40


@pytest.fixture(params=["tiny_llama", "tiny_qwen2"])
def model(request):
    return load_model(find_model(str(request.getfixturevalue(request.param)))).double()


def tokens_of(seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 256, (1, LENGTH), generator=torch.Generator().manual_seed(seed))


def layers_of(rule: TileRule, bits: tuple[int, ...], depth: int = 0, within: str = "none") -> list[StoredLayer]:
    """Four layers of two kv heads of 16."""
    found = []
    units = units_of(32, {"k": 2, "v": 2})
    for layer in range(4):
        generator = torch.Generator().manual_seed(layer)
        sides = {}
        for side in SIDES:
            encode = torch.randn(2, 16, 16, generator=generator, dtype=torch.float64) + 3 * torch.eye(16)
            ones = torch.ones(32, dtype=torch.float64)
            codec = TransformCodec(encode, torch.linalg.inv(encode), ones, ones.long(), ones, "lloyd", scale_bits=16)
            sides[side] = TileCodec(codec, torch.tensor(bits)[:, None].expand(-1, 32).contiguous(), rule)
        below = torch.randn(min(layer, depth) * 64, 64, generator=generator, dtype=torch.float64) / 20
        inside = torch.zeros(64, 64, dtype=torch.float64)
        for unit, before in zip(units, read_before(units, within), strict=True):
            for columns in before:
                inside[columns, unit.columns] = torch.randn(16, 16, generator=generator, dtype=torch.float64) / 20
        maps = LayerMaps(below, inside if within != "none" else inside[:0])
        found.append(StoredLayer(sides, maps, rule, hides=not depth))
    return found


def stored_logits(model, sites, layers, tokens, note=None):
    with attention_override(model, sites, stored_attention(layers, WINDOW, note)):
        return scored_logits(model, tokens, FIRST)


@pytest.mark.parametrize("bits", [(3,), (0,)], ids=["coded", "dropped"])
def test_without_maps_and_with_one_class_it_is_the_code_of_tiles(model, bits):
    """Classes aside, which are told from exact rows here: the same codes, the same attention, dropped tokens hidden."""
    rule = TileRule((16,), "layer")
    layers, sites, tokens = layers_of(rule, bits), attention_sites(model), tokens_of()
    stored = stored_logits(model, sites, layers, tokens)
    tiled = tiled_logits(model, sites, [layer.codecs for layer in layers], rule, WINDOW, tokens, FIRST)
    torch.testing.assert_close(stored, tiled, rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize(("depth", "within"), [(2, "units"), (1, "none"), (0, "values")])
def test_a_reader_of_stored_bytes_sees_the_same(model, depth, within):
    """Chunks of a tile are written and read back layer by layer; queries read that and their own exact tokens."""
    layers, sites, tokens = layers_of(RULE, (1, 3, 5), depth, within), attention_sites(model), tokens_of()
    held, told, exact = {}, {}, {}

    def note(layer: int, codes: object, classes: torch.Tensor, decoded: torch.Tensor) -> None:
        held[layer], told[layer] = decoded[0], classes[0]

    encode = StoredLayer.encode
    calls = iter(range(4))

    def watched(self, rows, below, classes):
        exact[next(calls)] = rows[0].clone()
        return encode(self, rows, below, classes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoredLayer, "encode", watched)
        logits = stored_logits(model, sites, layers, tokens, note)
    code = StoredCode(layers, 2)
    parts = defaultdict(list)
    for start in range(0, held[0].shape[0], 16):
        span = slice(start, start + 16)
        data = code.encode([exact[i][span] for i in range(4)], [told[i][:, span] for i in range(4)])
        for layer, rows in enumerate(code.decode(data)[0]):
            parts[layer].append(rows)
    whole = [torch.cat(parts[layer]) for layer in range(4)]
    for layer in range(4):
        torch.testing.assert_close(whole[layer], held[layer], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logits, read_by(model, sites, whole, tokens), rtol=1e-9, atol=1e-9)


def read_by(model, sites, whole, tokens):
    """Token after token by hand: the packed ones of what was read back, sinks and window exact."""

    def attend(inputs):
        site = inputs.site
        rows = whole[site.layer]
        keys, values = (
            rebias(part, bias).view(1, -1, 2, 16).transpose(1, 2)
            for part, bias in ((rows[:, :32], site.k_bias), (rows[:, 32:], site.v_bias))
        )
        places = slice(WINDOW.sinks, WINDOW.sinks + rows.shape[0])
        keys = apply_rope(keys, inputs.cos[:, places], inputs.sin[:, places], site.rope)
        out, packed = torch.zeros_like(inputs.query), 0
        for t in range(LENGTH):
            while t + 1 - WINDOW.sinks - packed > WINDOW.recent:
                packed += WINDOW.flush
            seen_k, seen_v = inputs.key[:, :, : t + 1].clone(), inputs.value[:, :, : t + 1].clone()
            seen_k[:, :, WINDOW.sinks : WINDOW.sinks + packed] = keys[:, :, :packed]
            seen_v[:, :, WINDOW.sinks : WINDOW.sinks + packed] = values[:, :, :packed]
            for j in range(inputs.query.shape[1]):
                head = j // (inputs.query.shape[1] // 2)
                weights = (seen_k[0, head] @ inputs.query[0, j, t] * inputs.scaling).softmax(0)
                out[0, j, t] = weights @ seen_v[0, head]
        return out

    with attention_override(model, sites, attend):
        return scored_logits(model, tokens, FIRST)
