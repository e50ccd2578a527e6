"""Codecs with random invertible transforms and random widths, for tests of the live cache."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from aatc_cli.core import SIDES
from aatc_cli.core.codec import TransformCodec


def make_codec(
    channels: int, groups: int, bits, seed: int = 0, quantizer: str = "uniform-token-max", dtype=torch.float64
):
    """One site. ``bits`` is a width, a list of widths, or "mixed" for random widths 0..16 with many zeros."""
    generator = torch.Generator().manual_seed(seed)
    size = channels // groups
    encode = torch.randn(groups, size, size, generator=generator, dtype=torch.float64)
    encode = encode + 3 * torch.eye(size, dtype=torch.float64)
    if bits == "mixed":
        widths = torch.randint(0, 17, (channels,), generator=generator)
        widths[torch.rand(channels, generator=generator) < 0.3] = 0
    elif isinstance(bits, int):
        widths = torch.full((channels,), bits)
    else:
        widths = torch.tensor(bits)
    return TransformCodec(
        encode=encode, decode=torch.linalg.inv(encode), bits=widths,
        scale=torch.rand(channels, generator=generator, dtype=torch.float64) + 0.5,
        variance=torch.rand(channels, generator=generator, dtype=torch.float64) + 0.5, quantizer=quantizer,
    ).to("cpu", dtype)  # fmt: skip


def make_codecs(layers: int, channels: int, groups: int, bits, seed: int = 0, **options):
    """Codecs of a whole model, every site with its own transform."""
    return [
        {side: make_codec(channels, groups, bits, seed + 2 * layer + i, **options) for i, side in enumerate(SIDES)}
        for layer in range(layers)
    ]


@pytest.fixture(scope="session")
def codec() -> Callable[..., TransformCodec]:
    return make_codec


@pytest.fixture(scope="session")
def codecs() -> Callable[..., list]:
    return make_codecs
