"""Filling: widths of whole sites out of one budget, under a quantizer's curve, in blocks of channels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aatc_cli.core.allocate import Floats, Ints, channel_blocks, spare_bits, waterfill


@dataclass(frozen=True)
class Filling:
    """The rule by which channels are given widths.

    curve [17]: distortion of a channel of energy 1 at 0 .. 16 bits. widths: those that may be used, rising. block:
    channels of a head group that share a width, by falling energy.
    """

    curve: Floats
    widths: tuple[int, ...]
    block: int = 1

    def curves(self, energy: Floats) -> Floats:
        """Distortion of every channel at every width up to the widest. [n] -> [n, widest + 1]."""
        found: Floats = energy[:, None] * self.curve[: self.widths[-1] + 1]
        return found

    def left(self, energies: Sequence[Floats], widths: Sequence[Ints]) -> float:
        """Sum of the curves at the widths; exactly rounded, so that the order of summation does not matter."""
        pairs = zip(energies, widths, strict=True)
        return math.fsum(math.fsum(energy.ravel() * self.curve[bits]) for energy, bits in pairs)


def flat(pool: Sequence[Floats]) -> Floats:
    """The energies of all sites of a pool, one after the other."""
    return np.concatenate([energy.ravel() for energy in pool])


def fill_sites(pool: Sequence[Floats], budget: int, rule: Filling) -> list[Ints]:
    """Widths [C] of sites with energies [groups, E] out of one budget.

    A block is one channel to water-filling: the sum of its channels' curves, at ``block`` times the price of a bit.
    """
    energy, edges = flat(pool), np.cumsum([0, *(site.size for site in pool)])
    budget -= budget % rule.block
    spare_bits(budget, energy.size, rule.widths[0])
    blocks = np.concatenate([start + _blocks(site, rule) for start, site in zip(edges[:-1], pool, strict=True)])
    # exactly rounded, so that no order of summation matters
    sums = np.array([math.fsum(energies) for energies in energy[blocks]])
    widths = waterfill(rule.curves(sums), budget // rule.block, widths=rule.widths)
    found = np.empty(energy.size, dtype=np.int64)
    found[blocks] = widths[:, None]
    return np.split(found, edges[1:-1])


def even_widths(channels: int, budget: int, rule: Filling) -> Ints:
    """The same width in all channels of a site; what does not divide goes to the leading blocks, one step each. [C]."""
    budget -= budget % rule.block
    spare_bits(budget, channels, rule.widths[0])
    blocks, units = channels // rule.block, budget // rule.block
    base = max(width for width in rule.widths if width * blocks <= units)
    wider = next((width for width in rule.widths if width > base), None)
    raised = 0 if wider is None else (units - base * blocks) // (wider - base)
    widths = np.where(np.arange(blocks) < raised, wider or 0, base).astype(np.int64)
    return np.repeat(widths, rule.block)


def _blocks(site: Floats, rule: Filling) -> Ints:
    if rule.block == 1:
        return np.arange(site.size).reshape(-1, 1)
    return channel_blocks(site, rule.block)
