"""Chunks of the storage code: what encoding says they decode to, unit by unit; fixed bytes; anything else refused."""

from __future__ import annotations

import pytest
import torch

from aatc_cli.core import SIDES
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.predictive import LayerMaps, read_before, units_of
from aatc_cli.core.stored_chunk import StoredCode
from aatc_cli.core.stored_layer import StoredLayer
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.core.tile_rule import TileRule
from aatc_cli.errors import AatcError

HEADS, DIM, LAYERS = 3, 8, 4
CHANNELS = HEADS * DIM
# of the tokens that are decoded by hand
STEP = 11


def codec_of(rule: TileRule, groups: int, generator: torch.Generator) -> TileCodec:
    size = CHANNELS // groups
    encode = torch.randn(groups, size, size, generator=generator) / 3 + 2 * torch.eye(size)
    bits = torch.randint(0, 9, (rule.classes, CHANNELS), generator=generator)
    bits[torch.rand(bits.shape, generator=generator) < 0.4] = 0
    bits[0, :size] = 0
    ones = torch.ones(CHANNELS)
    variance = torch.rand(CHANNELS, generator=generator) + 0.5
    codec = TransformCodec(encode, torch.linalg.inv(encode), ones, bits[0], variance, "lloyd", scale_bits=8)
    return TileCodec(codec, bits, rule)


def maps_of(layer: int, depth: int, within: str, rank: int, generator: torch.Generator) -> LayerMaps:
    rows = min(layer, depth) * 2 * CHANNELS
    below = torch.randn(rank if rank and rows else rows, 2 * CHANNELS, generator=generator) / 10
    squeeze = torch.randn(rows, rank, generator=generator) / 10 if rank and rows else None
    inside = torch.zeros(2 * CHANNELS, 2 * CHANNELS)
    units = units_of(CHANNELS, {"k": HEADS, "v": HEADS})
    for unit, before in zip(units, read_before(units, within), strict=True):
        for columns in before:
            inside[columns, unit.columns] = torch.randn(DIM, DIM, generator=generator) / 10
    return LayerMaps(below, inside if within != "none" else inside[:0], squeeze)


def code_of(rule: TileRule, depth: int, within: str, rank: int = 0, seed: int = 3) -> StoredCode:
    generator = torch.Generator().manual_seed(seed)
    layers = [
        StoredLayer(
            {side: codec_of(rule, HEADS, generator) for side in SIDES},
            maps_of(layer, depth, within, rank, generator),
            rule,
        )
        for layer in range(LAYERS)
    ]
    return StoredCode(layers, HEADS)


def chunk_of(rule: TileRule, tokens: int, seed: int = 4) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(tokens, 2 * CHANNELS, generator=generator) for _ in range(LAYERS)]
    received = torch.rand(LAYERS, rule.orders(HEADS), tokens, generator=generator)
    return rows, [rule.classes_of(received[layer], 0, layer) for layer in range(LAYERS)]


RULES = [TileRule((32, 16, 16)), TileRule((48, 16), "layer"), TileRule((64,), "layer")]
CASES = [(0, "none", 0), (1, "none", 0), (2, "units", 0), (2, "values", 5), (0, "units", 0)]


def by_hand(code: StoredCode, rows: list[torch.Tensor], classes: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same one token after another: each by the quantizer of its own class, from what is decoded so far."""
    decoded = [torch.zeros_like(layer) for layer in rows]
    for place, layer in enumerate(code.layers):
        maps = layer.maps
        for token in range(0, rows[0].shape[0], STEP):
            for unit in layer.units:
                told = torch.zeros(unit.columns.stop - unit.columns.start)
                if maps.layers:
                    below = torch.cat([decoded[place - 1 - j][token] for j in range(maps.layers)])
                    below = below if maps.squeeze is None else below @ maps.squeeze
                    told = told + below @ maps.below[:, unit.columns]
                if maps.within.shape[0]:
                    told = told + decoded[place][token] @ maps.within[:, unit.columns]
                order = unit.group if classes[place].shape[0] > 1 else 0
                site = layer.codecs[unit.side].of_class(int(classes[place][order, token]))
                whole = torch.zeros(CHANNELS)
                span = slice(unit.columns.start % CHANNELS, unit.columns.start % CHANNELS + DIM)
                whole[span] = rows[place][token, unit.columns] - told
                decoded[place][token, unit.columns] = told + site.reconstruct(whole)[span]
    return decoded


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.quotas}")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunks_decode_to_what_encoding_held(rule, case):
    code = code_of(rule, *case)
    rows, classes = chunk_of(rule, 128)
    data = code.encode(rows, classes)
    found, again = code.decode(data)
    assert all(torch.equal(a, b) for a, b in zip(again, classes, strict=True))
    for mine, expected in zip(found, by_hand(code, rows, classes), strict=True):
        torch.testing.assert_close(mine[::STEP], expected[::STEP], rtol=1e-4, atol=1e-4)


def test_every_chunk_of_fixed_codes_takes_the_same_bytes():
    code = code_of(RULES[0], 2, "units")
    sizes = {len(code.encode(*chunk_of(RULES[0], 128, seed))) for seed in range(3)}
    assert sizes == {4 * (2 + LAYERS) + sum(planes.nbytes(128) for planes in code.packings)}


def test_bytes_that_are_no_chunk_are_refused():
    code = code_of(RULES[0], 1, "none")
    data = code.encode(*chunk_of(RULES[0], 64))
    for wrong in (b"", data[:-1], data + b"\0", data[:8] + b"\xff" * 4 + data[12:]):
        with pytest.raises(AatcError, match=r"no chunk|not those"):
            code.decode(wrong)
    with pytest.raises(AatcError, match="whole tiles"):
        code.encode(*chunk_of(TileRule((16, 16)), 96))
