"""The code of chunks that a plan asks for."""

from __future__ import annotations

from aatc_cli.artifacts.plan import Plan
from aatc_cli.runtime.stored.code import Biases, ChunkCode, TileCode
from aatc_cli.runtime.stored.predicted_code import PredictedCode


def code_of(plan: Plan, biases: Biases, device: str) -> ChunkCode:
    """The code of a plan's chunks: layer by layer where layers are predicted, else tiles."""
    if not plan.recipe.choices.prediction.predicts:
        return TileCode.of(plan.codecs(device), biases, plan.geometry.kv_heads)
    codecs = plan.simulated_codecs(device)
    return PredictedCode([layer["k"] for layer in codecs], biases, plan.geometry.kv_heads)
