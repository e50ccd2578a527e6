"""No weight: noise costs the same in every latent (variance only)."""

from __future__ import annotations

from aatc_cli.methods.axes import Weight


class NoWeight(Weight):
    """Variance alone."""

    name = "none"
    meaning = "variance alone"
    sides = ("k", "v")
    tensor = None
