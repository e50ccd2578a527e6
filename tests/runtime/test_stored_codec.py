"""The codec of stored caches: what comes back, how many bytes it takes, and everything it must refuse."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
import torch

from aatc_cli.config import Geometry
from aatc_cli.core import SIDES
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.rope import apply_rope
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.core.tile_rule import TileRule
from aatc_cli.errors import AatcError
from aatc_cli.runtime.stored.code import TileCode
from aatc_cli.runtime.stored.codec import StoredCodec
from aatc_cli.runtime.stored.header import ChunkError, ChunkHeader
from aatc_cli.runtime.stored.host import with_threads
from aatc_cli.runtime.stored.host_decode import host_available
from aatc_cli.runtime.stored.pages import Pages
from aatc_cli.runtime.stored.rotation import UNTURNED, Rotation

GEOMETRY = Geometry(layers=3, heads=4, kv_heads=2, head_dim=16, hidden_size=64)
RULE = TileRule((32, 16, 16), "head")


def angles(style="half"):
    def tables(positions):
        pairs = positions[:, None].float() * torch.tensor([10000.0 ** (-i / 8) for i in range(8)])
        whole = torch.cat((pairs, pairs), -1) if style == "half" else pairs.repeat_interleave(2, -1)
        return whole.cos(), whole.sin()

    return Rotation(tables, style)


def code_of(widths=((0, 1, 3), (2, 3, 4), (4, 5, 8)), groups=2, scale_bits=8, rule=RULE, bias=False, quantizer="lloyd"):
    size, codecs, biases = 32 // groups, [], []
    for layer in range(3):
        pair, held = {}, {}
        for index, side in enumerate(SIDES):
            generator = torch.Generator().manual_seed(10 * layer + index)
            encode = torch.linalg.qr(torch.randn(groups, size, size, generator=generator))[0]
            ones = torch.ones(32)
            codec = TransformCodec(
                encode, encode.mT.contiguous(), 4 * ones, ones.long(), ones, quantizer, None, scale_bits
            )
            if bias:
                codec = replace(codec, centre=torch.randn(32, generator=generator))
            bits = torch.stack([torch.tensor(row).repeat(11)[:32] for row in widths[: rule.classes]])
            pair[side] = TileCodec(codec, bits, rule)
            held[side] = torch.randn(32, generator=generator) if bias else None
        codecs.append(pair)
        biases.append(held)
    return TileCode.of(codecs, biases, 2)


def codec_of(tokens=128, rotation=None, **changes):
    return StoredCodec(GEOMETRY, code_of(**changes), rotation or angles(), b"p" * 32, b"m" * 32, sinks=4, tokens=tokens)


def pages_of(tokens=128, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(3, tokens, 2, 16, generator=generator) for _ in range(2))
    return Pages(keys.to(dtype), values.to(dtype))


@pytest.mark.parametrize("first", [0, 2, 128])
@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_what_comes_back_is_the_plan_s_codec_between_the_rotations(first, style):
    """An independent way: the keys are turned back by hand, coded by the codec of each class, and turned again."""
    codec, pages = codec_of(rotation=angles(style), bias=True), pages_of()
    received = torch.rand(3, 2, 128, generator=torch.Generator().manual_seed(1))
    got = codec.decode(codec.encode(pages, first, received), first, torch.float32)
    sinks = max(4 - first, 0)
    assert torch.equal(got.keys[:, :sinks], pages.keys[:, :sinks])
    cos, sin = codec.rotation.tables(torch.arange(first, first + 128))
    for layer in codec.code.layers:
        ranked = received[layer.layer].clone()
        ranked[:, :sinks] = -1
        classes = RULE.classes_of(ranked[None], 0, 0)[0]
        for side, whole in (("k", pages.keys), ("v", pages.values)):
            x = whole[layer.layer].transpose(0, 1)[None]
            x = apply_rope(x, cos[None], -sin[None], style) if side == "k" else x
            rows = x[0].transpose(0, 1).flatten(1) - layer.biases[side]
            by_class = torch.stack([layer.codecs[side].of_class(k).reconstruct(rows) for k in range(3)])
            by_class = (by_class + layer.biases[side]).unflatten(-1, (2, 16))
            chosen = by_class.gather(0, classes.T[None, :, :, None].expand(1, -1, -1, 16))[0]
            chosen = chosen.transpose(0, 1)[None]
            expected = apply_rope(chosen, cos[None], sin[None], style) if side == "k" else chosen
            found = got.of(side)[layer.layer].transpose(0, 1)[None]
            assert torch.allclose(found[:, :, sinks:], expected[:, :, sinks:], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("first", [0, 64])
def test_bytes_are_known_before_and_sinks_are_exact(dtype, first):
    codec, pages = codec_of(), pages_of(dtype=dtype)
    data = codec.encode(pages, first)
    assert len(data) == codec.nbytes(first, dtype)
    got = codec.decode(data, first, dtype)
    assert got.keys.dtype == dtype
    assert got.shape == pages.shape
    sinks = 4 if first == 0 else 0
    assert torch.equal(got.values[:, :sinks].float(), pages.values[:, :sinks].float())
    wide = codec.decode(data, first, torch.float32)
    assert torch.equal(wide.keys[:, :sinks], pages.keys[:, :sinks].float())


def test_scales_of_8_bit_pages_count():
    scales = {side: torch.tensor([2.0, 4.0, 0.5]) for side in SIDES}
    codec, wide = replace(codec_of(), scales=scales), pages_of()
    narrow = Pages(
        *((part / scales["k"].view(-1, 1, 1, 1)).to(torch.float8_e4m3fn) for part in (wide.keys, wide.values))
    )
    held = Pages(*(part.float() * scales["k"].view(-1, 1, 1, 1) for part in (narrow.keys, narrow.values)))
    got = codec.decode(codec.encode(narrow, 64), 64, torch.float8_e4m3fn)
    plain = replace(codec, scales=None)
    expected = plain.decode(plain.encode(held, 64), 64, torch.float32)
    assert torch.equal(
        got.keys.float(), (expected.keys / scales["k"].view(-1, 1, 1, 1)).to(torch.float8_e4m3fn).float()
    )


@pytest.mark.skipif(not host_available(), reason="numba is not installed")
@pytest.mark.parametrize("quantizer", ["lloyd", "uniform", "uniform-token-max"])
@pytest.mark.parametrize("scale_bits", [4, 8, 16])
@pytest.mark.parametrize(("groups", "order"), [(2, "head"), (1, "layer")])
def test_the_kernel_of_the_cpu_is_the_code(quantizer, scale_bits, groups, order):
    rule = TileRule((32, 16, 16), order)
    codec = codec_of(groups=groups, scale_bits=scale_bits, rule=rule, quantizer=quantizer, bias=groups == 2)
    fast = with_threads(codec, 2)
    assert fast.fast is not None
    for first in (0, 512):
        data = codec.encode(pages_of(seed=first), first)
        for dtype, most in ((torch.float32, 1e-4), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)):
            expected, got = codec.decode(data, first, dtype), fast.decode(data, first, dtype)
            for side in SIDES:
                a, b = expected.of(side).float(), got.of(side).float()
                assert bool(((a - b).abs() <= most * (1 + a.abs())).all())
                assert got.of(side).dtype == dtype


@pytest.mark.skipif(not host_available(), reason="numba is not installed")
@pytest.mark.parametrize("style", ["interleaved", "half", "none"])
def test_the_kernel_turns_as_the_code_does(style):
    codec = codec_of(rotation=UNTURNED if style == "none" else angles(style), rule=TileRule((64,), "layer"))
    data = codec.encode(pages_of(), 256)
    expected, got = codec.decode(data, 256, torch.float32), with_threads(codec).decode(data, 256, torch.float32)
    assert torch.allclose(expected.keys, got.keys, atol=1e-4)


@pytest.mark.skipif(not host_available(), reason="numba is not installed")
def test_half_floats_of_the_kernel_are_torch_s():
    """Round to nearest even, denormals and saturation, against torch's own conversion."""
    import numpy as np
    from numba import njit

    from aatc_cli.runtime.kernels import host_floats

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, generator=generator) * torch.exp2(
        torch.randint(-30, 17, (4096,), generator=generator).float()
    )
    x[:4] = torch.tensor([0.0, -0.0, 1e6, -1e6])

    def written(convert):
        @njit
        def each(rows, out):
            for e in range(rows.shape[0]):
                out[e] = convert(rows[e])

        out = np.zeros(4096, np.uint16)
        each(x.numpy(), out)
        return torch.from_numpy(out.view(np.int16))

    assert torch.equal(written(host_floats.half_of).view(torch.float16), x.clamp(-65504, 65504).half())
    assert torch.equal(written(host_floats.brain_of).view(torch.bfloat16), x.bfloat16())
    # what machines without the instruction do
    by_hand = written(host_floats.half_by_hand).view(torch.float16)
    inside = x.abs() <= 65504
    assert torch.equal(by_hand[inside], x[inside].half())


