"""Results of offline-speed, for people."""

from aatc_cli.evals.speed.table import tables

__all__ = ["tables"]
