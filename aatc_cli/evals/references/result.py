"""What a file of references holds: a row per subtask."""

from __future__ import annotations

from aatc_cli.evals.answers.result import BenchmarkResult as Result

__all__ = ["Result"]
