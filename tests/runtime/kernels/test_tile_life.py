"""The fused cache of tiles on a CPU does all that the packed one does: records hold the same codes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aatc_cli.config import Window
from aatc_cli.errors import AatcError
from aatc_cli.runtime.cache_file import load_cache, save_cache
from aatc_cli.runtime.fused_tiles.limits import pair_order
from aatc_cli.runtime.session import Session

WINDOW = Window(sinks=4, recent=128, flush=64)
IDS = torch.randint(1, 97, (2, 330), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def model(llama_of: Any) -> Any:
    return llama_of(
        hidden_size=96, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6, max_position_embeddings=1024
    ).double()


@pytest.fixture
def session_of(model: Any, tile_codecs: Callable[..., Any], tile_session: Callable[..., Session]) -> Callable[..., Any]:
    """A session by the kind of cache and what codecs have beside Lloyd-Max levels that are read as they are."""

    def make(kind: str, **given: Any) -> Session:
        codecs = tile_codecs(2, **({"quantizer": "lloyd", "restored": 0.0} | given))
        return tile_session(model, codecs, WINDOW, kind)

    return make


@torch.no_grad()
def both(session_of: Any, work: Callable[[Session], torch.Tensor], order: str = "head") -> None:
    """``work`` with a session gives the same by the packed and by the fused cache."""
    found = []
    for kind in ("packed", "fused"):
        session = session_of(kind, order=order)
        with session.attached():
            found.append(work(session))
    assert torch.equal(found[0], found[1])
    assert found[0].numel()


def fed(session: Session, cache: Any, ids: torch.Tensor, *parts: int) -> torch.Tensor:
    found, start = [], 0
    for count in parts:
        found.append(session.model(ids[:, start : start + count], **{session.keyword: cache}).logits[:, -1])
        start += count
    return torch.stack(found)


@pytest.mark.parametrize("order", ["head", "layer"])
@pytest.mark.parametrize("parts", [(260, *[1] * 70), (1, 100, 3, 70, *[1] * 130)])
def test_steps_are_those_of_the_packed_cache(session_of: Any, order: str, parts: tuple[int, ...]) -> None:
    both(session_of, lambda session: fed(session, session.new_cache(), IDS, *parts), order)


def test_copies_beams_and_steps_back_are_those_of_the_packed_cache(session_of: Any) -> None:
    def work(session: Session) -> torch.Tensor:
        cache = session.new_cache()
        fed(session, cache, IDS, 250)
        other = copy.deepcopy(cache)
        cache.reorder_cache(torch.tensor([1, 1]))
        found = [fed(session, one, IDS[:, 250:], *[1] * 20) for one in (cache, other)]
        other.activate_past_recording()
        found.append(fed(session, other, IDS[:, 270:], 5))
        other.crop(-3)
        found.append(fed(session, other, IDS[:, 272:], *[1] * 30))
        return torch.cat(found)

    both(session_of, work)


def test_a_file_gives_the_cache_back(session_of: Any, tmp_path: Path) -> None:
    session = session_of("fused")
    with session.attached(), torch.no_grad():
        cache = session.new_cache()
        fed(session, cache, IDS, 300)
        save_cache(cache, session, tmp_path / "cache")
        again = load_cache(session, tmp_path / "cache")
        assert torch.equal(fed(session, cache, IDS[:, 300:], *[1] * 9), fed(session, again, IDS[:, 300:], *[1] * 9))


def test_a_room_is_kept(session_of: Any) -> None:
    session = session_of("fused")
    with session.attached(), torch.no_grad():
        cache = session.new_cache(room=300)
        held = None
        for count in (200, 99, 1):
            fed(session, cache, IDS, count)
            assert held in (None, session.bytes_live(cache))
            held = session.bytes_live(cache)
        with pytest.raises(AatcError, match="301 tokens are more than the capacity of 300"):
            fed(session, cache, IDS, 1)


def test_what_records_do_not_hold_is_refused(session_of: Any) -> None:
    with pytest.raises(AatcError, match="token scales of 8 bits"):
        session_of("fused", scale_bits=16)
    with pytest.raises(AatcError, match="levels of Lloyd-Max or even cells"):
        session_of("fused", quantizer="uniform-token-max")


def test_dimensions_that_turn_together_are_brought_half_a_head_apart() -> None:
    assert pair_order(8, 8, "half") is None
    assert pair_order(8, 8, "interleaved").tolist() == [0, 2, 4, 6, 1, 3, 5, 7]  # type: ignore[union-attr]
    # four of eight turn; the others make pairs that do not
    assert pair_order(8, 4, "half").tolist() == [0, 1, 4, 5, 2, 3, 6, 7]  # type: ignore[union-attr]
    assert pair_order(8, 4, "interleaved").tolist() == [0, 2, 4, 5, 1, 3, 6, 7]  # type: ignore[union-attr]
