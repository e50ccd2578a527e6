"""The arithmetic of times, and the logits that a speed is worth nothing without."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from aatc_cli.config import Window
from aatc_cli.core import SIDES
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.core.tile_rule import TileRule
from aatc_cli.evals.speed import parts
from aatc_cli.evals.speed.expected import check_logits, expected_logits
from aatc_cli.evals.speed.timing import alternate, speed_row
from aatc_cli.models.adapter import attention_layers
from aatc_cli.models.loading import find_model, load_model
from aatc_cli.runtime.attach import attach_codecs
from aatc_cli.runtime.session import Session
from aatc_cli.runtime.tiles.form import tiles_spec

WINDOW = Window(sinks=2, recent=8, flush=4)


def test_functions_take_turns_and_the_order_is_reversed_every_other_time():
    called = []

    def timed(name):
        return lambda: called.append(name) or float(len(called))

    seconds = alternate([timed("a"), timed("b"), timed("c")], 3)
    assert "".join(called) == "abc" + "cba" + "abc"
    assert seconds == [[1, 6, 7], [2, 5, 8], [3, 4, 9]]


def test_a_row_compares_within_a_repeat():
    # the machine is twice as slow in the second repeat: that is in the times, not in the ratios
    row = speed_row("decode", 100, 2, "torch", [0.3, 0.6, 0.45], [0.1, 0.2, 0.3], 77)
    assert (row.ratio, row.ratio_low, row.ratio_high) == pytest.approx((3.0, 1.5, 3.0))
    assert (row.milliseconds, row.milliseconds_low, row.milliseconds_high) == pytest.approx((450, 300, 600))
    assert row.bytes_moved == 77


def test_a_captured_step_is_timed_over_whole_flush_blocks(monkeypatch):
    done = []

    class Decoder:
        def __init__(self, session, rows, room):
            done.append((rows, room))

        def start(self, cache, tokens):
            done.append((cache, tokens.tolist()))

        def step(self):
            done.append("step")

    monkeypatch.setattr(parts, "RaggedDecoder", Decoder)
    packed = SimpleNamespace(attached=nullcontext)
    bench = SimpleNamespace(
        filled=lambda session: "filled",
        packed=packed,
        batch=2,
        context=3,
        steps=4,
        repeats=2,
        ids=torch.arange(20).view(2, 10),
        wait=lambda: None,
    )
    assert len(parts.captured_seconds(bench)) == 2
    # one repeat more, which warms up
    assert done == [(2, 3 + 4 * 3), ("filled", [3, 13]), *["step"] * 12]


def test_the_check_allows_a_part_of_what_compression_does_and_rounding():
    expected = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    plain = expected + 0.1
    for shift, good in ((0.024, True), (0.026, False), (0.2, False)):
        error, bound = check_logits(expected + shift, expected, plain)
        assert error == pytest.approx(shift, rel=1e-4)
        assert (error <= bound) == good
    error, bound = check_logits(expected + 1e-6, expected, expected)
    assert error <= bound < 1e-3
    broken = expected.clone()
    broken[1, 3] = torch.nan
    error, bound = check_logits(broken, expected, plain)
    assert not error <= bound


@torch.no_grad()
@pytest.mark.parametrize("family", ["tiny_llama", "tiny_qwen2"])
@pytest.mark.parametrize(("length", "batch"), [(6, 1), (60, 1), (61, 3)])
def test_expected_logits_are_those_of_the_packed_cache(request, codecs, family, length, batch):
    model = load_model(find_model(str(request.getfixturevalue(family)))).double()
    sites = codecs(4, 32, 2, 4)
    tokens = torch.randint(0, 256, (batch, length + 1), generator=torch.Generator().manual_seed(length))
    expected = expected_logits(model, sites, WINDOW, tokens)
    with attach_codecs(model, sites, WINDOW) as session:
        cache = session.new_cache()
        model(tokens[:, :-1], **{session.keyword: cache})
        got = model(tokens[:, -1:], **{session.keyword: cache}).logits[:, -1]
    scale = expected.abs().max()
    assert (got - expected).abs().max() < 1e-10 * scale
    # what is compressed is seen in the logits, so another cache would not pass
    plain = model(tokens, use_cache=False).logits[:, -1]
    assert ((plain - expected).abs().max() > 1e-4 * scale) == (length > 10)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["packed", "simulated"])
def test_expected_logits_of_tiles_are_those_of_their_cache(tiny_llama, kind):
    model = load_model(find_model(str(tiny_llama))).double()
    rule, window, sites = TileRule((32, 16, 16)), Window(sinks=4, recent=128, flush=64), []
    for layer in range(4):
        pair = {}
        for place, side in enumerate(SIDES):
            generator = torch.Generator().manual_seed(10 * layer + place)
            matrix = torch.linalg.qr(torch.randn(2, 16, 16, generator=generator, dtype=torch.float64))[0]
            ones = torch.ones(32, dtype=torch.float64)
            codec = TransformCodec(matrix, matrix.mT.contiguous(), ones, ones.long(), ones, "lloyd", scale_bits=8)
            pair[side] = TileCodec(codec, torch.tensor([1, 3, 5])[:, None].expand(3, 32), rule)
        sites.append(pair)
    tokens = torch.randint(0, 256, (2, 301), generator=torch.Generator().manual_seed(0))
    expected = expected_logits(model, sites, window, tokens)
    layers = attention_layers(model)
    session = Session.of("tiles", model, layers, tiles_spec(model, layers, sites, window, None, kind))
    with session.attached():
        cache = session.new_cache()
        model(tokens[:, :300], **{session.keyword: cache})
        got = model(tokens[:, 300:], **{session.keyword: cache}).logits[:, -1]
    assert (got - expected).abs().max() < 1e-9 * expected.abs().max()


def test_an_uncompressed_step_is_timed_by_the_faster_kernel(monkeypatch, tiny_llama):
    """In place over one token more than the prompt, in 16 bits; no row in 32."""
    asked, seconds = [], iter(([3.0, 4.0, 5.0], [2.0, 4.5, 3.0]))

    def timing(model, state, batch, repeats):
        asked.append((state.backend.name, batch, repeats, list(state.keys[0].shape), state.columns))
        return SimpleNamespace(seconds=next(seconds))

    monkeypatch.setattr(parts, "decode_timing", timing)
    model, ids = load_model(find_model(str(tiny_llama)), dtype="float32"), torch.zeros(2, 9, dtype=torch.int64)
    bench = SimpleNamespace(model=model, batch=2, context=8, repeats=3, ids=ids)
    assert parts.own_captured_seconds(bench) == []
    model.to(torch.bfloat16)
    assert parts.own_captured_seconds(bench) == [[2.0, 4.5, 3.0]]
    config = model.config
    shape = [2, config.num_key_value_heads, 9, config.head_dim]
    assert asked == [("FLASH_ATTENTION", 2, 3, shape, 8), ("CUDNN_ATTENTION", 2, 3, shape, 8)]