@pytest.mark.skipif(not host_available(), reason="numba is not installed")
@pytest.mark.parametrize(
    ("changes", "style"),
    [
        ({"bias": True, "scale_bits": 8}, "half"),
        ({"rule": TileRule((64,), "layer"), "groups": 1, "scale_bits": 16}, "interleaved"),
        ({"quantizer": "uniform", "scale_bits": 4}, "none"),
        ({"widths": ((1, 2, 3), (4, 5, 6), (7, 8, 2))}, "half"),
    ],
)
def test_the_encoder_of_the_cpu_writes_the_bytes_of_the_code(changes, style):
    """All but those where two scales are as good as one another to rounding: of such a token the error is the same."""
    codec = codec_of(rotation=UNTURNED if style == "none" else angles(style), **changes)
    fast = with_threads(codec, 2)
    assert fast.coder is not None
    for first, dtype in ((0, torch.float16), (512, torch.bfloat16), (512, torch.float32)):
        pages = pages_of(seed=first + 1, dtype=dtype)
        before = pages.keys.clone()
        slow, quick = codec.encode(pages, first), fast.encode(pages, first)
        assert torch.equal(before, pages.keys)
        changed = sum(a != b for a, b in zip(slow, quick, strict=True))
        assert changed < 0.03 * len(slow)
        wide = Pages(pages.keys.float(), pages.values.float())
        errors = [
            sum(float((got.of(side) - wide.of(side)).square().sum()) for side in SIDES)
            for got in (codec.decode(data, first, torch.float32) for data in (slow, quick))
        ]
        assert abs(errors[0] - errors[1]) < 2e-3 * errors[0]
    with pytest.raises(AatcError, match="not finite"):
        fast.encode(Pages(pages_of(dtype=torch.float16).keys * torch.inf, pages_of(dtype=torch.float16).values), 0)


