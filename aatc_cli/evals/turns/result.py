"""What a file of turns holds: a row per turn and context."""

from __future__ import annotations

from aatc_cli.evals.answers.result import BenchmarkResult as Result

__all__ = ["Result"]
