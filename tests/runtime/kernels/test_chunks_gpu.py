"""Stored chunks that kernels write and read on a GPU: bytes and pages of the torch code on the same device."""

from __future__ import annotations

import pytest
import torch

from aatc_cli.config import Geometry
from aatc_cli.core import SIDES
from aatc_cli.evals.bench.chunks import Form, codec_of, random_pages
from aatc_cli.runtime.stored.device import on_device
from aatc_cli.runtime.stored.device_decode import DeviceDecoder, device_available

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and device_available("cuda")), reason="needs a CUDA device and Triton"
    ),
]
ONE, THREE = (64,), (32, 16, 16)


@pytest.mark.parametrize(
    ("heads", "dim", "form"),
    [
        (3, 64, Form(3, ONE, 2.0)),
        (3, 64, Form(1, THREE, 2.0)),
        (8, 128, Form(4, ONE, 1.0)),
        (1, 256, Form(1, ONE, 3.0)),
    ],
)
def test_bytes_and_pages_are_those_of_torch(heads: int, dim: int, form: Form) -> None:
    """Groups of 64, 192, 256 and 512 channels; pages to the rounding of factors in float16."""
    geometry = Geometry(layers=2, heads=heads, kv_heads=heads, head_dim=dim, hidden_size=heads * dim)
    plain, pages = codec_of(geometry, form, "cuda"), random_pages(geometry, 512, "cuda")
    codec = on_device(plain)
    assert isinstance(codec.fast, DeviceDecoder)
    chunks, slow = codec.encode_run(pages, 0), plain.encode_run(pages, 0)
    changed = sum(a != b for one, other in zip(chunks, slow, strict=True) for a, b in zip(one, other, strict=True))
    assert changed < 0.01 * sum(map(len, slow))
    wanted = plain.decode_run(chunks, 0, torch.float32)
    for codec.fast.split in (True, False):
        got = codec.decode_run(chunks, 0, torch.float32)
        for side in SIDES:
            error = (got.of(side) - wanted.of(side)).norm() / wanted.of(side).norm()
            assert float(error) < 1e-3, (side, codec.fast.split)
