"""One allocation over tokens and classes: against all assignments there are, and its bytes against packed rows."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from aatc_cli.artifacts.plan_press import class_losses
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import CollectSettings
from aatc_cli.config import Geometry, HeadGroups, Window, make_budget
from aatc_cli.core import SIDES
from aatc_cli.core.press.free_layout import FreeTileLayout
from aatc_cli.core.press.priced import Levels, importance, priced_classes
from aatc_cli.core.press.reading import Reading
from aatc_cli.core.tile_layout import TileLayout
from aatc_cli.core.tile_rule import TileRule
from aatc_cli.errors import AatcError
from aatc_cli.evals.subjects import Subject
from aatc_cli.methods.registry import press_of
from aatc_cli.models.loading import find_model, load_model
from aatc_cli.profiles import TextMixture, load_recipe
from aatc_cli.runtime.attach import prepare
from aatc_cli.runtime.pressed.form import pressed_of
from aatc_cli.stages.allocate import allocate
from aatc_cli.stages.collect import CollectOptions, collect
from aatc_cli.stages.whiten import Wanted, whiten

LAYERS, HEADS, TOKENS = 2, 1, 4


def readings_of(seed: int, tokens: int = TOKENS) -> list[Reading]:
    drawn = torch.Generator().manual_seed(seed)
    return [
        Reading(*(torch.rand(1, HEADS, tokens + 3, generator=drawn, dtype=torch.float64) ** 3 for _ in range(3)))
        for _ in range(LAYERS)
    ]


AMONG = torch.tensor([False, True, True, True, True, False, False])


def levels_of(seed: int, room: float) -> Levels:
    """Two classes a head: more bytes and less loss."""
    drawn = torch.Generator().manual_seed(seed)
    few = torch.rand(LAYERS, HEADS, 1, generator=drawn, dtype=torch.float64) + 0.5
    paid = torch.cat((few, few + 0.5 + torch.rand(few.shape, generator=drawn, dtype=torch.float64)), 2)
    least = torch.rand(few.shape, generator=drawn, dtype=torch.float64)
    losses = torch.cat((least + 1, least, least + 3), 2)
    return Levels(paid, losses, room)


@pytest.mark.parametrize("room", [0.3, 1.0, 2.2, 100.0])
@pytest.mark.parametrize("seed", range(4))
def test_no_assignment_of_as_many_bytes_loses_less(seed, room):
    """All 3^8 ways to put eight tokens into two classes or none."""
    readings, levels = readings_of(seed), levels_of(seed, room)
    found = priced_classes(readings, AMONG, levels)
    weights = [importance(reading, AMONG)[0, 0] for reading in readings]

    def worth(assignment):
        paid = lost = 0.0
        for place, k in enumerate(assignment):
            layer, token = divmod(place, TOKENS)
            paid += float(levels.bytes[layer, 0, k]) if k < 2 else 0.0
            lost += float(weights[layer][token] * levels.losses[layer, 0, k])
        return paid, lost

    chosen = [int(k) if k >= 0 else 2 for layer in found for k in layer[0, 0, 1:5]]
    paid, lost = worth(chosen)
    assert paid <= room * TOKENS
    ways = [worth(way) for way in itertools.product(range(3), repeat=LAYERS * TOKENS)]
    assert all(other >= lost - 1e-12 for spent, other in ways if spent <= paid + 1e-12)
    # the next step up does not fit: bytes are spent but for less than the largest step
    step = float((levels.bytes.max() - levels.bytes.min()).clamp_min(float(levels.bytes.max())))
    assert paid > room * TOKENS - step or room == 100.0
    assert all((layer[..., ~AMONG] == -1).all() for layer in found)


def test_importance_is_both_readings_relative_to_the_head():
    [reading, _] = readings_of(9)
    again, before = reading.again[0, 0, 1:5], reading.before[0, 0, 1:5]
    expected = 0.5 * again / again.mean() + 0.5 * before / before.mean()
    torch.testing.assert_close(importance(reading, AMONG)[0, 0], expected)
    assert importance(reading, AMONG).mean() == pytest.approx(1)
    torch.testing.assert_close(importance(reading, AMONG, press_of("priced-own").own)[0, 0], before / before.mean())


GEOMETRY = Geometry(layers=2, heads=4, kv_heads=2, head_dim=32, hidden_size=128)
LAW, RULE = Window(sinks=4, recent=128, flush=64), TileRule((32, 16, 16), "head")


def planned() -> list[list[dict[str, list[int]]]]:
    """Widths of three classes; the first head of the first layer has none in the lowest."""
    drawn = torch.Generator().manual_seed(3)
    bits = [
        [{side: torch.randint(0, 7, (64,), generator=drawn).tolist() for side in SIDES} for _ in range(2)]
        for _ in range(3)
    ]
    for side in SIDES:
        bits[0][0][side][:32] = [0] * 32
    return bits


def packed_rows(widths: list[int], count: int) -> int:
    """Bytes of ``count`` rows that are really packed: planes of 16 two-bit digits, then of 16 one-bit ones."""
    total = 0
    for digits, size in ((sum(w // 2 for w in widths), 2), (sum(w % 2 for w in widths), 1)):
        for _ in range(-(-digits // 16)):
            total += np.packbits(np.zeros((count, 16 * size), dtype=bool)).nbytes
    return total + (count if any(widths) else 0)


def test_bytes_are_rows_of_every_class_and_the_class_of_every_token():
    bits, tokens = planned(), 4 + 640 + 128
    whole = TileLayout.of_classes(GEOMETRY, LAW, HeadGroups.both(2), bits, RULE, 8)
    law = FreeTileLayout.of(whole, bits, 0.5)
    shares = [[0.1, 0.2, 0.05, 0.0, 0.5, 0.25], [0.0, 0.0, 1.0, 0.3, 0.0, 0.0]]
    found = law.of_prompt(tokens, shares)
    expected = whole.bytes(4 + 128) + 2 * 2 * 640 * 2 // 8
    for layer in range(2):
        for head in range(2):
            for k in range(3):
                count = round(640 * shares[layer][3 * head + k])
                for side in SIDES:
                    expected += packed_rows(bits[k][layer][side][32 * head : 32 * head + 32], count)
    assert found.bytes(tokens) == expected
    assert sum(found.breakdown(tokens).values()) == expected
    # what comes later fills tiles by quotas
    assert found.bytes(tokens + 64) - expected == round(sum(tile.total for layer in law.by_head for tile in layer))
    # a class without bits is eviction: its tokens take none but what says so
    none = law.of_prompt(tokens, [[1.0, 0.0, 0.0, 0.0, 0.0, 0.0], [0.0] * 6])
    assert none.bytes(tokens) == whole.bytes(4 + 128) + 2 * 2 * 640 * 2 // 8
    # shares of the quotas are those of the plan
    even = law.of_prompt(tokens, [[0.25, 0.125, 0.125] * 2] * 2)
    assert even.bits_packed == pytest.approx(law.bits_packed)
    assert even.mean_bits == pytest.approx(law.mean_bits) == pytest.approx(0.5 * whole.mean_bits)
    assert law.room * 8 / (2 * 2 * 64) == pytest.approx(law.bits_packed - 2 / 64, abs=1e-6)


@pytest.fixture(scope="module")
def longer(new_model, tmp_path_factory):
    """A model with room for a prompt and its second reading, and a run with the Transform of tiles."""
    folder = tmp_path_factory.mktemp("priced")
    return new_model(folder / "model", max_position_embeddings=1100), Run(folder / "run")


@pytest.fixture(scope="module")
def run_of_tiles(longer, corpus) -> Run:
    model, run = longer
    settings = CollectSettings(samples=2, length=520, rows=64, fisher=2)
    mixture = TextMixture(sources=[str(corpus)], samples=2, length=520)
    collect(run, "stats", find_model(str(model)), mixture, settings, CollectOptions())
    whiten(run, transform_stats=run.stats(), rate_stats=run.stats(), wanted=Wanted.by(load_recipe("loss-aware-tiles")))
    return run


def test_losses_of_a_plan_are_its_energies_at_its_widths(run_of_tiles):
    recipe = load_recipe("loss-aware-tiles+priced-0.5")
    [plan] = allocate(run_of_tiles, recipe, [make_budget(bits=1.0)])
    assert plan.layout.bits_packed == pytest.approx(1.0, abs=0.02)
    assert plan.layout.bits_packed <= 1.0 + 1e-9
    losses, choices = class_losses(plan), recipe.choices
    energies = choices.grouped_energies(plan.transform().energies(), plan.groups)
    for layer, head, k in itertools.product(range(plan.geometry.layers), range(plan.geometry.kv_heads), range(3)):
        dim, left = plan.geometry.head_dim, 0.0
        for side in SIDES:
            widths = plan.class_bits(k)[layer][side][head * dim : (head + 1) * dim]
            left += sum(
                float(e) * float(choices.filling.curve[w])
                for e, w in zip(energies[side][layer][head], widths, strict=True)
            )
        assert losses[layer, head, k] == pytest.approx(left)
        assert losses[layer, head, 3] == pytest.approx(float(energies["v"][layer][head].sum()))


def test_from_plan_to_divergence(run_of_tiles, measured, longer, corpus):
    """Bytes found are those that the plan says, whatever the text; more of them lose less."""
    subjects = []
    for bits in (1.0, 3.0):
        [plan] = allocate(run_of_tiles, load_recipe("loss-aware-tiles+priced-0.5"), [make_budget(bits=bits)])
        subjects.append(Subject(plan.recipe, plan))
    size = {"length": 420, "limit": 1, "prompt": 360, "first": 360}
    few, many = measured("kl", run_of_tiles, longer[0], subjects, text=[corpus], **size)
    for evaluation, bits in ((few, 1.0), (many, 3.0)):
        assert 0.9 * bits < evaluation.bits_packed <= bits + 1e-3
        assert 0 < evaluation.kept_share <= 1
    assert many.kl_mean < few.kl_mean


def test_the_live_cache_of_a_plan(run_of_tiles, longer):
    """Simulated, whatever is asked of it; what it answers is checked in tests/runtime/test_pressed_live_tiles.py."""
    [plan] = allocate(run_of_tiles, load_recipe("loss-aware-tiles+priced-0.5"), [make_budget(bits=1.0)])
    model = load_model(find_model(str(longer[0])))
    session = prepare(model, plan)
    pressed = pressed_of(session.spec)
    assert session.spec.form.kind == "simulated"
    assert pressed is not None
    assert pressed.levels is not None
    for kind in ("packed", "fused"):
        with pytest.raises(AatcError, match=f"which the {kind} cache does not hold"):
            prepare(model, plan, kind)


def test_what_it_goes_with():
    for name in ("loss-aware+priced-0.5", "paper-tiles+priced-0.5"):
        with pytest.raises(AatcError, match='press "priced" shares tokens out over the classes of tiles'):
            load_recipe(name)
