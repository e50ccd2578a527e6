"""Attention of other libraries beside ours: stand-ins that compute it right or wrong, called as the libraries are."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from aatc_cli.config import Geometry
from aatc_cli.errors import AatcError
from aatc_cli.evals.bench import flash_attention
from aatc_cli.evals.bench.peers import PEERS, peer_timing, peer_timings

GEOMETRY = Geometry(layers=1, heads=6, kv_heads=2, head_dim=8, hidden_size=48)
CPU = torch.device("cpu")


def plain(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)


class Wrapper:
    """Paged attention by its description: tokens of a sequence are the pages that its part of the indices names."""

    def __init__(self, workspace: Tensor, layout: str, **buffers: Any) -> None:
        assert layout == "NHD"
        self.buffers = buffers

    def plan(self, first: Tensor, pages: Tensor, last: Tensor, *shape: int, **dtypes: Any) -> None:
        self.first, self.pages = first, pages
        heads, kv_heads, dim, page = shape
        assert (heads, kv_heads, dim) == (GEOMETRY.heads, GEOMETRY.kv_heads, GEOMETRY.head_dim)
        assert last.tolist() == [page] * (first.numel() - 1)

    def run(self, query: Tensor, paged: tuple[Tensor, Tensor]) -> Tensor:
        out = []
        for row in range(query.shape[0]):
            mine = self.pages[self.first[row] : self.first[row + 1]]
            keys, values = (side[mine].flatten(0, 1).transpose(0, 1)[None] for side in paged)
            out.append(plain(query[row][None, :, None], keys, values)[0, :, 0])
        return torch.stack(out)


def with_cache(scale: float) -> Any:
    def attend(query: Tensor, keys: Tensor, values: Tensor, cache_seqlens: Tensor) -> Tensor:
        assert cache_seqlens.tolist() == [keys.shape[1]] * keys.shape[0]
        return scale * plain(*(part.transpose(1, 2) for part in (query, keys, values))).transpose(1, 2)

    return SimpleNamespace(flash_attn_with_kvcache=attend)


def timed(call: Any, repeats: int) -> list[float]:
    assert call() >= 1
    return [1.0] * repeats


def test_libraries_that_are_not_there_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("flashinfer", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, module, None)
    assert peer_timings(GEOMETRY, 2, 64, 3, CPU, timed) == ([], {})


def test_those_that_agree_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Wrapper))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", with_cache(1.0))
    found, left_out = peer_timings(GEOMETRY, 3, 1600, 2, CPU, timed)
    assert [timing.backend for timing in found] == list(PEERS)
    assert [timing.bytes_moved for timing in found] == [3 * 1600 * 2 * 2 * 8 * 2] * 2
    assert left_out == {}


def test_those_that_do_not_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Wrapper))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", with_cache(1.1))
    found, left_out = peer_timings(GEOMETRY, 1, 100, 2, CPU, timed)
    assert found == []
    told = re.fullmatch(r"its error is ([\d.]+), more than 0\.01", left_out["flashattention-3"])
    assert told is not None
    assert float(told[1]) == pytest.approx(0.1, rel=0.05)
    assert "100 tokens are no whole pages" in left_out["flashinfer"]


def test_a_library_that_is_named_is_called_with_all_its_arguments(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """FlashAttention-3 out of a shared library: a stand-in for what it registers."""

    def forward(query: Tensor, keys: Tensor, values: Tensor, *others: Any) -> tuple[Tensor, ...]:
        assert len(others) == 34
        lengths, scale = others[8], others[20]
        assert lengths.tolist() == [keys.shape[1]] * keys.shape[0]
        assert scale == query.shape[-1] ** -0.5
        found = plain(*(part.transpose(1, 2) for part in (query, keys, values))).transpose(1, 2)
        return found, found, found, found

    attend = flash_attention.attention_of(forward, torch.full((2,), 64, dtype=torch.int32))
    timing, error = peer_timing("fa3", attend, GEOMETRY, 2, 64, 3, CPU, timed)
    assert timing is not None
    assert error < 0.01
    path = tmp_path / "fa3.so"
    path.write_bytes(b"no library")
    with pytest.raises(AatcError, match=r"fa3\.so is no FlashAttention-3 for torch"):
        flash_attention.loaded(path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(AatcError, match="for GPUs of compute capability"):
        flash_attention.library_timing(path, GEOMETRY, 2, 64, 3, CPU)
