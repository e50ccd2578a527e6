"""Evaluation text that was calibration text is found, wherever its windows begin."""

from __future__ import annotations

import random

import pytest
import torch

from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import CollectSettings, Stats
from aatc_cli.models.loading import find_model, load_tokenizer
from aatc_cli.profiles import TextMixture
from aatc_cli.stages.collect import collect
from aatc_cli.stages.collecting.settings import CollectOptions
from aatc_cli.text.overlap import BLOCK, Overlap, block_hashes, overlap
from aatc_cli.text.windows import consecutive_windows


def tokens(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 50_000, shape, generator=torch.Generator().manual_seed(seed))


def test_the_same_windows_are_all_seen_and_others_not():
    seen = block_hashes(tokens(0, 8, 100), None)
    same, other = overlap(tokens(0, 8, 100), None, seen), overlap(tokens(1, 8, 100), None, seen)
    assert (same.tokens, same.windows) == (1.0, 1.0)
    assert (other.tokens, other.windows) == (0.0, 0.0)


@pytest.mark.parametrize("shift", [1, 7, 15, 16, 50])
def test_windows_that_begin_elsewhere(shift):
    """A text cut into windows of 96 tokens to calibrate, and from ``shift`` on into windows of 200 to evaluate."""
    text = tokens(0, 96 * 30)
    seen = block_hashes(text.view(30, 96), None)
    rows = (text.numel() - shift) // 200
    found = overlap(text[shift : shift + 200 * rows].view(rows, 200), None, seen)
    # a block that a window's edge cuts in two is not recognised
    assert 1 - 2 * (BLOCK - 1) / 200 <= found.tokens <= 1
    assert found.windows == 1.0


def test_a_part_that_was_seen_is_counted_token_by_token():
    text = tokens(0, 4, 256)
    seen = block_hashes(text[:1], None)
    assert overlap(text, None, seen).tokens == 0.25
    assert overlap(text, None, seen).windows == 0.25
    halves = torch.cat([text[0, :128], tokens(3, 128)])[None]
    assert overlap(halves, None, seen) == Overlap(tokens=0.5, windows=0.0)


def test_a_bos_in_front_is_no_text():
    with_bos = torch.cat([torch.zeros(8, 1, dtype=torch.int64), tokens(0, 8, 99)], 1)
    seen = block_hashes(with_bos, 0)
    assert torch.equal(seen, block_hashes(tokens(0, 8, 99), None))
    assert overlap(with_bos, 0, seen).tokens == 1.0


def test_what_cannot_be_told_is_not_zero():
    assert overlap(tokens(0, 2, 10), None, block_hashes(tokens(0, 2, 64), None)) is None
    assert overlap(tokens(0, 2, 64), None, block_hashes(tokens(0, 2, 10), None)) is None
    assert block_hashes(tokens(0, 2, 10), None).numel() == 0


def test_hashes_are_few_sorted_and_the_same_everywhere():
    found = block_hashes(tokens(0, 64, 2048), None)
    assert found.numel() == 64 * 128
    assert found.nbytes == 64 * 2048 // 2
    assert found.numpy().view("uint64").tolist() == sorted(found.numpy().view("uint64").tolist())
    # pinned: hashes in Stats on disk are compared with those of a later aatc
    assert block_hashes(torch.arange(16)[None], None).tolist() == [1968868536565827025]
    # the order of tokens counts
    assert block_hashes(torch.arange(16).flip(0)[None], None).tolist() != [1968868536565827025]


def test_stats_tell_which_text_they_are_of(tiny_llama, tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(random.Random(0).randbytes(6000).hex())
    run = Run(tmp_path / "run")
    settings = CollectSettings(samples=40, length=64, rows=64)
    collect(
        run,
        "stats",
        find_model(str(tiny_llama)),
        TextMixture(sources=[str(corpus)], samples=40, length=64),
        settings,
        CollectOptions(),
    )
    seen = Stats.open(run.stats()).blocks
    encode = load_tokenizer(find_model(str(tiny_llama))).encode
    same = consecutive_windows(str(corpus), encode, length=128, limit=None)
    drawn = 40 * 64 / same.tokens.numel()
    found = overlap(same.tokens, None, seen)
    assert 0.9 * drawn <= found.tokens <= 1.1 * drawn
    other = tmp_path / "other.txt"
    other.write_text("".join(f"{index * 7919 % 10_007} of another text altogether; " for index in range(99)))
    assert overlap(consecutive_windows(str(other), encode, length=128, limit=None).tokens, None, seen).tokens == 0.0
