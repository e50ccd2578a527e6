"""Codecs under everything a cache may be given: codes in range, results finite, errors within the quantizer's bound.

The bounds are derived here from the definitions: where the outermost levels of a channel lie and how wide its widest
cell is. Inside them a number is off by half that cell, outside by its distance to the nearest level. What the scales
may be is bounded apart from that, by the vectors alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import Tensor

from aatc_cli.core.block_codec import BlockCodec
from aatc_cli.core.casting import saturated
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.grouped import GroupedMinMax
from aatc_cli.core.joint import JointCodec
from aatc_cli.core.linear import LinearCodec
from aatc_cli.core.lloyd_levels import LLOYD_BITS, levels, uniform_step
from aatc_cli.core.plain import Float8Codec, NormedLloyd
from aatc_cli.core.precision_blocks import Block
from aatc_cli.core.quantizer import code_range
from aatc_cli.core.scales import scale_grid
from aatc_cli.core.signposts import SignpostCodec

CHANNELS, TOKENS = 24, 25
KINDS = (
    "normal",
    "zero",
    "constant",
    "one-hot",
    "subnormal",
    "tiny",
    "huge",
    "mixed-channels",
    "mixed-tokens",
    "two-sided",
    "heavy-tailed",
    "steps",
)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# the largest magnitude that is drawn: all of float16, and of the wider types what sums of products in float32 hold
LARGEST = {torch.float16: 65504.0, torch.bfloat16: 1e30, torch.float32: 1e30}
SUBNORMAL = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133, torch.float32: 2.0**-149}
EPS = torch.finfo(torch.float32).eps
HALF = 65504.0
# (quantizer, bits of a token scale)
QUANTIZERS = [(name, bits) for name in ("uniform-token-max", "lloyd", "uniform") for bits in (16, 8)]
COUNTS = [pytest.param(900, id="900"), pytest.param(10_800, id="10800", marks=pytest.mark.slow)]


def vectors(kind: str, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Vectors [T, C] of one kind, all finite in ``dtype``."""

    def normal(*size: int) -> Tensor:
        return torch.randn(*size or (TOKENS, CHANNELS), generator=generator, dtype=torch.float64)

    def uniform(*size: int) -> Tensor:
        return torch.rand(*size or (TOKENS, CHANNELS), generator=generator, dtype=torch.float64)

    largest, least = LARGEST[dtype], SUBNORMAL[dtype]
    octaves = torch.tensor(largest, dtype=torch.float64).log2() - 4
    one_hot = torch.nn.functional.one_hot(torch.randint(CHANNELS, (TOKENS,), generator=generator), CHANNELS)
    x = {
        "normal": lambda: normal(),
        "zero": lambda: 0 * normal(),
        "constant": lambda: 100 * normal(TOKENS, 1).expand(TOKENS, CHANNELS),
        "one-hot": lambda: 50 * normal(TOKENS, 1) * one_hot,
        "subnormal": lambda: torch.round(8 * normal()) * least,
        "tiny": lambda: normal() * least * torch.exp2(24 * uniform(TOKENS, 1)),
        "huge": lambda: torch.sign(normal()) * largest * (1 - uniform() / 8),
        "mixed-channels": lambda: normal() * torch.exp2(octaves * (2 * uniform(1, CHANNELS) - 1)),
        "mixed-tokens": lambda: normal() * torch.exp2(octaves * (2 * uniform(TOKENS, 1) - 1)),
        "two-sided": lambda: largest * torch.sign(normal()) * torch.where(uniform(TOKENS, 1) < 0.5, 1.0, 2.0**-12),
        "heavy-tailed": lambda: normal() / uniform().clamp_min(1e-4),
        # on the levels and thresholds of a quantizer whose step is a power of two
        "steps": lambda: torch.round(32 * normal()) / 16,
    }[kind]()
    return x.clamp(-largest, largest).to(dtype)


