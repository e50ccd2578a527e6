"""What a file of these benchmarks holds: a row per subtask and context."""

from __future__ import annotations

from aatc_cli.evals.answers.result import BenchmarkResult as Result

__all__ = ["Result"]
