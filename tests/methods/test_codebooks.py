"""A2ATS's and CommVQ's codes against searches written out, and what their codebooks promise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from aatc_cli.config import Geometry, HeadGroups
from aatc_cli.core.additive_codes import AdditiveCodec, place_commuting, place_entries, stages_of, turned
from aatc_cli.core.rope import apply_rope
from aatc_cli.core.stats import LayerStats
from aatc_cli.core.vector_codes import ProductCodec, nearest_points, place_points, score_root
from aatc_cli.errors import AatcError
from aatc_cli.methods.quantizers.commuting import Commuting
from aatc_cli.methods.sites import Site
from aatc_cli.profiles import load_recipe

GEOMETRY = Geometry(layers=1, heads=4, kv_heads=2, head_dim=16, hidden_size=64)


class Tables:
    """The tensors that a codec reads."""

    path = Path("transform")

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def floats(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        found = self.tensors[name.split(".")[-1]]
        assert tuple(found.shape) == shape
        return found.numpy()


def stats() -> LayerStats:
    """Keys whose channels go together, queries that look at few of them."""
    generator = torch.Generator().manual_seed(11)
    found = LayerStats.empty(GEOMETRY, 600, torch.zeros(2, 16, 16))
    mix = torch.randn(32, 32, generator=generator) / 6
    keys = torch.randn(600, 32, generator=generator) @ mix + 0.3
    looked_at = torch.linspace(3, 0.05, 16).view(4, 4).T.flatten()
    queries = torch.randn(600, 4, 16, generator=generator) * looked_at
    found.update(queries, keys, keys.flip(1), torch.arange(600))
    return found


def site_codec(name: str, side: str, bits: int) -> tuple[object, dict[str, torch.Tensor]]:
    recipe, found = load_recipe(name), stats()
    rows = (found.k_rows if side == "k" else found.v_rows).double()
    tables = recipe.choices.quantizer.tables(side, found, lambda: rows, 1)
    site = Site(Tables(tables), 0, side, GEOMETRY, 1, [bits] * 32)
    return recipe.choices.allocator.codec(recipe.choices, site), tables


def held_out() -> torch.Tensor:
    """Rows like those that points were fitted to, none of them the same."""
    mix = torch.randn(32, 32, generator=torch.Generator().manual_seed(11)) / 6
    return torch.randn(1, 40, 32, generator=torch.Generator().manual_seed(12)) @ mix + 0.3


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_keys_take_the_point_whose_error_queries_see_least(bits: int) -> None:
    codec, tables = site_codec("a2ats", "k", bits)
    x = held_out()
    found = codec.reconstruct(x)[0]  # type: ignore[attr-defined]
    size = 8 // bits
    for head in range(2):
        root = tables["root"][head].numpy()
        for token in range(0, 40, 7):
            turned_row = x[0, token, 16 * head : 16 * head + 16].double().numpy() @ root
            parts = []
            for part in range(16 // size):
                points = tables[f"points_{bits}"][head, part].numpy()
                own = turned_row[part * size : (part + 1) * size]
                parts.append(points[((points - own) ** 2).sum(1).argmin()])
            expected = np.concatenate(parts) @ np.linalg.inv(root)
            got = found[token, 16 * head : 16 * head + 16].numpy()
            assert np.allclose(got, expected, atol=2e-3 * np.abs(expected).max())


def test_the_root_is_that_of_the_queries_moment() -> None:
    moment = stats().q_outer / 600
    root = score_root(moment, damping=0.0)
    assert torch.allclose(root @ root.mT, moment, rtol=1e-9, atol=1e-12)


def test_scores_are_nearer_than_with_points_of_keys_alone() -> None:
    found, x = stats(), held_out()
    rows = found.k_rows.double().unflatten(1, (2, 16)).transpose(0, 1)
    plain = ProductCodec(torch.stack([place_points(head.unflatten(-1, (-1, 4)).transpose(0, 1)) for head in rows]))
    ours, _ = site_codec("a2ats", "k", 2)

    def seen(codec: object) -> float:
        error = (codec.reconstruct(x) - x)[0].double().unflatten(-1, (2, 16))  # type: ignore[attr-defined]
        return float(torch.einsum("thd,hde,the->", error, found.q_outer / 600, error))

    assert seen(ours) < 0.9 * seen(plain)


def test_values_are_taken_as_they_are() -> None:
    codec, tables = site_codec("a2ats", "v", 2)
    assert "root" not in tables
    x = held_out()
    found = codec.reconstruct(x)  # type: ignore[attr-defined]
    points = tables["points_2"][1, 0]
    nearest = (points - x[0, 5, 16:20].double()).square().sum(-1).argmin()
    assert torch.allclose(found[0, 5, 16:20].double(), points[nearest], atol=1e-6)


def test_points_are_means_of_their_rows() -> None:
    rows = torch.randn(3, 500, 2, generator=torch.Generator().manual_seed(0)).double()
    points = place_points(rows, 8, rounds=60)
    index = torch.cdist(rows, points).argmin(-1)
    for part in range(3):
        for code in range(8):
            mean = rows[part, index[part] == code].mean(0)
            assert torch.allclose(points[part, code], mean, atol=2e-2)
    assert place_points(rows[:, :3], 8).shape == (3, 8, 2)


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("side", ["k", "v"])
def test_stages_as_written_out(side: str, bits: int) -> None:
    codec, tables = site_codec("commvq", side, bits)
    x = held_out()
    found = codec.reconstruct(x)[0]  # type: ignore[attr-defined]
    assert stages_of(bits, 16) == bits * 16 // 6
    for head in range(2):
        for token in range(0, 40, 9):
            left = x[0, token, 16 * head : 16 * head + 16].double().numpy().copy()
            whole = np.zeros(16)
            for stage in range(stages_of(bits, 16)):
                entries = tables["entries"][head, stage].numpy()
                if side == "k":
                    z = entries[:, :8] + 1j * entries[:, 8:]
                    z = np.concatenate([z * 1j**quarter for quarter in range(4)])
                    entries = np.concatenate((z.real, z.imag), 1)
                best = entries[((entries - left) ** 2).sum(1).argmin()]
                left, whole = left - best, whole + best
            assert np.allclose(found[token, 16 * head : 16 * head + 16].numpy(), whole, atol=1e-4)


def test_entries_of_keys_commute_with_the_rotation() -> None:
    """The blocks [[x, -y], [y, x]] of an entry and its quarter turn, times any rotation, either way round."""
    base = torch.randn(1, 8, generator=torch.Generator().manual_seed(1)).double()
    entries = turned(base)
    assert torch.equal(turned(entries[1:2]), entries[[1, 2, 3, 0]])
    block = torch.zeros(8, 8, dtype=torch.float64)
    for pair in range(4):
        places = [pair, pair + 4]
        block[places, pair], block[places, pair + 4] = entries[0, places], entries[1, places]
    angles = torch.tensor([0.3, 1.1, -2.0, 0.7], dtype=torch.float64).repeat(2)[None, None]
    turn = apply_rope(torch.eye(8).double()[None, None], angles.cos().expand(1, 8, 8), angles.sin().expand(1, 8, 8))
    assert torch.allclose(block @ turn[0, 0], turn[0, 0] @ block, atol=1e-12)


def test_commuting_entries_lie_between_free_ones_and_a_quarter_of_them() -> None:
    rows = stats().k_rows.double()
    rows = (rows - rows.mean(0)).unflatten(1, (2, 16)).transpose(0, 1)
    keys, free = place_commuting(rows, 4), place_entries(rows, 4)
    assert keys.shape == (2, 4, 16, 16)
    assert free.shape == (2, 4, 64, 16)
    few, left = [], rows
    for _ in range(4):
        few.append(place_points(left, 16))
        left = left - nearest_points(left, few[-1])
    x = rows.transpose(0, 1).flatten(1)[None].float()

    def error(entries: torch.Tensor) -> float:
        return float((AdditiveCodec(entries.float()).reconstruct(x) - x).norm() / x.norm())

    assert error(free) < error(turned(keys)) < error(torch.stack(few, 1))
    by_stage = [error(turned(keys[:, :n])) for n in range(1, 5)]
    assert by_stage == sorted(by_stage, reverse=True)


def test_bytes_by_hand() -> None:
    bits = [{side: [2] * 32 for side in ("k", "v")}]
    law = load_recipe("a2ats").choices.layout(GEOMETRY, HeadGroups.both(1), [bits])
    assert law.bits_packed == 2
    assert law.static_breakdown() == {"points": 2 * 32 * 256 * 2, "roots": 32 * 16 * 2}
    law = load_recipe("commvq").choices.layout(GEOMETRY, HeadGroups.both(1), [bits])
    assert law.bits_packed == 2
    # 5 stages of heads of 16 channels at 2 bits: 16 vectors of keys and 64 of values each
    assert law.static_breakdown() == {"entries": 5 * (16 + 64) * 32 * 2}


def test_what_they_cannot_be() -> None:
    for name, change, problem in (
        ("a2ats", {"widths": [1, 2, 3], "max_bits": 3}, "query-codes"),
        ("commvq", {"max_bits": 3}, "commuting-codes"),
    ):
        recipe = load_recipe(name)
        with pytest.raises(ValueError, match=problem):
            type(recipe).model_validate(recipe.model_dump() | change)
    small = Geometry(layers=1, heads=2, kv_heads=2, head_dim=4, hidden_size=8)
    empty = LayerStats.empty(small, 4, torch.zeros(2, 4, 4))
    with pytest.raises(AatcError, match="heads of 4 channels are too few"):
        Commuting().tables("k", empty, lambda: torch.ones(4, 8).double(), 1)
