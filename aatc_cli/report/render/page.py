"""The report as one page of HTML, with its style, its figures and a few lines of script; nothing is fetched."""

from __future__ import annotations

from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from aatc_cli.report.document.build import Document
from aatc_cli.report.figures.style import standalone


def render_html(document: Document) -> str:
    """The whole document. Without script all is shown and read the same; with it tables can be sorted."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    template = environment.from_string(_part("page.html.j2"))
    style, script = Markup(_part("page.css")), Markup(_part("page.js"))
    return template.render(document=document, trusted=Markup, style=style, script=script)


def render_figures(document: Document) -> dict[str, str]:
    """SVG files by name, of the figures that have one."""
    blocks = [figure for section in document.sections for figure in section.figures]
    return {f"{figure.name}.svg": standalone(figure.svgs[0]) for figure in blocks if figure.name is not None}


def _part(name: str) -> str:
    return files("aatc_cli.report.render").joinpath(name).read_text(encoding="utf-8")
