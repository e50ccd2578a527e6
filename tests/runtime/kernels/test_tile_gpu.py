"""The kernel of tiles with classes on a Hopper GPU: as its twin, and in a model as the packed cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aatc_cli.config import Geometry, Window
from aatc_cli.evals.bench.attention import CHECK_BOUND
from aatc_cli.evals.bench.tile_attention import TileBench
from aatc_cli.runtime.fused_tiles.graph import TileGraphDecoder
from aatc_cli.runtime.kernels.launch import fused_available, on_hopper

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (fused_available() and on_hopper(torch.device("cuda"))), reason="needs a Hopper GPU and CuPy"
    ),
]

WINDOW = Window(sinks=4, recent=128, flush=64)


@pytest.mark.parametrize(
    ("kv_heads", "group", "dim", "lengths", "bits", "theta"),
    [
        (1, 1, 128, [100], 2.0, 5e5),
        (8, 4, 128, [3000, 1, 777], 2.0, 5e5),
        (4, 7, 128, [20_001, 500], 2.0, 1e6),
        (2, 16, 64, [1500], 3.0, 1e4),
        (2, 5, 96, [4097], 2.5, 5e5),
        (1, 4, 256, [2500, 300], 2.0, 1e6),
        (2, 3, 80, [900], 1.5, 1e4),
        (2, 4, 128, [900], 4.5, 5e5),
    ],
)
def test_decode_is_its_twin(kv_heads: int, group: int, dim: int, lengths: list[int], bits: float, theta: float) -> None:
    heads = kv_heads * group
    geometry = Geometry(layers=1, heads=heads, kv_heads=kv_heads, head_dim=dim, hidden_size=heads * dim)
    _, error = TileBench.of(geometry, WINDOW, bits, theta, lengths, torch.device("cuda")).measure(1)
    assert error < CHECK_BOUND / 5


@pytest.mark.parametrize("order", ["head", "layer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_steps_of_a_model_are_those_of_the_packed_cache(
    llama_of: Any, tile_codecs: Any, tile_session: Any, order: str, dtype: torch.dtype
) -> None:
    """Over three flushes, the packed cache taking what the fused one has stored after each step."""
    model = llama_of(
        hidden_size=256, intermediate_size=256, num_hidden_layers=3, num_attention_heads=8, max_position_embeddings=2048
    )
    model = model.to("cuda", dtype)
    ids = torch.randint(97, (2, 420), generator=torch.Generator().manual_seed(0)).cuda()
    codecs = tile_codecs(3, order=order)
    sessions = {kind: tile_session(model, codecs, WINDOW, kind) for kind in ("packed", "fused")}
    found, stores = {}, {}
    for kind, session in sessions.items():
        with session.attached():
            cache = session.new_cache()
            logits = [model(ids[:, :200], **{session.keyword: cache}).logits[:, -1:]]
            logits += [model(ids[:, t : t + 1], **{session.keyword: cache}).logits for t in range(200, 420)]
            found[kind] = torch.cat(logits, 1).double()
            stores[kind] = cache.state.groups[0].stores
    errors = (found["fused"] - found["packed"]).square().mean((0, 2)).sqrt() / found["packed"].square().mean().sqrt()
    # before anything is flushed that the kernel had a part in ranking, and over all steps
    assert float(errors[:40].max()) < (2e-3 if dtype == torch.float32 else 2e-2)
    assert float(errors.mean()) < 3e-2
    for one, other in zip(stores["fused"], stores["packed"], strict=True):
        mine, theirs = (store.layer.held.unpack(store.pages.joined(None)) for store in (one, other))
        assert float((mine[1] == theirs[1]).float().mean()) > 0.97


@torch.no_grad()
def test_steps_of_models_that_are_no_llamas(unlike_llama: Any, tile_codecs: Any, tile_session: Any) -> None:
    """Biases on projections, and rotation of half of a head or of neighbours; over a flush."""
    model, found = unlike_llama.cuda(), {}
    ids = torch.randint(1, 97, (2, 270), generator=torch.Generator().manual_seed(1)).cuda()
    for kind in ("packed", "fused"):
        session = tile_session(model, tile_codecs(1, 1), WINDOW, kind)
        with session.attached():
            cache = session.new_cache()
            logits = [model(ids[:, :200], **{session.keyword: cache}).logits[:, -1]]
            logits += [model(ids[:, t : t + 1], **{session.keyword: cache}).logits[:, -1] for t in range(200, 270)]
            found[kind] = torch.stack(logits)
    errors = (found["fused"] - found["packed"]).square().mean((1, 2)).sqrt() / found["packed"].square().mean().sqrt()
    # until something is flushed that the kernel had a part in ranking
    assert float(errors[:50].max()) < 2e-3
    assert float(errors.mean()) < 3e-2


@torch.no_grad()
def test_a_replayed_graph_chooses_what_steps_one_by_one_do(llama_of: Any, tile_codecs: Any, tile_session: Any) -> None:
    """Over two flushes, which fall between steps of the graph."""
    model = llama_of(
        hidden_size=256, intermediate_size=256, num_hidden_layers=3, num_attention_heads=8, max_position_embeddings=2048
    )
    model = model.cuda()
    ids = torch.randint(97, (2, 200), generator=torch.Generator().manual_seed(0)).cuda()
    session = tile_session(model, tile_codecs(3), WINDOW, "fused")
    with session.attached():
        caches = [session.new_cache(room=400) for _ in range(2)]
        firsts = [model(ids, **{session.keyword: cache}).logits[:, -1].argmax(-1) for cache in caches]
        assert torch.equal(*firsts)
        decoder = TileGraphDecoder(model, caches[0], session.keyword, firsts[0])
        token, agreed = firsts[1][:, None], []
        for _ in range(150):
            mine = decoder.step().clone()
            logits = model(token, **{session.keyword: caches[1]}).logits[:, -1]
            assert decoder.logits is not None
            error = (decoder.logits - logits).square().mean().sqrt() / logits.square().mean().sqrt()
            agreed.append(float(error))
            token = mine[:, None]
    assert max(agreed) < 5e-2
    assert sum(agreed) / len(agreed) < 1e-3
    stores = [cache.state.groups[0].stores for cache in caches]
    assert stores[0][0].tokens == stores[1][0].tokens == 350
    assert stores[0][0].packed == stores[1][0].packed
