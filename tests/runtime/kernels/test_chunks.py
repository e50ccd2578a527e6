"""The Triton kernels of stored chunks against the codec in torch, under Triton's interpreter."""

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
from dataclasses import replace
import torch
from test_stored_codec import RULE, TileRule, UNTURNED, angles, codec_of, pages_of
from aatc_cli.runtime.stored.device_decode import DeviceDecoder
from aatc_cli.runtime.stored.device_encode import DeviceEncoder

CASES = ("half", 8, RULE, 2), ("interleaved", 4, RULE, 2), ("none", 16, TileRule((64,), "layer"), 1)
for style, scale_bits, rule, groups in CASES:
    rotation = UNTURNED if style == "none" else angles(style)
    codec = codec_of(tokens=64, rotation=rotation, scale_bits=scale_bits, rule=rule, groups=groups, bias=groups == 2)
    pages = [pages_of(64, seed=seed) for seed in (0, 1)]
    chunks = [codec.encode(each, 256 + 64 * seed) for seed, each in enumerate(pages)]
    wanted = codec.decode_run(chunks, 256, torch.float32)
    decoder = DeviceDecoder(codec.code, codec.rotation, 64, "cpu")
    for decoder.split in (False, True):
        fast = replace(codec, fast=decoder)
        got = fast.decode_run(chunks, 256, torch.float32)
        for side in "kv":
            near = (got.of(side) - wanted.of(side)).norm() / wanted.of(side).norm()
            assert float(near) < 1e-3, (style, scale_bits, side, decoder.split)
    half = fast.decode_run(chunks, 256, torch.float16)
    assert half.keys.dtype == torch.float16 and torch.allclose(half.keys.float(), got.keys, atol=2e-2)
    quick = replace(codec, coder=DeviceEncoder(codec.code, "cpu"))
    again = [quick.encode(each, 256 + 64 * seed) for seed, each in enumerate(pages)]
    changed = sum(a != b for one, other in zip(again, chunks) for a, b in zip(one, other))
    assert changed < 0.02 * sum(map(len, chunks)), changed
print("equal")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernels_are_the_codec_under_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    code = INTERPRETED.replace("FOLDER", repr(str(Path(__file__).parent.parent)))
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().endswith("equal")
