"""The compiled kernels against their twins, on a CUDA device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from aatc_cli.config import Geometry, Window
from aatc_cli.core import SIDES
from aatc_cli.core.codec import TransformCodec
from aatc_cli.evals.bench.attention import CHECK_BOUND, FusedBench
from aatc_cli.runtime.attach import attach_codecs
from aatc_cli.runtime.fused.graph import GraphDecoder
from aatc_cli.runtime.kernels.append import Appender
from aatc_cli.runtime.kernels.encode import EncodeTables, tiles_of
from aatc_cli.runtime.kernels.launch import fused_available
from aatc_cli.runtime.kernels.tables import HeadSide, LayerTables

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not fused_available(), reason="needs a CUDA device and CuPy")]

WINDOW = Window(sinks=4, recent=128, flush=64)


def geometry(kv_heads: int, group: int, dim: int) -> Geometry:
    heads = kv_heads * group
    return Geometry(layers=1, heads=heads, kv_heads=kv_heads, head_dim=dim, hidden_size=heads * dim)


@pytest.mark.parametrize(
    ("kv_heads", "group", "dim", "batch", "context", "bits", "theta"),
    [
        (1, 1, 128, 1, 100, 2.0, 5e5),
        (8, 4, 128, 2, 3000, 2.0, 5e5),
        (2, 8, 128, 3, 20_001, 1.5, 1e6),
        (3, 3, 64, 2, 1500, 3.0, 1e4),
        (2, 5, 96, 1, 4097, 2.5, 5e5),
        (1, 4, 256, 2, 2500, 2.0, 1e6),
        (8, 4, 128, 1, 9000, 6.0, 5e5),
        (2, 4, 128, 1, 300, 0.5, 5e5),
    ],
)
def test_decode_is_its_twin(
    kv_heads: int, group: int, dim: int, batch: int, context: int, bits: float, theta: float
) -> None:
    """What differs are roundings: of rotated keys to float16, of weights to 16 bits, and the slopes of slow pairs."""
    bench = FusedBench.of(geometry(kv_heads, group, dim), WINDOW, bits, theta, batch, context, torch.device("cuda"))
    _, error = bench.measure(1)
    assert error < CHECK_BOUND


def codecs(quantizer: str, heads: int, dim: int, dtype: torch.dtype) -> dict[Any, TransformCodec]:
    """Plans of many widths with orthonormal transforms: any matrix may blow up what quantization leaves.

    Keys many times their size make attention choose one of two tokens, and its choice turn on the last bits of a score.
    """
    found = {}
    for place, side in enumerate(SIDES):
        generator = torch.Generator().manual_seed(place)
        widths = [torch.tensor([(3, 2, 1, 0), (8, 1, 0, 0), (5, 4, 2, 2)][(head + place) % 3]) for head in range(heads)]
        bits = torch.cat([one.repeat_interleave(dim // 4) for one in widths])
        encode = torch.linalg.qr(torch.randn(heads, dim, dim, generator=generator, dtype=torch.float64))[0]
        scale = 0.5 + torch.rand(heads * dim, generator=generator, dtype=torch.float64)
        codec = TransformCodec(encode, torch.linalg.inv(encode), 3 * scale, bits, scale.square(), quantizer, scale)
        found[side] = codec.to("cuda", dtype)
    return found


@pytest.mark.parametrize("quantizer", ["uniform", "uniform-token-max"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_append_packs_as_its_twin(quantizer: str, dim: int, dtype: torch.dtype) -> None:
    """All but codes at a rounding tie: sums of products in another order move a latent by rounding."""
    pair = codecs(quantizer, 3, dim, torch.float32)
    keys, values = ([HeadSide.of(pair[side], head) for head in range(3)] for side in SIDES)
    tables = LayerTables.of(keys, values, dim, dim // 16)
    encode, append = EncodeTables.of(pair, tables), Appender(dim, WINDOW.sinks, dtype, torch.device("cuda"))
    slots = WINDOW.sinks + WINDOW.recent
    cache = [torch.randn(2, slots, 3 * dim, device="cuda").to(dtype) for _ in SIDES]
    before = [one.clone() for one in cache]
    new = [torch.randn(2, 3 * dim, device="cuda").to(dtype) for _ in SIDES]
    data = torch.zeros(2, 3, tables.tile_bytes, dtype=torch.uint8, device="cuda")
    tokens = torch.full((2,), slots + 64 + 1, dtype=torch.int32, device="cuda")
    append(new[0], new[1], cache[0], cache[1], data, tables, encode, tokens)
    torch.cuda.synchronize()
    ring = WINDOW.sinks + (64 + torch.arange(64)) % WINDOW.recent
    for row in range(2):
        rows = {side: one[row, ring.cuda()].float() for side, one in zip(SIDES, before, strict=True)}
        expected = tiles_of(rows, pair, tables)[0]
        assert float((data[row, 1] == expected).float().mean()) > 0.995
    assert not data[:, 0].any()
    assert not data[:, 2].any()
    slot = WINDOW.sinks + (slots + 64 - WINDOW.sinks) % WINDOW.recent
    for one, old, row in zip(cache, before, new, strict=True):
        assert torch.equal(one[:, slot], row)
        one[:, slot] = old[:, slot]
        assert torch.equal(one, old)


@pytest.fixture(scope="module")
def model(llama_of: Any) -> Any:
    return llama_of(
        hidden_size=256, intermediate_size=256, num_hidden_layers=3, num_attention_heads=8, max_position_embeddings=2048
    ).cuda()


def test_model_steps_as_its_twin(model: Any) -> None:
    """Every token over two flushes, the twin starting each from the kernels' own state and rounded rows of keys.

    Without that they drift apart: a last-bit difference in one step is another code in the next flush.
    """
    plan = [codecs("uniform", 2, 64, torch.float32) for _ in range(3)]
    ids = torch.randint(97, (2, 300), generator=torch.Generator().manual_seed(0)).cuda()
    with attach_codecs(model, plan, WINDOW, "fused") as session, torch.no_grad():
        caches = [session.new_cache(300) for _ in range(2)]
        kwargs = [{session.keyword: cache, "use_cache": True, "logits_to_keep": 1} for cache in caches]
        for one in kwargs:
            model(input_ids=ids[:, :170], **one)
        kernels, twins = (cache.state.groups[0].stores for cache in caches)
        twins[0].shared.kernels = None
        for twin in twins:
            twin.layer = replace(twin.layer, tables=twin.layer.tables.held())
        for step in range(170, 300):
            for twin, store in zip(twins, kernels, strict=True):
                for name in ("data", "keys", "values"):
                    getattr(twin, name).copy_(getattr(store, name))
            found = [model(input_ids=ids[:, step : step + 1], **one).logits for one in kwargs]
            error = (found[0] - found[1]).square().mean().sqrt() / found[1].square().mean().sqrt()
            assert float(error) < CHECK_BOUND, step
            for name in ("tokens", "tiles", "hidden"):
                assert torch.equal(getattr(kernels[0].shared, name), getattr(twins[0].shared, name))


def test_graph_replays_what_eager_steps_do(model: Any) -> None:
    plan = [codecs("uniform", 2, 64, torch.float32) for _ in range(3)]
    ids = torch.randint(97, (2, 190), generator=torch.Generator().manual_seed(1)).cuda()
    with attach_codecs(model, plan, WINDOW, "fused") as session, torch.no_grad():
        runs = []
        for graphed in (False, True):
            cache = session.new_cache(400)
            kwargs = {session.keyword: cache, "use_cache": True, "logits_to_keep": 1}
            token = model(input_ids=ids, **kwargs).logits[:, -1].argmax(-1)
            chosen = [token]
            if graphed:
                decoder = GraphDecoder(model, cache, session.keyword, token)
                chosen += [decoder.step().clone() for _ in range(150)]
            else:
                for _ in range(150):
                    token = model(input_ids=token[:, None], **kwargs).logits[:, -1].argmax(-1)
                    chosen.append(token)
            runs.append(torch.stack(chosen))
    assert torch.equal(runs[0], runs[1])


def test_kernels_read_what_the_packed_cache_reads(model: Any) -> None:
    """Tiles that grew, a step back across a flush, another first position, a padded batch: logits of packed codes."""
    plan = [codecs("uniform", 2, 64, torch.float32) for _ in range(3)]
    ids = torch.randint(1, 97, (2, 400), generator=torch.Generator().manual_seed(2)).cuda()
    mask = torch.ones(2, 400, dtype=torch.int64, device="cuda")
    mask[0, :31] = 0

    def steps(session: Any, cache: Any, first: int, last: int, **options: Any) -> list[torch.Tensor]:
        given = {session.keyword: cache, "use_cache": True, "logits_to_keep": 1}
        found = []
        for t in range(first, last):
            one = {name: make(t) for name, make in options.items()}
            found.append(model(input_ids=ids[:, t : t + 1], **one, **given).logits)
        return found

    runs: dict[str, list[torch.Tensor]] = {}
    for kind in ("packed", "fused"):
        with attach_codecs(model, plan, WINDOW, kind) as session, torch.no_grad():
            caches = [session.new_cache() for _ in range(3)]
            for cache, more in zip(
                caches,
                (
                    {},
                    {"position_ids": torch.arange(500, 640, device="cuda")[None]},
                    {"attention_mask": mask[:, :140], "position_ids": (mask[:, :140].cumsum(1) - 1).clamp_min(0)},
                ),
                strict=True,
            ):
                model(input_ids=ids[:, :140], use_cache=True, **{session.keyword: cache}, **more)
            found = steps(session, caches[0], 140, 336)
            caches[0].crop(-3)
            found += steps(session, caches[0], 333, 400)
            found += steps(session, caches[1], 140, 200, position_ids=lambda t: torch.tensor([[500 + t]]).cuda())
            found += steps(
                session,
                caches[2],
                140,
                200,
                attention_mask=lambda t: mask[:, : t + 1],
                position_ids=lambda t: mask[:, : t + 1].sum(1, keepdim=True) - 1,
            )
            runs[kind] = found
    for step, (got, expected) in enumerate(zip(runs["fused"], runs["packed"], strict=True)):
        error = (got - expected).square().mean().sqrt() / expected.square().mean().sqrt()
        assert float(error) < CHECK_BOUND, step
