"""Eigen Attention, xKV and MiniCache against their definitions, written out over tokens and layers."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from aatc_cli.config import Geometry, HeadGroups
from aatc_cli.core.allocate import SiteEnergy
from aatc_cli.core.grouped import GroupedMinMax
from aatc_cli.core.layer_groups import BETWEEN, MergedPairs, between, layer_groups
from aatc_cli.core.plain import HalfCodec
from aatc_cli.core.stats import LayerStats
from aatc_cli.methods.allocators.spectrum import shares_before
from aatc_cli.methods.quantizers.merged import retained
from aatc_cli.methods.sites import Sites
from aatc_cli.methods.transforms.head_eigen import HeadEigen
from aatc_cli.methods.transforms.paired_layers import first_pair, shares_upper
from aatc_cli.methods.transforms.shared_basis import SharedLayers
from aatc_cli.profiles import load_recipe

GEOMETRY = Geometry(layers=6, heads=4, kv_heads=2, head_dim=8, hidden_size=32)


class Tables:
    """The joint tensors that a codec reads."""

    path = Path("transform")

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def floats(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        found = self.tensors[name.removeprefix("joint.k.")]
        assert found.shape[0] == shape[0]
        return found.numpy()


def layers(seed: int = 1) -> list[LayerStats]:
    """Six layers whose keys have much in common."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(300, 20, generator=generator)
    found = []
    for _ in range(6):
        keys = common @ torch.randn(20, 16, generator=generator) + 0.1 * torch.randn(300, 16, generator=generator)
        stats = LayerStats.empty(GEOMETRY, 300, torch.zeros(2, 8, 8))
        stats.update(torch.randn(300, 4, 8, generator=generator), keys, keys.flip(1), torch.arange(300))
        found.append(stats)
    return found


def test_eigen_bases_are_of_all_heads_keys_and_of_a_heads_values() -> None:
    stats, transform = layers()[0], HeadEigen()
    keys = stats.k_rows.double().numpy()
    both = np.concatenate((keys[:, :8], keys[:, 8:]))
    _, _, expected = np.linalg.svd(both, full_matrices=False)
    moment = transform.basis_moment("k", stats, stats.k_outer / 300)
    blocks = torch.stack([moment[:8, :8], moment[8:, 8:]])
    found = transform.matrices(blocks, blocks).encode.numpy()
    for head in range(2):
        assert np.allclose(np.abs(found[head].T @ expected.T), np.eye(8), atol=1e-6)
    assert torch.equal(transform.basis_moment("v", stats, stats.v_outer / 300), stats.v_outer / 300)


def test_ranks_are_those_of_the_highest_share_that_is_paid() -> None:
    recipe = load_recipe("eigen-attention")
    rng = np.random.default_rng(3)
    energies = [
        {side: SiteEnergy(np.sort(rng.lognormal(sigma=2, size=(2, 8)))[:, ::-1].ravel(), np.ones(16)) for side in "kv"}
        for _ in range(3)
    ]
    found = recipe.choices.allocator.allocate(recipe.choices, energies, 6.0, HeadGroups.both(2), None).bits
    ranks = {(layer, side): int((found[layer][side][:8] > 0).sum()) for layer in range(3) for side in "kv"}
    assert sum(2 * rank for rank in ranks.values()) <= 6 / 16 * 16 * 6

    def by_share(share: float) -> dict[tuple[int, str], int]:
        out = {}
        for layer in range(3):
            for side in "kv":
                roots = np.sqrt(energies[layer][side].variance.reshape(2, 8))
                held = np.cumsum((roots / roots.sum(1, keepdims=True)).mean(0))
                out[layer, side] = int((held < share).sum()) + 1
        return out

    assert any(by_share(share) == ranks for share in np.linspace(0.01, 0.99, 981))
    assert all(np.array_equal(layer[side][:8], layer[side][8:]) for layer in found for side in "kv")
    assert np.isinf(shares_before(np.array([1.0, 0.0]), 1)[1])


def test_aqua_kv_reads_the_layer_below_and_its_own_keys() -> None:
    """Its form, and its maps by hand: 2C of the layer below to 2C, C keys to C values, in float16."""
    recipe = load_recipe("aqua-kv")
    form = recipe.prediction
    assert (form.layers, form.within, form.rank, form.alone) == (1, "values", 0, False)
    found = recipe.choices.prediction.map_bytes(recipe, GEOMETRY, HeadGroups.both(2))
    assert found == 2 * (5 * 32 * 32 + 6 * 16 * 16)
    with pytest.raises(ValueError, match="tokens in tiles"):
        type(recipe).model_validate(recipe.model_dump() | {"tokens": None})


