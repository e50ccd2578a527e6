"""None: every vector is coded by itself."""

from __future__ import annotations

from aatc_cli.methods.prediction import Prediction


class NoPrediction(Prediction):
    """What a live cache can hold."""

    name = "none"
    meaning = "every vector is coded by itself"
