"""The closed-loop fit: against least squares on coded rows, its noise model, forms of maps, and layers far apart."""

from __future__ import annotations

import pytest
import torch

from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.curves import DISTORTION
from aatc_cli.core.planned_coding import ClassCosts, ReadBack, planned_coding
from aatc_cli.core.predictive import units_of
from aatc_cli.core.predictive_fit import ClosedLoop, Coding, Form
from aatc_cli.core.ridge import RIDGE
from aatc_cli.core.transform import loss_metric

C, LAYERS, TOKENS = 6, 5, 60_000
UNITS = units_of(C, {"k": 2, "v": 2})
# every latent at one width: a and n of it
WIDTH = 2
SHARE, NOISE = 1 - DISTORTION[WIDTH], DISTORTION[WIDTH] * (1 - DISTORTION[WIDTH])


def rows_of(seed: int = 0) -> list[torch.Tensor]:
    """Layers that follow from one another: normal, so that the noise model is exact but for sampling."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(TOKENS, 2 * C, generator=generator, dtype=torch.float64)]
    for _ in range(1, LAYERS):
        mix = torch.randn(2 * C, 2 * C, generator=generator, dtype=torch.float64) / (2 * C) ** 0.5
        fresh = torch.randn(TOKENS, 2 * C, generator=generator, dtype=torch.float64)
        rows.append(rows[-1] @ mix + 0.4 * fresh)
    return rows


def fitted(rows: list[torch.Tensor], form: Form, lags: int) -> list:
    loop = ClosedLoop(
        lambda layer, below: rows[layer - below].T @ rows[layer] / TOKENS,
        lags,
        LAYERS,
        form,
        metric=lambda layer: torch.eye(2 * C, dtype=torch.float64),
    )
    eye = torch.eye(3, dtype=torch.float64)

    def coding(layer, unit, found) -> Coding:
        one = torch.ones_like(found.energy)
        return Coding(SHARE * one, NOISE * found.energy, 3.0 * WIDTH)

    return [
        loop.fit(layer, UNITS, lambda layer, unit, moment: loss_metric(moment, eye), coding) for layer in range(LAYERS)
    ]


def coded(residual: torch.Tensor, unit) -> torch.Tensor:
    """The residual of all tokens through the real quantizer, without a token scale."""
    codec = TransformCodec(
        unit.transform.encode[None],
        unit.transform.decode[None],
        torch.ones(3, dtype=torch.float64),
        torch.full((3,), WIDTH),
        unit.energy,
        "lloyd",
    )
    h = residual @ unit.transform.encode / unit.energy.sqrt()
    index = codec._tables.nearest(h)
    return codec._tables.values(index) * unit.energy.sqrt() @ unit.transform.decode


@pytest.mark.parametrize("form", [Form(1), Form(2, "units"), Form(2, "values"), Form(0, "units")], ids=str)
def test_maps_are_those_of_least_squares_on_what_coding_gives_back(form: Form) -> None:
    """A chain of normal layers coded by the real quantizer, token by token: the same maps, the same residuals."""
    rows = rows_of()
    below: list[torch.Tensor] = []
    for layer, (maps, units, bits) in enumerate(fitted(rows, form, 3)):
        assert bits == 4 * 3 * WIDTH
        decoded = torch.zeros_like(rows[layer])
        base = maps.from_below(below)
        for unit, found in zip(UNITS, units, strict=True):
            told = maps.of_unit(unit, base, decoded)
            mine = rows[layer][:, unit.columns]
            read = [*below[: form.layers], *([decoded] if maps.within.shape[0] else [])]
            z = torch.cat(read, 1) if read else rows[layer][:, :0]
            z = z[:, z.square().sum(0) > 0]
            if z.shape[1] and told is not None and form.within != "values":
                gram = z.T @ z
                gram.diagonal().mul_(1 + RIDGE)
                best = z @ torch.linalg.solve(gram, z.T @ mine)
                assert float((told - best).square().mean()) < 0.002 * float(mine.square().mean())
            residual = mine if told is None else mine - told
            energy = (residual @ found.transform.encode).square().mean(0)
            torch.testing.assert_close(found.energy, energy, rtol=0.04, atol=1e-3)
            decoded[:, unit.columns] = coded(residual, found) + (0.0 if told is None else told)
        below = [decoded, *below][:2]


def test_layers_far_apart_go_through_those_between() -> None:
    """A chain of first order: one layer apart says everything, so more of them change nothing."""
    rows = rows_of(1)
    short, long = fitted(rows, Form(2, "units"), 2), fitted(rows, Form(2, "units"), 4)
    for (_, mine, _), (_, other, _) in zip(short, long, strict=True):
        for a, b in zip(mine, other, strict=True):
            torch.testing.assert_close(a.energy, b.energy, rtol=5e-3, atol=1e-4)


def test_less_that_is_read_tells_less() -> None:
    rows = rows_of(2)

    def left(form: Form) -> float:
        return sum(float(unit.energy.sum()) for _, units, _ in fitted(rows, form, 2)[1:] for unit in units)

    full, whole_rank = left(Form(1)), left(Form(1, rank=2 * C))
    assert whole_rank == pytest.approx(full, rel=0.02)
    assert full < left(Form(1, rank=4)) < left(Form(1, rank=1)) < left(Form(0))
    assert full < left(Form(1, alone=True)) < left(Form(0))
    assert left(Form(1, "units")) < full


@pytest.mark.parametrize("size", [1e-7, 1e4])
def test_numbers_taken_of_rows_of_any_size_are_finite(size: float) -> None:
    """Half precision holds what is taken, and it tells about as much as of rows of another size."""
    rows = rows_of(3)
    usual = fitted(rows, Form(1, "units", rank=4), 1)
    found = fitted([size * layer for layer in rows], Form(1, "units", rank=4), 1)
    for (maps, units, _), (_, others, _) in zip(found[1:], usual[1:], strict=True):
        assert maps.squeeze is not None
        assert bool(torch.isfinite(maps.squeeze).all())
        left = sum(float(unit.energy.sum()) for unit in units) / size**2
        assert left == pytest.approx(sum(float(unit.energy.sum()) for unit in others), rel=0.05)


def test_widths_at_a_level_are_those_of_least_cost() -> None:
    table = ReadBack(*(torch.tensor(x) for x in ([1.0, 0.4, 0.1], [0.0, 1.0, 2.0], [0.0, 0.6, 0.9], [0.0, 0.2, 0.1])))
    classes = ClassCosts(torch.tensor([0.75, 0.25]), torch.tensor([[0.5, 0.5], [2.5, 2.5]]))
    coding, left = planned_coding(torch.tensor([4.0, 0.1]), torch.ones(2), classes, table, 1.0, 8)
    # class 0 prices the first at 2: 1 bit leaves 0.8 + 1, two 0.2 + 2; class 1 at 10: two bits; the second never
    assert coding.bits == pytest.approx(0.75 * (1 + 8) + 0.25 * (2 + 8))
    assert coding.share.tolist() == pytest.approx([0.75 * 0.6 + 0.25 * 0.9, 0.0])
    square = 0.75 * (0.36 + 0.2) + 0.25 * (0.81 + 0.1)
    assert coding.noise.tolist() == pytest.approx([4 * (square - 0.675**2), 0.0])
    assert left == pytest.approx(0.75 * (2 * 0.4 + 0.05) + 0.25 * (10 * 0.1 + 0.25))