def test_eigen_bytes_by_hand() -> None:
    bits = [{side: ([16] * 3 + [0] * 5) * 2 for side in ("k", "v")}] * 6
    whole = load_recipe("eigen-attention").choices.layout(GEOMETRY, HeadGroups.both(2), [bits])
    assert whole.bits_packed == 6
    assert whole.static_breakdown() == {"decode_matrices": 6 * 2 * 6 * 8 * 2}
    bits = [{side: ([4] * 3 + [0] * 5) * 2 for side in ("k", "v")}] * 6
    narrow = load_recipe("eigen-attention-4bit").choices.layout(GEOMETRY, HeadGroups.both(2), [bits])
    # a scale and a minimum for each head of a token
    assert narrow.breakdown(4 + 128 + 16)["scales"] == 16 * 6 * 2 * 2 * 4


def joint(average: float, name: str) -> tuple[object, list[dict[str, np.ndarray]], torch.Tensor]:
    """The codec of the keys of six layers, the widths, and keys [6, 1, T, 16]."""
    recipe, stats = load_recipe(name), layers()
    tables, _ = SharedLayers().joint(stats, "k")
    sizes = {side: [tables[f"basis_{place}"].shape[1] for place in range(2)] for side in ("k", "v")}
    flat = SiteEnergy(np.ones(16), np.ones(16))
    bits = recipe.choices.allocator.allocate(
        recipe.choices, [{"k": flat, "v": flat}] * 6, average, HeadGroups.both(1), sizes
    ).bits
    sites = Sites(Tables(tables), GEOMETRY, HeadGroups.both(1), [{s: w.tolist() for s, w in b.items()} for b in bits])
    x = torch.stack([stats_.k_rows[:40] for stats_ in stats])[:, None]
    return recipe.choices.quantizer.joint_codec(recipe.choices, sites, "k"), bits, x


def test_layers_share_a_basis_in_fours() -> None:
    assert [list(group) for group in layer_groups(6, 4)] == [[0, 1, 2, 3], [4, 5]]
    codec, bits, x = joint(4.0, "xkv")
    found = codec.reconstruct_layers(x)  # type: ignore[attr-defined]
    for group in ([0, 1, 2, 3], [4, 5]):
        rows = np.concatenate([layers()[layer].k_rows.double().numpy() for layer in group], 1)
        kept = int(0.4 * 2 * 4 / 16 * rows.shape[1])
        assert sum(int((bits[layer]["k"] > 0).sum()) for layer in group) == kept
        _, _, basis = np.linalg.svd(rows, full_matrices=False)
        wide = np.concatenate([x[layer, 0].double().numpy() for layer in group], 1)
        expected = wide @ basis[:kept].T @ basis[:kept]
        got = np.concatenate([found[layer, 0].double().numpy() for layer in group], 1)
        assert np.abs(got - expected).max() < 4e-3 * np.abs(wide).max()
    values = [int((layer["v"] > 0).sum()) for layer in bits]
    assert sum(values[:4]) == int(0.6 * 2 * 4 / 16 * 64)


def test_latents_of_four_bits_have_one_scale_a_group() -> None:
    codec, bits, x = joint(2.0, "xkv-4bit")
    law = load_recipe("xkv-4bit").choices.layout(
        GEOMETRY, HeadGroups.both(1), [[{s: w.tolist() for s, w in b.items()} for b in bits]]
    )
    assert law.breakdown(4 + 128 + 16)["scales"] == 16 * 2 * 2 * 4
    kept = {s: [sum(int((bits[i][s] > 0).sum()) for i in group) for group in layer_groups(6, 4)] for s in ("k", "v")}
    assert law.static_breakdown()["decode_matrices"] == 2 * 16 * sum(
        4 * kept[side][0] + 2 * kept[side][1] for side in ("k", "v")
    )
    assert 0 < float((codec.reconstruct_layers(x) - x).norm() / x.norm()) < 0.5  # type: ignore[attr-defined]


