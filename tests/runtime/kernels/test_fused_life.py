"""The fused cache, on a CPU by its twins, does all that the packed one does: both store the same codes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from aatc_cli.config import Window
from aatc_cli.core import SIDES
from aatc_cli.core.codec import TransformCodec
from aatc_cli.errors import AatcError, ArtifactError
from aatc_cli.runtime.attach import attach_codecs
from aatc_cli.runtime.cache_file import load_cache, save_cache
from aatc_cli.runtime.fused.graph import GraphDecoder

WINDOW = Window(sinks=4, recent=64, flush=64)
# the model makes angles in float32, the twin in float64: half a unit of the largest one, of position 512
ROUNDING = 512 * 2.0**-25
WIDTHS = {"k": ((3, 2, 1, 0), (8, 1, 0, 0)), "v": ((2, 2, 0, 0), (5, 4, 1, 1))}
IDS = torch.randint(1, 97, (2, 240), generator=torch.Generator().manual_seed(3))


def codec(side: str, seed: int) -> TransformCodec:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.cat([torch.tensor(widths).repeat_interleave(16) for widths in WIDTHS[side]])
    encode = torch.randn(2, 64, 64, generator=generator, dtype=torch.float64) / 8
    scale = 0.5 + torch.rand(128, generator=generator, dtype=torch.float64)
    return TransformCodec(encode, torch.linalg.inv(encode), 3 * scale, bits, scale.square(), "uniform", None)


@pytest.fixture(scope="module")
def plan() -> Any:
    return [{side: codec(side, 10 * layer + place) for place, side in enumerate(SIDES)} for layer in range(2)]


@pytest.fixture(scope="module")
def model(llama_of: Any) -> Any:
    return llama_of(
        hidden_size=96, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6, max_position_embeddings=1024
    ).double()


@torch.no_grad()
def both(model: Any, plan: Any, work: Any) -> None:
    """``work`` with a session gives the same, up to rounding, by the packed and by the fused cache."""
    found = []
    for kind in ("packed", "fused"):
        with attach_codecs(model, plan, WINDOW, kind) as session:
            found.append(work(session))
    assert float((found[0] - found[1]).abs().max()) < ROUNDING
    assert found[0].numel()


def steps(model: Any, session: Any, cache: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    return torch.stack(
        [model(ids[:, t : t + 1], **{session.keyword: cache}, **options).logits[:, -1] for t in range(ids.shape[1])]
    )


def test_prompts_in_chunks(model: Any, plan: Any) -> None:
    def work(session: Any) -> torch.Tensor:
        cache = session.new_cache()
        parts = [model(part, **{session.keyword: cache}).logits for part in IDS.split([70, 1, 90, 2, 77], 1)]
        return torch.cat(parts, 1)

    both(model, plan, work)


def test_token_by_token_from_the_first_one(model: Any, plan: Any) -> None:
    both(model, plan, lambda session: steps(model, session, session.new_cache(), IDS[:1, :150]))


def test_left_padded_batches(model: Any, plan: Any) -> None:
    mask = torch.ones(2, 200, dtype=torch.int64)
    mask[0, :37] = 0

    def work(session: Any) -> torch.Tensor:
        cache = session.new_cache()
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        given = {session.keyword: cache}
        rows = [
            model(IDS[:, :140], attention_mask=mask[:, :140], position_ids=positions[:, :140], **given).logits[:, -1]
        ]
        for t in range(140, 200):
            one = slice(t, t + 1)
            logits = model(IDS[:, one], attention_mask=mask[:, : t + 1], position_ids=positions[:, one], **given).logits
            rows.append(logits[:, -1])
        return torch.stack(rows)

    both(model, plan, work)


def test_a_text_that_begins_elsewhere(model: Any, plan: Any) -> None:
    """Positions from 300 on: tiles and slots are turned by where their tokens are, not by how many came before."""

    def work(session: Any) -> torch.Tensor:
        cache = session.new_cache()
        given = {session.keyword: cache}
        model(IDS[:, :140], position_ids=torch.arange(300, 440)[None], **given)
        return torch.stack(
            [model(IDS[:, t : t + 1], position_ids=torch.tensor([[300 + t]]), **given).logits for t in range(140, 150)]
        )

    both(model, plan, work)


def test_steps_back_copies_and_beams(model: Any, plan: Any) -> None:
    def work(session: Any) -> torch.Tensor:
        cache = session.new_cache()
        model(IDS[:, :133], **{session.keyword: cache})
        found = [steps(model, session, cache, IDS[:, 133:137])]
        # tokens that were packed stay so, and are not packed again when the count comes by once more
        cache.crop(-5)
        twin = copy.deepcopy(cache)
        found.append(steps(model, session, cache, IDS[:, 132:210]))
        found.append(steps(model, session, twin, IDS[:, 132:210]))
        cache.reorder_cache(torch.tensor([1, 1, 0]))
        found.append(steps(model, session, cache, IDS[[0, 1, 1], 210:215])[:, :2])
        return torch.cat(found)

    both(model, plan, work)


def test_generate_with_beams_and_candidates(model: Any, plan: Any) -> None:
    prompt = IDS[:1, :11].repeat(1, 6)
    for options in ({"num_beams": 3}, {"prompt_lookup_num_tokens": 5}):
        texts = []
        for kind in ("packed", "fused"):
            with attach_codecs(model, plan, WINDOW, kind) as session:
                given = {session.keyword: session.new_cache()}
                out = model.generate(prompt, max_new_tokens=70, do_sample=False, pad_token_id=0, **options, **given)
                texts.append(out)
        assert torch.equal(*texts), options


@torch.no_grad()
def test_a_saved_cache_goes_on_exactly(model: Any, plan: Any, tmp_path: Path) -> None:
    with attach_codecs(model, plan, WINDOW, "fused") as session:
        cache = session.new_cache()
        model(IDS[:, :150], **{session.keyword: cache})
        save_cache(cache, session, tmp_path / "cache")
        loaded = load_cache(session, tmp_path / "cache")
        expected = steps(model, session, cache, IDS[:, 150:220])
        assert torch.equal(steps(model, session, loaded, IDS[:, 150:220]), expected)
    with attach_codecs(model, plan, WINDOW) as session, pytest.raises(ArtifactError, match="another plan"):
        load_cache(session, tmp_path / "cache")


@torch.no_grad()
def test_room_is_as_much_as_was_asked_for_or_a_little_more_than_needed(model: Any, plan: Any) -> None:
    with attach_codecs(model, plan, WINDOW, "fused") as session:
        fixed, growing = session.new_cache(room=240), session.new_cache()
        for cache in (fixed, growing):
            model(IDS, **{session.keyword: cache})
        assert {store.data.shape[1] for store in fixed.state.groups[0].stores} == {3}
        assert {store.data.shape[1] for store in growing.state.groups[0].stores} == {11}
        with pytest.raises(AatcError, match="241 tokens are more than the capacity of 240"):
            model(IDS[:, :1], **{session.keyword: fixed})
        with pytest.raises(AatcError, match="cache that grows cannot be captured"):
            GraphDecoder(model, growing, session.keyword, IDS[:, 0])
    with attach_codecs(model, plan, WINDOW) as session, pytest.raises(AatcError, match="only a fused cache"):
        GraphDecoder(model, session.new_cache(), session.keyword, IDS[:, 0])
