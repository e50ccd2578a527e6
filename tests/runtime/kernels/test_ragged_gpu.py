"""Sequences of their own lengths in one captured step on a Hopper GPU: each as if it were alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from aatc_cli.config import Window
from aatc_cli.runtime.fused_tiles.ragged import RaggedDecoder
from aatc_cli.runtime.kernels.launch import fused_available, on_hopper

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (fused_available() and on_hopper(torch.device("cuda"))), reason="needs a Hopper GPU and CuPy"
    ),
]

WINDOW = Window(sinks=4, recent=128, flush=64)


@torch.no_grad()
def test_sequences_begin_and_end_without_another_capture(llama_of: Any, tile_codecs: Any, tile_session: Any) -> None:
    model = llama_of(
        hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8, max_position_embeddings=2048
    ).cuda()
    # layers whose records differ in size
    codecs = [tile_codecs(2, most=most)[layer] for layer, most in enumerate((4, 2))]
    session = tile_session(model, codecs, WINDOW, "fused")
    ids = torch.randint(97, (600,), generator=torch.Generator().manual_seed(0)).cuda()
    prompts, steps = [ids[:400], ids[100:190], ids[30:282]], 90

    def filled(*rows: Tensor) -> tuple[Any, Tensor]:
        width = max(len(row) for row in rows)
        padded = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in rows])
        mask = torch.stack([(torch.arange(width, device="cuda") >= width - len(row)).long() for row in rows])
        cache, positions = session.new_cache(), (mask.cumsum(-1) - 1).clamp_min(0)
        found = model(padded, attention_mask=mask, position_ids=positions, **{session.keyword: cache}).logits
        return cache, found[:, -1].argmax(-1)

    with session.attached():
        decoder = RaggedDecoder(session, 2, 600, 14)
        graph, errors = decoder.decoding.graph, []
        caches = [filled(prompt) for prompt in prompts]
        place = decoder.start(*filled(*prompts[:2]))
        alone = {place[0]: caches[0], place[1]: caches[1]}
        for count in range(steps):
            if count == 70:
                decoder.end(place[1])
                alone[place[1]] = caches[2]
                assert decoder.start(*filled(prompts[2])) == [place[1]]
            fed = decoder.tokens[:, 0].clone()
            decoder.step()
            assert decoder.logits is not None
            for row, (cache, _) in alone.items():
                logits = model(fed[row][None, None], **{session.keyword: cache}).logits[0, -1]
                errors.append(float((decoder.logits[row] - logits).square().mean() / logits.square().mean()) ** 0.5)
    assert decoder.decoding.graph is graph
    assert max(errors) < 5e-2
    assert sum(errors) / len(errors) < 2e-3
    # tiles that the window rule wants packed, and the pool without those of the sequence that ended
    assert [len(pages) for pages in decoder.tiles] == [6, 3]
    assert decoder.pool.free == 14 - 9