def test_pairs_begin_in_the_middle() -> None:
    assert first_pair(6) == 3
    assert [shares_upper(layer, 6) for layer in range(6)] == [False, False, False, False, True, False]
    assert [shares_upper(layer, 8) for layer in range(8)] == [False] * 5 + [True, False, True]


def test_directions_lie_on_the_great_circle() -> None:
    a, b = np.array([1.0, 0, 0]), np.array([math.cos(1.2), math.sin(1.2), 0])
    found, apart = between(torch.from_numpy(a), torch.from_numpy(b))
    assert np.allclose(found, [math.cos(1.2 * BETWEEN), math.sin(1.2 * BETWEEN), 0], atol=1e-12)
    assert float(apart) == pytest.approx(1.2 / math.pi)
    same, apart = between(torch.from_numpy(a), torch.from_numpy(a))
    assert torch.allclose(same, torch.from_numpy(a))
    assert float(apart) == 0


def test_merged_layers_as_written_out() -> None:
    x = torch.randn(5, 1, 64, 16, generator=torch.Generator().manual_seed(6)).double()
    x[3] = x[2] + 0.6 * x[3]
    codec = MergedPairs(2, 8, 32, 2, HalfCodec(), HalfCodec())
    found = codec.reconstruct_layers(x)
    for layer in (0, 1, 4):
        assert torch.equal(found[layer], x[layer].half().double())
    heads = x[2:4, 0].unflatten(-1, (2, 8)).numpy()
    norms = np.linalg.norm(heads, axis=-1, keepdims=True)
    units = heads / norms
    angle = np.arccos(np.clip((units[0] * units[1]).sum(-1), -1, 1))
    for block in range(2):
        span = range(32 * block, 32 * block + 32)
        furthest = sorted(span, key=lambda token: -angle[token].mean())[:2]
        for token in span:
            for place in range(2):
                expected = x[2 + place, 0, token].numpy()
                if token not in furthest:
                    parts = []
                    for head in range(2):
                        w = angle[token, head]
                        e = math.sin(0.4 * w) * units[0, token, head] + math.sin(0.6 * w) * units[1, token, head]
                        parts.append(e / math.sin(w) * norms[place, token, head])
                    expected = np.concatenate(parts)
                assert np.allclose(found[2 + place, 0, token].numpy(), expected, atol=4e-3)


def test_minicache_reads_kivis_codes_and_counts_all() -> None:
    recipe = load_recipe("minicache")
    flat = SiteEnergy(np.ones(16), np.ones(16))
    bits = recipe.choices.allocator.allocate(
        recipe.choices, [{"k": flat, "v": flat}] * 6, 4.0, HeadGroups.both(1), None
    ).bits
    widths = [{side: layer[side].tolist() for side in ("k", "v")} for layer in bits]
    assert [layer["k"][0] for layer in widths] == [4, 4, 4, 4, 0, 4]
    sites = Sites(None, GEOMETRY, HeadGroups.both(1), widths)  # type: ignore[arg-type]
    x = torch.randn(6, 1, 64, 16, generator=torch.Generator().manual_seed(8))
    wide = load_recipe("kivi")
    assert (wide.coding.group, retained(32), retained(16)) == (32, 2, 1)
    geometry = Geometry(layers=6, heads=4, kv_heads=2, head_dim=16, hidden_size=64)
    for side, axis in (("k", "channel"), ("v", "token")):
        codec = recipe.choices.quantizer.joint_codec(
            recipe.choices,
            Sites(None, geometry, HeadGroups.both(1), [{s: w * 2 for s, w in b.items()} for b in widths]),
            side,  # type: ignore[arg-type]
        )
        rows = torch.cat((x, x.flip(-1)), -1)
        expected = GroupedMinMax(torch.full((32,), 4), 32, axis).reconstruct(rows[0])
        assert torch.equal(codec.reconstruct_layers(rows)[0], expected)
    law = recipe.choices.layout(geometry, HeadGroups.both(1), [[{s: w * 2 for s, w in b.items()} for b in widths]])
    found = law.breakdown(4 + 128 + 32)
    # one pair: two lengths of two heads of 32 tokens and two sides; 2 tokens of a side in both layers
    assert found["lengths"] == 2 * 2 * 2 * 32 * 2
    assert found["retained"] == 2 * 2 * 2 * (32 * 4 // 8 + 4)
    assert found["places"] == 2 * 2
    assert found["key_scales"] == 5 * 32 * 2
    assert sites.bits is widths
