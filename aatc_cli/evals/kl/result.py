"""What a file of kl holds: the fields of an `Evaluation` that it measures."""

from __future__ import annotations

from aatc_cli.artifacts.evaluation import Evaluation as Result

__all__ = ["Result"]