def draws(count: int, seed: int = 1) -> Iterator[tuple[str, Tensor]]:
    """``count`` vectors in blocks [T, C], kinds and dtypes in turn; the kind comes with its dtype's name."""
    generator = torch.Generator().manual_seed(seed)
    cases = [(kind, dtype) for kind in KINDS for dtype in DTYPES]
    assert count % (TOKENS * len(cases)) == 0
    for block in range(count // TOKENS):
        kind, dtype = cases[block % len(cases)]
        x = vectors(kind, dtype, generator)
        assert torch.isfinite(x).all()
        yield f"{kind} {dtype}", x


def random_codec(seed: int, quantizer: str, scale_bits: int) -> TransformCodec:
    """One site with widths 0..16, one to three head groups, channel scales over nine decades, in float32."""
    generator = torch.Generator().manual_seed(seed)
    groups = (1, 2, 3)[seed % 3]
    size = CHANNELS // groups
    basis = torch.linalg.qr(torch.randn(groups, size, size, generator=generator, dtype=torch.float64))[0]
    gains = torch.exp2(4 * torch.randn(groups, 1, size, generator=generator, dtype=torch.float64))
    scale = torch.exp2(5 * torch.randn(CHANNELS, generator=generator, dtype=torch.float64))
    return TransformCodec(
        encode=basis * gains,
        decode=(basis / gains).mT.contiguous(),
        scale=scale,
        variance=scale.square(),
        bits=torch.randint(0, 17, (CHANNELS,), generator=generator),
        quantizer=quantizer,
        scale_bits=scale_bits,
        weight=torch.rand(CHANNELS, generator=generator, dtype=torch.float64) + 0.1,
    ).to("cpu", torch.float32)


def off(x: Tensor) -> Tensor:
    """How far float16 may be from ``x`` (float64): 2^-11 of it, half a subnormal's unit, or what is beyond its end."""
    return torch.where(x.abs() <= HALF, (x.abs() * 2.0**-11).clamp_min(2.0**-25), x.abs() - HALF)


def scale_interval(codec: TransformCodec, h: Tensor) -> tuple[Tensor, Tensor]:
    """Least and greatest token scale that latents h [T, C] (float64) may get: [T, groups] each.

    The paper's is the largest |h / s| of the coded channels; a searched one is 0.6 to 2 times the root mean square of
    h / sigma over them. A byte is off by half a step of its grid, 2^(1/32), and by what float16 makes of the grid.
    """
    coded = codec.bits > 0
    unit = torch.where(coded, codec.scale if codec.quantizer == "uniform-token-max" else codec.variance.sqrt(), 1.0)
    ratio = torch.unflatten(torch.where(coded, h.abs() / unit.double(), 0.0), -1, (codec.groups, -1))
    if codec.quantizer == "uniform-token-max":
        low = high = ratio.amax(-1)
    else:
        count = torch.unflatten(coded, 0, (codec.groups, -1)).sum(-1).clamp_min(1)
        rms = (ratio.square().sum(-1) / count).sqrt()
        low, high = 0.6 * rms, 2 * rms
    low, high = low * (1 - 16 * EPS), high * (1 + 16 * EPS)
    low, high = (low - off(low)).clamp(0, HALF), (high + off(high)).clamp_max(HALF)
    if codec.scale_bits == 16:
        return low, high
    ends = scale_grid(torch.device("cpu"))[[1, 255]].double()
    step = 2.0 ** (1 / 32) * (1 + 2.0**-10)
    # a scale below the grid is its least one, or zero, which is better
    return torch.where(low < ends[0] * step, 0.0, (low / step).clamp_max(ends[1])), (high * step).clamp(*ends)


@cache
def cell(width: int, evenly: bool) -> tuple[float, float]:
    """Outermost level and widest gap of the quantizer of a unit normal."""
    if width == 0:
        return 0.0, 0.0
    if evenly or width > LLOYD_BITS:
        step = uniform_step(width)
        return (2**width - 1) / 2 * step, step
    points = levels(width)
    return float(points.max()), float(points.diff().max())


def latent_bound(codec: TransformCodec, h: Tensor, alpha: Tensor) -> Tensor:
    """Largest error of every latent h [T, C] (float64) under the scales alpha [T, groups], in exact arithmetic.

    The paper's levels reach from -alpha s to alpha s - step, so that at its upper end an error is a whole step.
    """
    held = alpha.double().repeat_interleave(CHANNELS // codec.groups, -1)
    if codec.quantizer == "uniform-token-max":
        reach = held * codec.scale.double()
        gap = reach * torch.exp2(1.0 - codec.bits.double())
        low, high = -reach, reach - gap
    else:
        cells = [cell(int(width), codec.quantizer == "uniform") for width in codec.bits]
        edge, widest = torch.tensor(cells, dtype=torch.float64).T
        unit = held * codec.variance.double().sqrt()
        low, high, gap = -unit * edge, unit * edge, unit * widest
    outside = torch.maximum(low - h, h - high)
    return torch.where(codec.bits > 0, torch.maximum(gap / 2, outside), h.abs())


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("quantizer", "scale_bits"), QUANTIZERS)
def test_codes_are_in_range_and_errors_within_the_bound(quantizer: str, scale_bits: int, count: int) -> None:
    """On the latents that the codec itself computes; its arithmetic is float32, as in a cache."""
    closest = 0.0
    for index, (kind, x) in enumerate(draws(count)):
        codec = random_codec(index, quantizer, scale_bits)
        h = codec.latents(x)
        codes, alpha = codec.quantize(h)
        low, high = code_range(codec.bits)
        assert codes.dtype == torch.int32
        assert ((codes >= low) & (codes <= high)).all(), kind
        least, greatest = scale_interval(codec, h.double())
        assert ((alpha.double() >= least) & (alpha.double() <= greatest)).all(), kind
        back, bound = codec.dequantize(codes, alpha).double(), latent_bound(codec, h.double(), alpha)
        # float32 moves a latent by a few units in its last place, and a step below its range by half of its least
        slack = 8 * EPS * (h.double().abs() + bound) + 2.0**-149 * torch.exp2(codec.bits.double() + 1)
        ratio = (back - h.double()).abs() / (bound + slack)
        assert (ratio <= 1).all(), kind
        closest = max([closest, *ratio[codes != 0].tolist()])
        found = codec.reconstruct(x)
        assert found.dtype == x.dtype
        assert torch.isfinite(found).all(), kind
    assert closest > 0.99


@pytest.mark.parametrize(("quantizer", "scale_bits"), QUANTIZERS)
def test_codes_and_scales_that_are_wrong_would_be_seen(quantizer: str, scale_bits: int) -> None:
    codec = random_codec(1, quantizer, scale_bits).with_bits(torch.full((CHANNELS,), 3))
    h = codec.latents(vectors("normal", torch.float32, torch.Generator().manual_seed(0)))
    codes, alpha = codec.quantize(h)
    bound = 1.0001 * latent_bound(codec, h.double(), alpha)
    assert ((codec.dequantize(codes, alpha) - h).abs() <= bound).all()
    neighbours = torch.where(codes < 3, codes + 1, codes - 1)
    assert ((codec.dequantize(neighbours, alpha) - h).abs() > bound).float().mean() > 0.5
    assert (4 * alpha.double() > scale_interval(codec, h.double())[1]).all()


def rounded(x: Tensor, bound: Tensor) -> Tensor:
    """``bound`` with room for float32 arithmetic and for the type that the result is given back in."""
    eps = torch.finfo(x.dtype).eps
    return bound + (eps + 8 * EPS) * (x.double().abs() + bound) + SUBNORMAL[x.dtype]


def check(kind: str, x: Tensor, found: Tensor, bound: Tensor) -> None:
    assert found.dtype == x.dtype
    assert torch.isfinite(found).all(), kind
    assert ((found.double() - x.double()).abs() <= rounded(x, bound)).all(), kind


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("bits", [0, 1, 2, 4, 8, 16])
@pytest.mark.parametrize("axis", ["token", "channel"])
def test_grouped_codes(axis: str, bits: int, count: int) -> None:
    """Minimum and step are float16 each: off by their rounding, the step as often as there are levels."""
    codec = GroupedMinMax(torch.full((CHANNELS,), bits), 8 if axis == "token" else 5, axis)
    for kind, x in draws(count):
        wide = x.double()
        groups = wide.unflatten(1, (-1, 8)) if axis == "token" else wide.unflatten(0, (-1, 5))
        dim = 2 if axis == "token" else 1
        low, high = groups.amin(dim, keepdim=True), groups.amax(dim, keepdim=True)
        levels = 2**bits - 1
        step = (high - low) / max(levels, 1)
        # the ends themselves come out of sums and differences in float32
        ends = 8 * EPS * (low.abs() + high.abs())
        bound = (step + off(step)) / 2 + off(low) + levels * off(step) + ends
        bound = (
            bound.expand_as(groups).flatten(dim - 1, dim) if axis == "token" else bound.expand_as(groups).flatten(0, 1)
        )
        check(kind, x, codec.reconstruct(x), bound if bits else wide.abs())


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("bits", [1, 3, 6])
def test_levels_after_the_norm(bits: int, count: int) -> None:
    edge, gap = cell(bits, False)
    for kind, x in draws(count):
        wide = x.double().unflatten(1, (-1, 8))
        norm = wide.norm(dim=2, keepdim=True)
        # float32 squares vanish below 2^-75 and overflow beyond float16's end: `off` bounds both
        low, high = ((norm + sign * off(norm)).clamp(0, HALF) / 8**0.5 for sign in (-1, 1))
        bound = torch.maximum(high * gap / 2, wide.abs() - low * edge)
        check(kind, x, NormedLloyd(bits, 8).reconstruct(x), bound.flatten(1))


@pytest.mark.parametrize("count", COUNTS)
def test_eight_bit_floats(count: int) -> None:
    for kind, x in draws(count):
        size = x.double().abs()
        check(
            kind, x, Float8Codec().reconstruct(x), torch.where(size <= 448, (size / 16).clamp_min(2.0**-10), size - 448)
        )


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("calibrated", [False, True])
def test_signposts(calibrated: bool, count: int) -> None:
    """Inside a range half the widest gap of the points, beyond the outermost point the distance; exact ones float16."""
    points = torch.tensor([-0.9, -0.5, -0.1, 0.05, 0.2, 0.3, 0.6, 0.95])
    generator = torch.Generator().manual_seed(4)
    low = -100 * torch.rand(CHANNELS, generator=generator)
    codec = SignpostCodec(points, 0.1, low, -2 * low, 5) if calibrated else SignpostCodec(points, 0.1)
    for kind, x in draws(count):
        centre, half, exact = (part.double() if part.is_floating_point() else part for part in codec.ranges(x.float()))
        wide = x.double()
        bound = torch.maximum(half * 0.4 / 2, (wide - centre).abs() - half * 0.9)
        bound = torch.where(half > 0, bound, (wide - centre).abs())
        check(kind, x, codec.reconstruct(x), torch.where(exact, off(wide), bound) + 8 * EPS * centre.abs())


@pytest.mark.parametrize("count", COUNTS)
def test_blocks_of_one_scale(count: int) -> None:
    codec = BlockCodec((Block(0, 8, 8), Block(8, 8, 3), Block(16, 4, 1)))
    for kind, x in draws(count):
        h = x.float()
        parts = []
        for block in codec.blocks:
            part = h[:, block.start : block.start + block.size].double()
            peak = saturated(part.abs().amax(1, keepdim=True), torch.float16).double()
            step = peak * 2.0 ** (1 - block.bits)
            parts.append(torch.where(peak > 0, torch.maximum(step / 2, part.abs() - peak + step / 2), part.abs()))
        check(kind, h, codec.reconstruct(h), torch.cat((*parts, h[:, 20:].double().abs()), 1))


@pytest.mark.parametrize("count", COUNTS)
def test_maps_around_codecs_stay_finite(count: int) -> None:
    generator = torch.Generator().manual_seed(2)
    basis = torch.linalg.qr(torch.randn(CHANNELS, CHANNELS, generator=generator))[0]
    mean = torch.randn(CHANNELS, generator=generator)
    linear = LinearCodec(basis[None], basis.T[None], GroupedMinMax(torch.full((CHANNELS,), 4), 8), mean)
    joint = JointCodec(basis, mean, BlockCodec((Block(0, 16, 4),)))
    for kind, x in draws(count):
        layers = x.unflatten(1, (3, 8)).transpose(0, 1)[:, None]
        for given, found in ((x, linear.reconstruct(x)), (layers, joint.reconstruct_layers(layers))):
            assert found.dtype == x.dtype
            assert found.shape == given.shape
            assert torch.isfinite(found).all(), kind


def test_narrower_types_saturate() -> None:
    x = torch.tensor([1e9, -1e9, 65519.0, 65521.0, torch.inf, -torch.inf, 1e-9, torch.nan])
    assert saturated(x, torch.float16).tolist()[:7] == [HALF, -HALF, HALF, HALF, HALF, -HALF, 0.0]
    assert saturated(x, torch.float16)[7].isnan()
    assert saturated(x, torch.float32) is x
    assert saturated(torch.tensor([3.4e38]), torch.bfloat16).isfinite().all()
