"""Priced by the prompt alone: what tokens are worth is what later tokens of the prompt paid them.

Ours. A model that does not copy what it is asked to repeat looks at little in particular when it reads a prompt again:
of Gemma 3 270M the second reading says less than the first (docs/log/methods.md).
"""

from __future__ import annotations

from aatc_cli.methods.presses.priced import Priced


class PricedOwn(Priced):
    """As `Priced`, of the first reading."""

    name = "priced-own"
    meaning = "as priced, by what the prompt's own tokens pay"
    own = 1.0
