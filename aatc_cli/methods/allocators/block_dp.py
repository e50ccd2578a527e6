"""Block DP: blocks of falling precision along the spectrum, found by dynamic programming (KVTC)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from aatc_cli.methods.axes import together
from aatc_cli.methods.choices import Allocator

if TYPE_CHECKING:
    from torch import Tensor

    from aatc_cli.config import Geometry, HeadGroups
    from aatc_cli.core import Side
    from aatc_cli.core.allocate import Allocation, Energies, Floats, Ints
    from aatc_cli.core.precision_blocks import Block
    from aatc_cli.core.stats import LayerStats
    from aatc_cli.methods.choices import Choices
    from aatc_cli.methods.sites import Tensors

# energy and errors of the spectrum that is cut into blocks
Spectrum = tuple["Floats", "Floats"]


class BlockDp(Allocator):
    """Source: KVTC (2511.01815). Its table is the error of every possible block; budgets include their scales."""

    name = "block-dp"
    meaning = "blocks of falling precision"
    goes_with = together(transform=("centred",))
    on = ("pca", "global")

    def tables(self, side: Side, stats: LayerStats, latents: Callable[[], Tensor], groups: int) -> dict[str, Tensor]:
        """``block_error`` [C / 16, sizes, widths]; raises `AatcError` where blocks do not fill a site."""
        from aatc_cli.core.block_codec import block_errors
        from aatc_cli.core.precision_blocks import GRID
        from aatc_cli.errors import AatcError

        if latents().shape[1] % GRID:
            raise AatcError(
                f"blocks of {GRID} latents do not fill a site of {latents().shape[1]} channels",
                "use another recipe for this model",
            )
        return {"block_error": block_errors(latents())}

    def joint_tables(self, latents: Tensor) -> dict[str, Tensor]:
        """The same of latents over all layers."""
        from aatc_cli.core.block_codec import block_errors

        return {"block_error": block_errors(latents)}

    def read(self, choices: Choices, tensors: Tensors, geometry: Geometry) -> Any:
        """Over all layers a spectrum per side; else the errors of every layer and side."""
        from aatc_cli.core import SIDES
        from aatc_cli.core.precision_blocks import GRID, SIZES, WIDTHS
        from aatc_cli.methods.allocators.site_arrays import site_arrays

        if not choices.transform.over_layers:
            shape = (geometry.channels // GRID, len(SIZES), len(WIDTHS))
            return site_arrays(tensors, geometry.layers, "block_error", shape)
        joint: dict[Side, Spectrum] = {}
        for side in SIDES:
            energy = tensors.floats(f"joint.{side}.energy", (-1,))
            shape = (energy.size // GRID, len(SIZES), len(WIDTHS))
            joint[side] = energy, tensors.numbers(f"joint.{side}.block_error", shape)
        return joint

    def allocate(
        self, choices: Choices, energies: Energies, average: float, groups: HeadGroups, tables: Any
    ) -> Allocation:
        """Raises `AatcError` where not one block fits."""
        planned = _joint_blocks if choices.transform.over_layers else _blocks
        return planned(energies, average, tables)


def _blocks(energies: Energies, average: float, tables: Sequence[dict[Side, Floats]]) -> Allocation:
    from aatc_cli.core import SIDES
    from aatc_cli.core.allocate import Allocation
    from aatc_cli.core.precision_blocks import choose_blocks

    bits: list[dict[Side, Ints]] = [{} for _ in energies]
    starts: list[dict[Side, Ints]] = [{} for _ in energies]
    predicted: dict[Side, float] = {}
    for side in SIDES:
        errors = []
        for layer, (site, table) in enumerate(zip(energies, tables, strict=True)):
            variance = site[side].variance
            blocks = choose_blocks(table[side], variance, math.floor(average * variance.size + 1e-9))
            bits[layer][side], starts[layer][side] = _written(blocks, variance.size)
            errors.append(_left(blocks, table[side], variance))
        predicted[side] = math.fsum(errors)
    return Allocation(bits, predicted, {"k": 0.0, "v": 0.0}, starts)


def _joint_blocks(energies: Energies, average: float, tables: dict[Side, Spectrum]) -> Allocation:
    """Latents over all layers, written down layer after layer, C to each."""
    from aatc_cli.core import SIDES
    from aatc_cli.core.allocate import Allocation
    from aatc_cli.core.precision_blocks import choose_blocks

    layers, channels = len(energies), energies[0]["k"].variance.size
    bits: list[dict[Side, Ints]] = [{} for _ in energies]
    starts: list[dict[Side, Ints]] = [{} for _ in energies]
    predicted: dict[Side, float] = {}
    for side in SIDES:
        energy, table = tables[side]
        blocks = choose_blocks(table, energy, math.floor(average * layers * channels + 1e-9))
        widths, begins = _written(blocks, layers * channels)
        for layer in range(layers):
            span = slice(layer * channels, (layer + 1) * channels)
            bits[layer][side], starts[layer][side] = widths[span], begins[span]
        predicted[side] = _left(blocks, table, energy)
    return Allocation(bits, predicted, {"k": 0.0, "v": 0.0}, starts)


def _written(blocks: tuple[Block, ...], count: int) -> tuple[Ints, Ints]:
    import numpy as np

    from aatc_cli.core.precision_blocks import block_widths

    widths, starts = block_widths(blocks, count)
    return np.array(widths, dtype=np.int64), np.array(starts, dtype=np.int64)


def _left(blocks: tuple[Block, ...], errors: Floats, energy: Floats) -> float:
    """Squared error per token of the blocks and of the latents behind them."""
    from aatc_cli.core.precision_blocks import SIZES, WIDTHS

    coded = sum(block.size for block in blocks)
    found = [float(errors[b.start // SIZES[0], SIZES.index(b.size), WIDTHS.index(b.bits)]) for b in blocks]
    return math.fsum([*found, *energy[coded:]])
