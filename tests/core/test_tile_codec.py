"""The codec of tiles: what the class of a token gives back is what coding for all classes and choosing gives."""

from __future__ import annotations

import pytest
import torch

from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.core.tile_rule import TileRule

RULE = TileRule((32, 16, 16))


def tile_codec(groups: int) -> TileCodec:
    torch.manual_seed(groups)
    size = 16 // groups
    encode = torch.linalg.qr(torch.randn(groups, size, size, dtype=torch.float64)).Q
    codec = TransformCodec(
        encode,
        encode.mT.contiguous(),
        torch.ones(16, dtype=torch.float64),
        torch.zeros(16, dtype=torch.int64),
        torch.rand(16, dtype=torch.float64) + 0.1,
        "lloyd",
        centre=torch.randn(16, dtype=torch.float64),
    )
    return TileCodec(codec, torch.randint(0, 5, (3, 16)), RULE)


@pytest.mark.parametrize(("groups", "orders"), [(2, 2), (2, 1), (1, 1), (1, 2)])
def test_coding_for_the_class_of_a_token_is_choosing_among_all(groups: int, orders: int) -> None:
    codec = tile_codec(groups)
    x = torch.randn(2, 128, 16, dtype=torch.float64)
    classes = RULE.classes_of(torch.rand(2, orders, 128), 0, 0)
    every = torch.unflatten(codec.reconstruct(x), -1, (orders, -1))
    got = torch.unflatten(codec.reconstruct_chosen(x, classes), -1, (orders, -1))
    for b in range(2):
        for token in range(128):
            for order in range(orders):
                wanted = every[classes[b, order, token], b, token, order]
                torch.testing.assert_close(got[b, token, order], wanted, rtol=1e-12, atol=1e-12)


def test_a_codec_that_was_moved_knows_its_widths() -> None:
    codec = tile_codec(2)
    there = codec.to("cpu", torch.float64)
    assert there.widths == tuple(tuple(row) for row in codec.bits.tolist())
    assert [there.of_class(k).widths for k in range(3)] == list(there.widths)
    x = torch.randn(2, 64, 16, dtype=torch.float64)
    assert torch.equal(there.reconstruct(x), codec.reconstruct(x))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_codecs_that_nobody_waits_for_arrive_whole() -> None:
    """Many of them, each used at once: what a GPU gives back is what a CPU does."""
    x = torch.randn(2, 64, 16)
    classes = RULE.classes_of(torch.rand(2, 2, 64), 0, 0)
    made = [tile_codec(2).to("cuda") for _ in range(200)]
    here = tile_codec(2).to("cpu")
    wanted = here.reconstruct_chosen(x, classes)
    for there in made:
        torch.testing.assert_close(
            there.reconstruct_chosen(x.cuda(), classes.cuda()).cpu(), wanted, rtol=1e-4, atol=1e-5
        )
