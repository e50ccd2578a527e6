"""Where output goes: data to stdout, progress and log to stderr."""

from aatc_cli.console.stderr import detail, hushed, log, loudness, say, set_loudness
from aatc_cli.console.tables import print_json, print_table
from aatc_cli.console.waiting import Ticker, duration, progress, working

__all__ = [
    "Ticker",
    "detail",
    "duration",
    "hushed",
    "log",
    "loudness",
    "print_json",
    "print_table",
    "progress",
    "say",
    "set_loudness",
    "working",
]
