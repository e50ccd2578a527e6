"""Results of turns, for people."""

from aatc_cli.evals.answers.table import benchmark_tables as tables

__all__ = ["tables"]
