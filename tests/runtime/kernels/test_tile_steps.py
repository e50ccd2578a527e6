"""The fused cache of tiles under a model with its kernel, emulated on a CPU: as the packed cache, and in a graph."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from aatc_cli.config import Geometry, Window
from aatc_cli.errors import AatcError
from aatc_cli.evals.answers.shared import SharedSteps
from aatc_cli.evals.bench.tile_steps import full_tiles, tile_spec
from aatc_cli.models.adapter import attention_layers
from aatc_cli.models.cache_hooks import hosted
from aatc_cli.models.compressed import HostedCache, cache_keyword
from aatc_cli.runtime.fused_tiles.graph import TileGraphDecoder
from aatc_cli.runtime.fused_tiles.ragged import RaggedDecoder
from aatc_cli.runtime.session import Session, attend

WINDOW = Window(sinks=4, recent=128, flush=64)
IDS = torch.randint(1, 97, (1, 200), generator=torch.Generator().manual_seed(3))


def model_of(rope: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=96,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=97,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4} | rope,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def session_of(tile_codecs: Callable[..., Any], tile_session: Callable[..., Session]) -> Callable[..., Session]:
    """A session of a model of `model_of`, an order of ranking and a kind of cache, with tables of its kernel."""
    return lambda model, order, kind: tile_session(model, tile_codecs(2, order=order), WINDOW, kind, by_kernel=True)


def fed(session: Session, cache: Any, *parts: int) -> Tensor:
    found, start = [], 0
    for count in parts:
        found.append(session.model(IDS[:, start : start + count], **{session.keyword: cache}).logits[:, -1])
        start += count
    return torch.stack(found)


@pytest.mark.parametrize("order", ["head", "layer"])
@pytest.mark.usefixtures("kernel")
@torch.no_grad()
def test_steps_by_the_kernel_are_those_of_the_packed_cache(session_of: Any, order: str) -> None:
    """Over a flush, whose classes the kernel has a part in."""
    model, parts, found, stores = model_of({}), (190, *[1] * 10), {}, {}
    for kind in ("packed", "fused"):
        session = session_of(model, order, kind)
        with session.attached():
            cache = session.new_cache()
            found[kind] = fed(session, cache, *parts)
            stores[kind] = cache.state.groups[0].stores
    errors = (found["fused"] - found["packed"]).square().mean((1, 2)).sqrt() / found["packed"].square().mean().sqrt()
    assert float(errors.max()) < 2e-3
    for one, other in zip(stores["fused"], stores["packed"], strict=True):
        assert one.packed == other.packed == 128
        sums, expected = one.received.sums, other.received.sums
        assert (sums - expected).abs().max() < 1e-2 * expected.abs().max()
        mine, theirs = (store.layer.held.unpack(store.pages.joined(None)) for store in (one, other))
        assert float((mine[1] == theirs[1]).float().mean()) > 0.99


@pytest.mark.usefixtures("kernel")
@torch.no_grad()
def test_a_graph_chooses_what_steps_one_by_one_do(session_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays are runs of the step here: what they write and count is the same as on a GPU."""

    class Graph:
        run: Any = None

        def replay(self) -> None:
            Graph.run()

    @contextmanager
    def captured(graph: Any, capture_error_mode: str) -> Any:
        yield

    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda side: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", captured)
    model = model_of({})
    session = session_of(model, "head", "fused")
    with session.attached():
        caches = [session.new_cache(room=300) for _ in range(2)]
        firsts = [model(IDS[:, :190], **{session.keyword: cache}).logits[:, -1].argmax(-1) for cache in caches]
        decoder = TileGraphDecoder(model, caches[0], session.keyword, firsts[0])

        def run() -> None:
            decoder.state.steady = decoder.shared.steady = True
            decoder.decoding._forward()
            decoder.state.steady = decoder.shared.steady = False
            decoder._count(-1)

        Graph.run = run
        token = firsts[1][:, None]
        for _ in range(10):
            mine = decoder.step().clone()
            logits = model(token, **{session.keyword: caches[1]}).logits[:, -1]
            assert decoder.logits is not None
            assert (decoder.logits - logits).abs().max() < 1e-5 * logits.abs().max()
            token = mine[:, None]
    for one, other in zip(*(cache.state.groups[0].stores for cache in caches), strict=True):
        assert one.tokens == other.tokens == 200
        assert one.packed == other.packed
        assert torch.equal(one.pages.joined(None), other.pages.joined(None))
        assert (one.received.sums - other.received.sums).abs().max() < 1e-6


