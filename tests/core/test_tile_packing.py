"""Tiles as bytes: what goes in comes out, every width, class and head group; bytes by the law; digits by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aatc_cli.core import SIDES
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.tile_bytes import TileBytes
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.core.tile_packing import TilePacking
from aatc_cli.core.tile_rule import TileRule

HEADS, DIM = 3, 16
CHANNELS = HEADS * DIM
RULES = [TileRule((32, 16, 16)), TileRule((48, 16), "layer"), TileRule((64,), "layer"), TileRule((16,) * 4)]


def codec_of(rule: TileRule, groups: int, seed: int, scale_bits: int = 8, quantizer: str = "lloyd") -> TileCodec:
    generator = torch.Generator().manual_seed(seed)
    size = CHANNELS // groups
    encode = torch.randn(groups, size, size, generator=generator, dtype=torch.float64) + 3 * torch.eye(size)
    bits = torch.randint(0, 9, (rule.classes, CHANNELS), generator=generator)
    bits[torch.rand(bits.shape, generator=generator) < 0.4] = 0
    # a head group without any bits, in one class alone
    bits[0, :size] = 0
    ones = torch.ones(CHANNELS, dtype=torch.float64)
    variance = torch.rand(CHANNELS, generator=generator, dtype=torch.float64) + 0.5
    codec = TransformCodec(encode, torch.linalg.inv(encode), ones, bits[0], variance, quantizer, scale_bits=scale_bits)
    return TileCodec(codec, bits, rule)


def classes_of(rule: TileRule, lead: tuple[int, ...], seed: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    received = torch.rand(*lead, rule.orders(HEADS), rule.tile, generator=generator)
    return rule.classes_of(received, 0, 0)


# a token has one class in a head group, so that with an order of its own each head is a group of its own
CASES = [(rule, groups) for rule in RULES for groups in (1, HEADS) if rule.order == "layer" or groups == HEADS]


@pytest.mark.parametrize("scale_bits", [4, 8, 16])
@pytest.mark.parametrize(("rule", "groups"), CASES, ids=lambda part: str(getattr(part, "quotas", part)))
def test_tiles_give_back_what_the_quantizer_of_each_class_gives(rule, groups, scale_bits):
    codecs = {side: codec_of(rule, groups, seed, scale_bits) for seed, side in enumerate(SIDES)}
    packing = TilePacking(codecs, rule, HEADS)
    lead = (2, 5)
    latents = {side: torch.randn(*lead, rule.tile, CHANNELS, dtype=torch.float64) for side in SIDES}
    classes = classes_of(rule, lead)
    data = packing.pack(latents, classes)
    assert data.dtype == torch.uint8
    assert data.shape == (*lead, packing.nbytes)
    found, again = packing.unpack(data)
    assert torch.equal(again, classes)
    by_group = classes.expand(*lead, groups, rule.tile)
    for side in SIDES:
        expected = torch.zeros_like(latents[side])
        for k in range(rule.classes):
            quantizer = codecs[side].of_class(k)
            mine = quantizer.dequantize(*quantizer.quantize(latents[side]))
            member = (by_group == k).transpose(-1, -2).repeat_interleave(CHANNELS // groups, -1)
            expected = torch.where(member, mine, expected)
        assert torch.equal(found[side], expected)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.quotas}-{rule.order}")
def test_bytes_are_those_of_the_law(rule):
    codecs = {side: codec_of(rule, HEADS, seed) for seed, side in enumerate(SIDES)}
    widths = {side: codecs[side].bits.view(rule.classes, HEADS, DIM).numpy() for side in SIDES}
    law = TileBytes.of(widths, rule, HEADS, 8)
    assert TilePacking(codecs, rule, HEADS).nbytes == law.total


def test_digits_stand_where_the_description_says():
    rule = TileRule((2,), "layer")
    bits = torch.tensor([[3, 0, 2, 1]])
    ones = torch.ones(4, dtype=torch.float64)
    eye = torch.eye(4, dtype=torch.float64)[None]
    codec = TileCodec(TransformCodec(eye, eye, ones, bits[0], ones, "uniform", scale_bits=16), bits, rule)
    side = TilePacking({"k": codec, "v": codec}, rule, 1).sides["k"]
    part = side.classes[0][0]
    codes = torch.tensor([[0b101, 0, 0b11, 1], [0b010, 0, 0b01, 0]])
    two, one = (
        digits.pack(codes).view(word) for digits, word in zip(part.digits, (torch.int32, torch.int16), strict=True)
    )
    # channel 0 has one digit of two bits above its lowest bit, channel 2 is one digit of two bits
    assert two.tolist() == [0b10 | 0b11 << 2, 0b01 | 0b01 << 2]
    assert one.tolist() == [0b1 | 0b1 << 1, 0]


def test_full_planes_use_every_bit():
    rule = TileRule((1,), "layer")
    bits = torch.full((1, 16), 3)
    ones = torch.ones(16, dtype=torch.float64)
    eye = torch.eye(16, dtype=torch.float64)[None]
    codec = TileCodec(TransformCodec(eye, eye, ones, bits[0], ones, "uniform", scale_bits=16), bits, rule)
    part = TilePacking({"k": codec, "v": codec}, rule, 1).sides["k"].classes[0][0]
    data, _ = part.unpack(torch.full((part.stop,), 255, dtype=torch.uint8), 16)
    assert data.tolist() == [[7] * 16]
    assert np.array_equal(part.sizes(), [4, 2, 2])