@pytest.mark.parametrize("quick", [False, True])
def test_neighbours_are_read_together_as_one_after_another(quick):
    codec = with_threads(codec_of(), 2) if quick else codec_of()
    chunks = [codec.encode(pages_of(seed=index), 128 * index) for index in range(3)]
    names = [bytes(32)] * 3
    got = codec.decode_run(chunks, 0, torch.float16, names)
    each = [codec.decode(data, 128 * index) for index, data in enumerate(chunks)]
    assert torch.equal(got.keys, torch.cat([one.keys for one in each], 1))
    assert torch.equal(got.values, torch.cat([one.values for one in each], 1))
    with pytest.raises(ChunkError, match="another position"):
        codec.decode_run([chunks[0], chunks[2]], 0)


def test_tokens_that_received_more_have_more_bits():
    codec, pages = codec_of(), pages_of()
    received = torch.arange(128).float().expand(3, 2, 128)
    got = codec.decode(codec.encode(pages, 64, received), 64, torch.float32)
    error = (got.values - pages.values).square().mean((0, 2, 3)).view(2, 64)
    assert bool((error[:, :32].mean(1) > error[:, 48:].mean(1)).all())


@pytest.mark.parametrize("stand_in", ["energy", "key-norm", "value-norm", "place"])
def test_every_stand_in_ranks(stand_in):
    codec = replace(codec_of(), stand_in=stand_in)
    assert codec.decode(codec.encode(pages_of(), 0), 0).shape == (3, 128, 2, 16)


def test_what_a_chunk_holds_of_the_caller_is_not_changed():
    codec, pages, received = codec_of(), pages_of(), torch.rand(3, 2, 128)
    before = pages.keys.clone(), received.clone()
    codec.encode(pages, 0, received)
    assert torch.equal(pages.keys, before[0])
    assert torch.equal(received, before[1])


def changed(data, place, value=None):
    found = bytearray(data)
    found[place] = found[place] ^ 0x41 if value is None else value
    return bytes(found)


def newer(data):
    return changed(data, 8, 2)


