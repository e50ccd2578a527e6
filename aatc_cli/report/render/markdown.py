"""The report as Markdown. Figures are left to the page; what they show is in the tables where it fits."""

from __future__ import annotations

import re

from aatc_cli.report.blocks import Cell, MarkedText, Section, Table
from aatc_cli.report.document.build import Document

# pieces of a marked text that Markdown names: those marked most
_NAMED = 12


def render_markdown(document: Document) -> str:
    """The whole document."""
    parts = [f"# {_escape(document.title)}", "\n".join(f"- {_escape(k)}: {_escape(v)}" for k, v in document.facts)]
    for section in document.sections:
        parts += _markdown_section(section)
    return "\n\n".join(parts) + "\n"


def _markdown_section(section: Section) -> list[str]:
    parts = [f"## {_escape(section.title)}", *(_escape(paragraph) for paragraph in section.text)]
    for figure in section.figures:
        parts.append(f"{_escape(figure.caption)} (Drawn in [report.html](report.html#{section.slug}).)")
    for table in section.tables:
        parts += [f"### {_escape(table.caption)}", _markdown_table(table)]
        if table.notes:
            parts.append("\n".join(f"- {_escape(note)}" for note in table.notes))
    for marked in section.marked:
        parts += [f"### {_escape(marked.caption)}", _strongest(marked, section)]
    return parts


def _strongest(marked: MarkedText, section: Section) -> str:
    """The pieces that are marked most, in their order."""
    levels = sorted((piece.level for piece in marked.pieces), reverse=True)
    least = max(1, levels[min(_NAMED, len(levels)) - 1]) if levels else 1
    named = [piece for piece in marked.pieces if piece.level >= least][:_NAMED]
    lines = [f"- {_escape(piece.text)!s}: {_escape(piece.told)}" for piece in named]
    return "\n".join([*lines, f"- the whole text: [report.html](report.html#{section.slug})"])


def _markdown_table(table: Table) -> str:
    lines = [
        "| " + " | ".join(_escape(column) for column in table.columns) + " |",
        "|" + "|".join(["---"] + ["---:"] * (len(table.columns) - 1)) + "|",
    ]
    lines += ["| " + " | ".join(_markdown_cell(cell) for cell in row) + " |" for row in table.rows]
    return "\n".join(lines)


def _markdown_cell(cell: Cell) -> str:
    return f"**{_escape(cell.text)}**" if cell.strong else _escape(cell.text)


def _escape(text: str) -> str:
    """Markdown's own signs as literal text, line ends as spaces: a name cannot open a tag, a cell or a heading."""
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", " ".join(text.split())).replace("&", "&amp;")
