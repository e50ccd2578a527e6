"""Results of kl, for people."""

from aatc_cli.evals.windows.table import window_tables as tables

__all__ = ["tables"]
