"""Stored chunks of a code that predicts: what a codec gives back is what the layers decode to, fixed and variable."""

from __future__ import annotations

import pytest
import torch

from aatc_cli.core import SIDES
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.predictive import LayerMaps, read_before, units_of
from aatc_cli.core.rope import apply_rope
from aatc_cli.core.stepped_codec import SteppedCodec
from aatc_cli.core.stored_layer import StoredLayer
from aatc_cli.core.stored_rate import RateControl
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.errors import AatcError
from aatc_cli.runtime.stored.codec import StoredCodec
from aatc_cli.runtime.stored.header import ChunkError, ChunkHeader
from aatc_cli.runtime.stored.pages import Pages
from aatc_cli.runtime.stored.predicted_code import PredictedCode
from tests.runtime.test_stored_codec import GEOMETRY, RULE, angles, pages_of

BIASES = [
    {side: torch.randn(32, generator=torch.Generator().manual_seed(layer)) for side in SIDES} for layer in range(3)
]


def layers_of(kind: type[TransformCodec], *, hides: bool = False) -> list[StoredLayer]:
    found = []
    for layer in range(3):
        generator = torch.Generator().manual_seed(layer)
        pair = {}
        for side in SIDES:
            encode = torch.linalg.qr(torch.randn(2, 16, 16, generator=generator))[0]
            ones = torch.ones(32)
            codec = kind(encode, encode.mT.contiguous(), ones, ones.long(), ones, "lloyd", None, 8)
            bits = torch.tensor([[0] * 32, [2] * 32, [5, 3, 8, 0] * 8])
            pair[side] = TileCodec(codec, bits, RULE)
        below = torch.randn(min(layer, 2) * 64, 64, generator=generator) / 20
        inside = torch.zeros(64, 64)
        units = units_of(32, {"k": 2, "v": 2})
        for unit, before in zip(units, read_before(units, "units"), strict=True):
            for columns in before:
                inside[columns, unit.columns] = torch.randn(16, 16, generator=generator) / 20
        found.append(StoredLayer(pair, LayerMaps(below, inside), RULE, hides=hides))
    return found


def codec_of(kind: type[TransformCodec], tokens: int = 128) -> StoredCodec:
    code = PredictedCode(layers_of(kind), BIASES, 2)
    return StoredCodec(GEOMETRY, code, angles(), b"p" * 32, b"m" * 32, sinks=4, tokens=tokens)


@pytest.mark.parametrize("kind", [TransformCodec, SteppedCodec])
def test_what_comes_back_is_what_the_layers_decode_to(kind: type[TransformCodec]) -> None:
    """By hand: keys turned back, biases off, layer after layer from the lowest up, and turned again."""
    codec, pages, first = codec_of(kind), pages_of(), 128
    # machine code rounds what is decoded (tests/core/test_compiled_chunk.py)
    codec.code.chunks = codec.code.code
    received = torch.rand(3, 2, 128, generator=torch.Generator().manual_seed(1))
    got = codec.decode(codec.encode(pages, first, received), first, torch.float32)
    cos, sin = codec.rotation.tables(torch.arange(first, first + 128))
    below: list[torch.Tensor] = []
    layers = layers_of(kind)
    control = RateControl(layers, 2, 128) if layers[0].variable else None
    for place, layer in enumerate(layers):
        keys = apply_rope(pages.keys[place].transpose(0, 1)[None], cos[None], -sin[None], "half")[0].transpose(0, 1)
        rows = torch.cat(
            (keys.flatten(1) - BIASES[place]["k"], pages.values[place].flatten(1) - BIASES[place]["v"]), -1
        )
        classes = RULE.classes_of(received[place], first, place)
        coded = control.encode(place, rows, below, classes) if control else layer.encode(rows, below, classes)
        decoded = coded[1]
        below = [decoded, *below][:2]
        values = (decoded[:, 32:] + BIASES[place]["v"]).unflatten(-1, (2, 16))
        torch.testing.assert_close(got.values[place], values, rtol=1e-3, atol=1e-3)
        turned = (decoded[:, :32] + BIASES[place]["k"]).unflatten(-1, (2, 16)).transpose(0, 1)[None]
        expected = apply_rope(turned, cos[None], sin[None], "half")[0].transpose(0, 1)
        torch.testing.assert_close(got.keys[place], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", [TransformCodec, SteppedCodec])
def test_neighbouring_chunks_are_those_of_each_alone(kind: type[TransformCodec]) -> None:
    codec, pages = codec_of(kind, 64), pages_of(128)
    together = codec.encode_run(pages, 0)
    halves = [Pages(pages.keys[:, span], pages.values[:, span]) for span in (slice(0, 64), slice(64, 128))]
    assert together == [codec.encode(half, 64 * place) for place, half in enumerate(halves)]
    sizes = {len(chunk) for chunk in together}
    assert (codec.nbytes(64) in sizes) == (kind is TransformCodec)
    assert (codec.nbytes(64) is None) == (kind is SteppedCodec)


@pytest.mark.parametrize("kind", [TransformCodec, SteppedCodec])
def test_a_damaged_layer_is_refused(kind: type[TransformCodec]) -> None:
    codec = codec_of(kind, 64)
    data = codec.encode(pages_of(64), 64)
    header = ChunkHeader.read(memoryview(data))
    for start, (length, _) in zip(header.starts[1:], header.parts[1:], strict=False):
        damaged = bytearray(data)
        damaged[start + length // 2] ^= 1
        with pytest.raises(ChunkError):
            codec.decode(bytes(damaged), 64)


def test_codes_that_leave_tokens_out_of_attention_are_refused() -> None:
    with pytest.raises(AatcError, match="leaves tokens out"):
        PredictedCode(layers_of(TransformCodec, hides=True), BIASES, 2)
