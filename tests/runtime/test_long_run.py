"""Twenty thousand tokens through one packed cache: bytes by the law, logits as of one pass. Caches that come and go."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aatc_cli.config import Window
from aatc_cli.evals.forced.teacher_forced import Method, method_logits
from aatc_cli.models.adapter import attention_sites, geometry_of
from aatc_cli.models.loading import find_model, load_model
from aatc_cli.runtime.attach import attach_codecs
from aatc_cli.runtime.state import CompressedState

WINDOW = Window()
# (tokens, every how many the bytes are looked at)
LENGTHS = [pytest.param(300, 25, id="300"), pytest.param(20_000, 1000, id="20000", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def long_model(new_model: Any, tmp_path_factory: Any) -> Any:
    """Two layers of a Llama with room for many positions, in float64: in float32 a code on a tie falls either way."""
    folder: Path = new_model(
        tmp_path_factory.mktemp("long") / "model", num_hidden_layers=2, max_position_embeddings=32_768
    )
    return load_model(find_model(str(folder))).double()


@pytest.fixture
def plan(codecs: Any, long_model: Any) -> list[Any]:
    geometry = geometry_of(long_model.config)
    return codecs(geometry.layers, geometry.channels, 2, "mixed")


def storage_bytes(state: CompressedState) -> int:
    """Bytes of the storages behind the live tensors, each storage once."""
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in state.tensors().values()}
    return sum(storages.values())


def by_hand(plan: list[Any], tokens: int) -> int:
    """Bytes of one sequence from the widths alone: exact rows in float64, codes in planes of 8, 4, 2 and 1 bits.

    A key row holds every plane of a token on bytes of its own; values hold the same planes over a block of tokens.
    """
    sinks, recent, flush = WINDOW.sinks, WINDOW.recent, WINDOW.flush
    behind = max(tokens - sinks, 0)
    packed = -(-max(behind - recent, 0) // flush) * flush
    total = 0
    for pair in plan:
        for side, codec in pair.items():
            total += 8 * codec.bits.numel() * (min(tokens, sinks) + min(behind, recent)) + 2 * codec.groups * packed
            for plane in (16, 8, 4, 2, 1):
                count = int(((codec.bits.int() & plane) > 0).sum())
                per_token = -(-count * plane // 8)
                total += packed * per_token if side == "k" else packed // flush * count * -(-flush * plane // 8)
    return total


@torch.no_grad()
@pytest.mark.parametrize(("length", "every"), LENGTHS)
def test_a_long_run_keeps_to_the_law_and_does_not_drift(
    long_model: Any, plan: list[Any], length: int, every: int
) -> None:
    """In float64 every position agrees with the teacher-forced pass to rounding, the last ones as well as the first."""
    ids = torch.randint(256, (1, length), generator=torch.Generator().manual_seed(0))
    rows: list[Tensor] = []
    began = time.perf_counter()
    with attach_codecs(long_model, plan, WINDOW) as session:
        cache = session.new_cache()
        state = cache.state
        for t in range(length):
            rows.append(long_model(ids[:, t : t + 1], **{session.keyword: cache}).logits[0, -1])
            if (t + 1) % every == 0:
                assert state.bytes_live() == state.bytes_predicted() == storage_bytes(state) == by_hand(plan, t + 1)
    seconds = time.perf_counter() - began
    expected = method_logits(
        long_model, attention_sites(long_model), Method("one pass", plan, WINDOW, "pre-rope"), ids, 0
    )
    apart = (torch.stack(rows)[:-1] - expected).abs().amax(1) / expected.abs().max()
    parts = apart.split(max(len(apart) // 10, 1))
    print(
        f"{length} tokens one at a time in {seconds:.0f} s: {state.bytes_live()} bytes; "
        f"largest difference by tenths {[f'{float(part.max()):.1e}' for part in parts]}"
    )
    assert apart.max() < 1e-9
    # codes really are read: without them the logits are others
    plain = long_model(ids[:, :300]).logits[0, 200:299]
    assert ((plain - expected[200:299]).abs().amax(1) / expected.abs().max()).median() > 1e-3


def live_tensors() -> dict[int, Tensor]:
    """All tensors that Python knows of, by identity."""
    # by type: a proxy of something that is gone, which other modules leave, cannot be asked for its class
    return {id(one): one for one in gc.get_objects() if issubclass(type(one), Tensor)}


def test_caches_that_are_dropped_leave_nothing(long_model: Any, plan: list[Any]) -> None:
    """Fifty caches filled, copied, cropped and dropped: gone at once, without the garbage collector."""
    ids = torch.randint(256, (2, 150), generator=torch.Generator().manual_seed(1))
    with attach_codecs(long_model, plan, WINDOW) as session:

        def fill() -> tuple[Any, ...]:
            cache = session.new_cache()
            kwargs = {session.keyword: cache, "max_new_tokens": 2, "do_sample": False}
            long_model.generate(ids, **kwargs)
            other = copy.deepcopy(cache)
            other.crop(-3)
            other.batch_select_indices(torch.tensor([1]))
            return cache, other

        kept = fill()
        assert kept[0].state.bytes_live() > 0
        del kept
        gc.collect()
        before = live_tensors()
        gc.disable()
        try:
            for _ in range(50):
                caches = fill()
                watched = [weakref.ref(one) for cache in caches for one in (cache, cache.state)]
                watched += [weakref.ref(tensor) for cache in caches for tensor in cache.state.tensors().values()]
                assert len(watched) > 20
                del caches
                assert [one() for one in watched if one() is not None] == []
        finally:
            gc.enable()
        gc.collect()
        # those of other tests that were there before may be gone; held here, none of them lends its identity
        assert [tuple(one.shape) for name, one in live_tensors().items() if name not in before] == []
