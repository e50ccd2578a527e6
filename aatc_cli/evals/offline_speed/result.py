"""What a file of offline-speed holds: rows of speed, whose parts are collect and whiten."""

from __future__ import annotations

from aatc_cli.evals.speed.result import Result

__all__ = ["Result"]