REFUSED = {
    "another plan": (lambda c: replace(c, plan=b"q" * 32), lambda d: d, 64, "another plan"),
    "another model": (lambda c: replace(c, model=b"q" * 32), lambda d: d, 64, "another model"),
    "another chunk size": (lambda c: replace(c, tokens=64), lambda d: d, 64, "another length"),
    "another position": (lambda c: c, lambda d: d, 128, "another position: 64, not 128"),
    "a newer format": (lambda c: c, newer, 64, "version 2"),
    "no chunk": (lambda c: c, lambda d: b"x" * len(d), 64, "no stored chunk"),
    "nothing": (lambda c: c, lambda d: b"", 64, "no stored chunk"),
    "a head cut short": (lambda c: c, lambda d: d[:170], 64, "cut short"),
    "an end cut short": (lambda c: c, lambda d: d[:-1], 64, "bytes"),
    "a longer file": (lambda c: c, lambda d: d + b"\0", 64, "bytes"),
    "a damaged head": (lambda c: c, lambda d: changed(d, 60), 64, "checksum"),
    "a damaged layer": (lambda c: c, lambda d: changed(d, len(d) - 100), 64, "layer 2 does not match"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_anything_else_is_refused(what):
    other, damage, first, says = REFUSED[what]
    codec = codec_of()
    data = codec.encode(pages_of(), 64)
    with pytest.raises(ChunkError, match=says) as caught:
        other(codec).decode(damage(data), first)
    assert "again" in (caught.value.hint or "")


def test_every_byte_of_a_chunk_is_covered():
    """No byte but padding can change without the chunk being refused."""
    codec = codec_of(tokens=64)
    data = codec.encode(pages_of(64), 0)
    header = ChunkHeader.read(memoryview(data))
    inside = set(range(header.nbytes))
    for start, (length, _) in zip(header.starts, header.parts, strict=False):
        inside |= set(range(start, start + length))
    generator = torch.Generator().manual_seed(0)
    for place in torch.randint(0, len(data), (300,), generator=generator).tolist():
        if place in inside:
            with pytest.raises(ChunkError):
                codec.decode(changed(data, place), 0)


def test_a_name_is_asked_for():
    codec = codec_of()
    data = codec.encode(pages_of(), 64, name=b"n" * 32)
    codec.decode(data, 64)
    codec.decode(data, 64, name=b"n" * 32)
    with pytest.raises(ChunkError, match="another name"):
        codec.decode(data, 64, name=b"o" * 32)


def test_a_head_that_lies_about_its_parts_is_refused():
    codec = codec_of()
    data = codec.encode(pages_of(), 64)
    header = ChunkHeader.read(memoryview(data))
    parts = list(header.parts)
    parts[1], parts[2] = (parts[1][0] - 64, parts[1][1]), (parts[2][0] + 64, parts[2][1])
    body = replace(header, parts=tuple(parts)).pack() + data[header.nbytes :]
    with pytest.raises(ChunkError, match="another size"):
        codec.decode(body, 64)
    assert struct.unpack_from("<H", data, 8)[0] == 1


@pytest.mark.parametrize(
    ("pages", "positions", "says"),
    [
        (pages_of(64), 0, "a chunk is"),
        (Pages(pages_of().keys.double(), pages_of().values.double()), 0, "float64"),
        (Pages(pages_of().keys * torch.inf, pages_of().values), 0, "not finite"),
        (pages_of(), torch.arange(0, 256, 2), "do not follow"),
        (pages_of(), torch.arange(64), "128 positions"),
        (pages_of(), -1, "no position"),
    ],
)
def test_pages_that_are_no_chunk_are_refused(pages, positions, says):
    with pytest.raises(AatcError, match=says):
        codec_of().encode(pages, positions)


def test_a_plan_that_hides_tokens_is_refused():
    """A live cache masks tokens of a class without bits; pages would show attention keys of zeros instead."""
    with pytest.raises(AatcError, match="in 3 of 3 layers the plan leaves tokens out") as caught:
        code_of(widths=((0, 0, 0), (2, 3, 4), (4, 5, 8)))
    assert "lowest_bits" in (caught.value.hint or "")


def test_attention_of_another_shape_is_refused():
    with pytest.raises(AatcError, match="attention received"):
        codec_of().encode(pages_of(), 0, torch.zeros(3, 2, 64))
