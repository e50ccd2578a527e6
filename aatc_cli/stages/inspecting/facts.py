"""The same facts twice, as data for programs and as tables for people, and tables that several views share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Table:
    """A table for people: title, column names, rows of text."""

    title: str
    columns: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Inspection:
    """The same facts twice: ``data`` for programs, ``tables`` for people."""

    data: dict[str, Any]
    tables: list[Table] = field(default_factory=list)


def layout_table(layout: dict[str, Any]) -> Table:
    """Where the bytes of a layout go, with what is kept once for a model."""
    total = layout["bytes_total"]
    rows = [[cause, f"{count:,}", f"{100 * count / total:.1f} %"] for cause, count in layout["breakdown"].items()]
    rows.append(["total", f"{total:,}", f"ratio {layout['ratio']:.2f}"])
    rows.append(["float16 cache", f"{layout['bytes_fp16']:,}", ""])
    rows += [[f"static: {cause}", f"{count:,}", ""] for cause, count in layout["breakdown_static"].items()]
    rows.append(["ratio with static", f"{layout['ratio_with_static']:.2f}", ""])
    title = f"{layout['bits_packed']:.3f} packed bits; bytes at {layout['context']:,} tokens"
    title += f", {layout['bits_at_context']:.3f} bits there"
    return Table(title, ["cause", "bytes", "share"], rows)
