"""The packed cache of random codes that is timed: its attention against codes as they were before packing."""

from __future__ import annotations

import pytest
import torch

from aatc_cli.config import Geometry, HeadGroups, Window
from aatc_cli.core.layout import CacheLayout
from aatc_cli.errors import AatcError
from aatc_cli.evals.bench.packed import BACKEND, PACKED_BOUND, PackedBench, call_seconds, random_codec
from aatc_cli.runtime.packed.site import SiteCodec

GEOMETRY = Geometry(layers=1, heads=8, kv_heads=4, head_dim=16, hidden_size=128)
CPU = torch.device("cpu")


def bench_of(groups: int, context: int, batch: int = 2, bits: float = 2.0) -> PackedBench:
    return PackedBench.of(GEOMETRY, Window(), groups, bits, 1e4, batch, context, CPU)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("context", [3, 140, 700])
def test_output_is_that_of_the_codes(groups: int, context: int) -> None:
    bench = bench_of(groups, context)
    timing, error = bench.measure(2)
    assert error < PACKED_BOUND
    assert timing.backend == BACKEND
    assert len(timing.seconds) == 2
    bits = [{side: codec.bits.tolist() for side, codec in bench.codecs.items()}]
    layout = CacheLayout.of_bits(GEOMETRY, Window(), HeadGroups.both(groups), bits)
    assert timing.bytes_moved == layout.bytes(context, 2)


def test_a_wrong_code_is_seen() -> None:
    bench = bench_of(1, 700)
    bench.codes["v"] = -1 - bench.codes["v"]
    assert bench.measure(1)[1] > 10 * PACKED_BOUND


def test_a_wrong_decode_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SiteCodec.keys
    monkeypatch.setattr(SiteCodec, "keys", lambda self, *rest: 1.2 * original(self, *rest))
    assert bench_of(1, 700).measure(1)[1] > PACKED_BOUND


@pytest.mark.parametrize(("groups", "bits"), [(1, 2.0), (2, 1.5), (4, 3.0)])
def test_a_codec_has_the_mean_width_and_inverts_itself(groups: int, bits: float) -> None:
    codec = random_codec(64, groups, bits, 0)
    assert float(codec.bits.float().mean()) == bits
    whole = torch.bmm(codec.encode, codec.decode)
    torch.testing.assert_close(whole, torch.eye(64 // groups).expand_as(whole), atol=1e-5, rtol=0)
    assert (codec.groups, codec.quantizer) == (groups, "uniform-token-max")


def test_widths_that_blocks_cannot_have_are_refused() -> None:
    with pytest.raises(AatcError, match="20 bits do not make tiles"):
        random_codec(64, 1, 20.0, 0)


def test_calls_that_warm_up_are_not_counted() -> None:
    calls: list[int] = []
    assert len(call_seconds(lambda: calls.append(1), 3, CPU)) == 3
    assert len(calls) == 5
