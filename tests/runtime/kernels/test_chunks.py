"""The Triton kernel of stored chunks against the codec in torch, under Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERPRETED = """
import sys
sys.path.insert(0, FOLDER)
import torch
from test_stored_codec import RULE, TileRule, UNTURNED, angles, codec_of, pages_of
from aatc_cli.runtime.stored.device_decode import DeviceDecoder
from aatc_cli.runtime.stored.header import ChunkHeader

CASES = ("half", 8, RULE, 2), ("interleaved", 4, RULE, 2), ("none", 16, TileRule((64,), "layer"), 1)
for style, scale_bits, rule, groups in CASES:
    rotation = UNTURNED if style == "none" else angles(style)
    codec = codec_of(rotation=rotation, scale_bits=scale_bits, rule=rule, groups=groups, bias=groups == 2)
    chunks = [codec.encode(pages_of(seed=seed), 256 + 128 * seed) for seed in (0, 1)]
    expected = [codec.decode(data, 256 + 128 * seed, torch.float32) for seed, data in enumerate(chunks)]
    decoder = DeviceDecoder(codec.code, codec.rotation, 128, "cpu")
    first = ChunkHeader.read(memoryview(chunks[0])).starts[1]
    starts = torch.tensor([first, len(chunks[0]) + first])
    data = torch.frombuffer(bytearray(b"".join(chunks)), dtype=torch.uint8)
    got = decoder.decode(data, starts, torch.arange(256, 512), torch.float32)
    for side in "kv":
        wanted = torch.cat([pages.of(side) for pages in expected], 1)
        assert float((got.of(side) - wanted).abs().max()) < 1e-4, (style, scale_bits, side)
    half = decoder.decode(data, starts, torch.arange(256, 512), torch.float16)
    assert half.keys.dtype == torch.float16 and torch.allclose(half.keys.float(), got.keys, atol=2e-2)
print("equal")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernel_is_the_codec_under_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    code = INTERPRETED.replace("FOLDER", repr(str(Path(__file__).parent.parent)))
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().endswith("equal")