@pytest.mark.usefixtures("kernel")
@torch.no_grad()
def test_what_cannot_be_captured_is_refused(session_of: Any) -> None:
    model = model_of({})
    session = session_of(model, "head", "fused")
    with session.attached():
        cache = session.new_cache()
        first = model(IDS[:, :50], **{session.keyword: cache}).logits[:, -1].argmax(-1)
        with pytest.raises(AatcError, match="cache that grows cannot be captured"):
            TileGraphDecoder(model, cache, session.keyword, first)
        cache = session.new_cache(room=100)
        first = model(IDS[:, :4], **{session.keyword: cache}).logits[:, -1].argmax(-1)
        with pytest.raises(AatcError, match="longer than the sinks"):
            TileGraphDecoder(model, cache, session.keyword, first)


@pytest.mark.usefixtures("kernel")
@torch.no_grad()
def test_a_cache_for_a_bench_is_full_of_tokens_that_are_read(decodable: Any) -> None:
    """As a step of the whole model is timed: written by what the device counts, over tiles of a synthetic plan."""
    model = model_of({})
    geometry = Geometry(layers=2, heads=6, kv_heads=2, head_dim=64, hidden_size=96)
    spec = decodable(tile_spec(model, geometry, WINDOW, 2.0))
    state, stores = full_tiles(spec, 2, 500)
    cache = HostedCache(cast("Any", state), 2)
    tokens = torch.zeros(2, 1, dtype=torch.int64)
    before = [store.exact.keys.clone() for store in stores]
    with hosted(model, attention_layers(model), attend):
        positions = torch.full_like(tokens, state.columns)
        found = model(input_ids=tokens, position_ids=positions, **{cache_keyword(model): cache}).logits
    assert bool(torch.isfinite(found).all())
    assert stores[0].shared.tiles.tolist() == [stores[0].pages.count] * 2 == [6, 6]
    for store, rows in zip(stores, before, strict=True):
        # one row was written, behind those that there were
        assert (store.exact.keys != rows).any(-1).nonzero().tolist() == [[0, 68], [1, 68]]
        latents, _ = store.layer.held.unpack(store.pages.joined(None))
        assert bool(torch.isfinite(latents["k"]).all())


@pytest.mark.usefixtures("kernel")
@torch.no_grad()
def test_sequences_of_their_own_lengths_share_a_step_and_a_pool(session_of: Any) -> None:
    """A left-padded batch; one sequence ends, another begins in its row, one packs a tile; each as if it were alone."""
    model = model_of({})
    session, alone = session_of(model, "head", "fused"), session_of(model, "head", "packed")
    prompts = [IDS[0, :132], IDS[0, 20:90], IDS[0, 5:105]]

    def filled(one: Session, *rows: Tensor) -> tuple[Any, Tensor]:
        width = max(len(row) for row in rows)
        ids = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in rows])
        mask = torch.stack([(torch.arange(width) >= width - len(row)).long() for row in rows])
        cache = one.new_cache()
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        found = model(ids, attention_mask=mask, position_ids=positions, **{one.keyword: cache}).logits[:, -1]
        return cache, found.argmax(-1)

    expected = []
    with alone.attached():
        for prompt in prompts:
            cache, token = filled(alone, prompt)
            logits = []
            for _ in range(4):
                logits.append(model(token[:, None], **{alone.keyword: cache}).logits[0, -1])
                token = logits[-1].argmax()[None]
            expected.append(torch.stack(logits))
    found: list[list[Tensor]] = [[], [], []]
    with session.attached():
        decoder = RaggedDecoder(session, 2, 300, 5)
        rows = decoder.start(*filled(session, *prompts[:2]))
        assert rows == [0, 1]
        for count in range(6):
            if count == 2:
                decoder.end(1)
                assert decoder.start(*filled(session, prompts[2])) == [1]
            decoder.step()
            assert decoder.logits is not None
            for row, sequence in ((0, 0), (1, 1 if count < 2 else 2)):
                found[sequence].append(decoder.logits[row].clone())
        # packed as the window rule has it, one page of the pool for a tile
        assert decoder.lengths == [138, 104]
        assert [len(pages) for pages in decoder.tiles] == [1, 0]
        assert decoder.pool.free == 4
        decoder.end(0)
        assert decoder.pool.free == 5
        shared = SharedSteps(session)
        answer = [int(filled(session, prompts[2])[1]), *expected[2].argmax(-1).tolist()]
        for limit, ends, length, text in (
            (3, frozenset(), 9, answer[:3]),
            (9, frozenset(), 2, answer[:2]),
            (9, frozenset(answer[1:2]), 9, answer[:1]),
        ):
            cache, token = filled(session, prompts[2])
            logits = torch.nn.functional.one_hot(token, 97)
            found_text = shared.continued(logits, cache, limit, ends, lambda place, text, n=length: len(text) == n)
            assert found_text == [text]
        assert shared.decoder is not None
        assert shared.decoder.free == [0]
    for mine, theirs in zip(found, expected, strict=True):
        count = min(len(mine), 4)
        error = (torch.stack(mine[:count]) - theirs[:count]).square().mean().sqrt() / theirs.square().mean().sqrt()
        assert float(error) < 2e-3
