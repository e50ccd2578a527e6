"""Fused tiles on models that are no Llamas, the kernel emulated on a CPU, and what of a model the kernel has not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from aatc_cli.config import Window
from aatc_cli.errors import AatcError
from aatc_cli.models.adapter import attention_layers
from aatc_cli.runtime.fused_tiles import limits
from aatc_cli.runtime.fused_tiles.limits import check_device, check_sites

WINDOW = Window(sinks=4, recent=128, flush=64)


@pytest.mark.usefixtures("kernel")
@torch.no_grad()
def test_steps_are_those_of_the_packed_cache(
    unlike_llama: Any, tile_codecs: Callable[..., Any], tile_session: Callable[..., Any]
) -> None:
    ids, found = torch.randint(1, 97, (1, 203), generator=torch.Generator().manual_seed(1)), []
    model = unlike_llama
    for kind in ("packed", "fused"):
        session = tile_session(model, tile_codecs(1, 1), WINDOW, kind, by_kernel=True)
        with session.attached():
            cache = session.new_cache()
            logits = [model(ids[:, :200], **{session.keyword: cache}).logits[:, -1]]
            logits += [model(ids[:, t : t + 1], **{session.keyword: cache}).logits[:, -1] for t in (200, 201, 202)]
            found.append(torch.stack(logits))
    error = (found[1] - found[0]).square().mean((1, 2)).sqrt() / found[0].square().mean().sqrt()
    assert float(error.max()) < 2e-3


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"sliding_window": 40}, "has a sliding window"),
        ({"sinks": torch.zeros(4)}, "has attention sinks"),
        ({"softcap": 30.0}, "caps its scores"),
        ({"rope": "none"}, "does not rotate its keys"),
    ],
)
def test_what_the_kernel_has_not_is_refused(llama_of: Any, change: dict[str, Any], problem: str) -> None:
    model = llama_of(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    sites = attention_layers(model)
    check_sites(sites, 2, 64, WINDOW)
    with pytest.raises(AatcError, match=problem) as raised:
        check_sites([replace(site, **change) for site in sites], 2, 64, WINDOW)
    assert raised.value.hint == "use --cache packed, under generate"


@pytest.mark.parametrize(("dim", "group"), [(32, 4), (192, 1), (128, 17)])
def test_heads_that_the_kernel_has_not_are_refused(dim: int, group: int) -> None:
    with pytest.raises(AatcError, match=f"no heads of {dim} with {group} queries each"):
        check_sites([], group, dim, WINDOW)


def test_many_sinks_are_refused() -> None:
    with pytest.raises(AatcError, match="at most 64 sinks, this window 65"):
        check_sites([], 4, 128, Window(sinks=65, recent=128, flush=64))


@pytest.mark.parametrize(
    ("capability", "cupy", "problem", "hint"),
    [
        ((8, 0), True, r"compute capability 9\.0, and this one has 8\.0", "loss-aware-fused"),
        ((10, 0), True, r"compute capability 9\.0, and this one has 10\.0", "loss-aware-fused"),
        ((9, 0), False, "need CuPy on a GPU", "pip install"),
    ],
)
def test_other_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], cupy: bool, problem: str, hint: str
) -> None:
    monkeypatch.setattr(limits, "fused_available", lambda: cupy)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    check_device(torch.device("cpu"))
    with pytest.raises(AatcError, match=problem) as raised:
        check_device(torch.device("cuda"))
    assert hint in str(raised.value.hint)
