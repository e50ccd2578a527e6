"""Spectra of a few sites in falling order, with the water level of every plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aatc_cli.core import SIDES, Side
from aatc_cli.report.data.run import Spectrum


@dataclass(frozen=True)
class SpectrumPanel:
    """Normalised energy of one site against rank (1-based, zero energies left out), and the water levels."""

    layer: int
    side: Side
    rank: tuple[int, ...]
    energy: tuple[float, ...]
    levels: tuple[tuple[str, float], ...]


def spectrum_series(spectrum: Spectrum) -> list[SpectrumPanel]:
    """Panels in reading order: keys of every chosen layer, then values."""
    panels: list[SpectrumPanel] = []
    for side in SIDES:
        for layer in spectrum.layers:
            energy = np.sort(spectrum.energy[layer, side])[::-1]
            energy = energy[energy > 0]
            levels = tuple((budget, level[side]) for budget, level in spectrum.levels if level[side] > 0)
            ranks = tuple(range(1, energy.size + 1))
            panels.append(SpectrumPanel(layer, side, ranks, tuple(float(e) for e in energy), levels))
    return panels
