"""What figures show: every channel of a plan, bytes over the context, one look per recipe, text that fits."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from aatc_cli.artifacts.evaluation import Evaluation, TokenTrace
from aatc_cli.config import Geometry, HeadGroups, Window
from aatc_cli.core import SIDES
from aatc_cli.core.layout import CacheLayout
from aatc_cli.report.blocks import FigureBlock, MarkedText, Piece, Section, Table
from aatc_cli.report.data.run import PlanView
from aatc_cli.report.document.build import Document
from aatc_cli.report.document.plans import shown_of
from aatc_cli.report.figures.axes import MARKERS, look
from aatc_cli.report.figures.memory import memory_figure
from aatc_cli.report.figures.plans import bitmap_figure
from aatc_cli.report.figures.quality import quality_figure
from aatc_cli.report.figures.style import SERIES, standalone
from aatc_cli.report.render.markdown import render_markdown
from aatc_cli.report.render.page import render_html
from aatc_cli.report.series.plans import bit_maps, memory_series
from aatc_cli.report.series.quality import Line, QualityPanel
from aatc_cli.report.series.tokens import LEVELS, marked_texts

GEOMETRY = Geometry(layers=2, heads=4, kv_heads=2, head_dim=4, hidden_size=16)


def view(recipe: str, bits: float, widths: list[list[int]]) -> PlanView:
    layers = [{"k": list(row), "v": list(row)} for row in widths]
    layout = CacheLayout.of_bits(GEOMETRY, Window(), HeadGroups.both(1), layers)
    zero = dict.fromkeys(SIDES, 0.0)
    groups = HeadGroups.both(1)
    return PlanView(recipe, f"{bits:g}", f"{recipe}{bits:g}", 0, groups, layers, bits, zero, zero, layout)


PLANS = [
    view("paper", 2, [[4, 4, 2, 2, 2, 1, 1, 0], [0, 3, 3, 3, 0, 2, 2, 3]]),
    view("loss-aware", 2, [[0, 3, 3, 3, 0, 2, 2, 3], [0, 1, 1, 2, 2, 2, 4, 4]]),
    view("kivi", 9, [[9] * 8, [9] * 8]),
]


def test_a_bit_map_has_every_channel_once() -> None:
    for plan, found in zip(PLANS, bit_maps(PLANS), strict=True):
        for side in SIDES:
            for widths, runs in zip(plan.bits, found.runs[side], strict=True):
                assert [width for _, count, width in runs for _ in range(count)] == widths[side]
                assert [start for start, _, _ in runs] == [sum(c for _, c, _ in runs[:i]) for i in range(len(runs))]
    drawn = bitmap_figure(bit_maps(PLANS)[0], 9, "bits0", legend=True)
    # one path for all cells of a width, none for those without bits
    assert re.findall(r'id="bits0-cells-k(\d)"', drawn) == ["1", "2", "3", "4"]
    assert "8 or more" in drawn
    assert "8 or more" not in bitmap_figure(bit_maps(PLANS)[0], 8, "bits0", legend=True)


def test_cells_are_written_as_strokes_of_a_row() -> None:
    """Each run once, where its channels are, in little text: bit maps are most of a page of many plans."""
    for found in bit_maps(PLANS):
        drawn = bitmap_figure(found, 9, "bits0", legend=False)
        for side in SIDES:
            rows: dict[float, list[tuple[float, float, int]]] = {}
            for width in range(1, 10):
                path = re.search(rf'id="bits0-cells-{side}{width}">\s*<path d="([^"]*)" ([^>]*)>', drawn)
                runs = [run for row in found.runs[side] for run in row if run[2] == width]
                assert (path is not None) == bool(runs)
                if path is None:
                    continue
                assert "fill: none" in path[2]
                assert "stroke: var(--b" in path[2]
                x = y = 0.0
                for kind, across, down, length in re.findall(r"([Mm])([-\d.]+) ([\d.]+)h([\d.]+)", path[1]):
                    x, y = (float(across), float(down)) if kind == "M" else (x + float(across), y)
                    rows.setdefault(y, []).append((x, float(length), width))
                    x += float(length)
                assert path[1].count("h") == len(runs)
            # drawn over its layer, a row is the plan's widths: channel after channel, those of no bits left out
            left = min(start for cells in rows.values() for start, _, _ in cells)
            first = min(start for row in found.runs[side] for start, _, width in row if width)
            one = min(length for cells in rows.values() for _, length, _ in cells)
            shortest = min(count for row in found.runs[side] for _, count, width in row if width)
            unit = one / shortest
            shown = [
                [
                    (round((x - left) / unit) + first, round(length / unit), width)
                    for x, length, width in sorted(rows[y])
                ]
                for y in sorted(rows)
            ]
            assert shown == [[run for run in row if run[2]] for row in found.runs[side] if any(run[2] for run in row)]


def test_of_many_plans_one_of_each_recipe_is_drawn() -> None:
    rows = [[4, 4, 2, 2, 2, 1, 1, 0], [0, 3, 3, 3, 0, 2, 2, 3]]
    many = [
        view(f"r{i}", bits, [[max(w + add, 0) for w in row] for row in rows])
        for i in range(5)
        for bits, add in ((1, -1), (2, 0), (3, 1), (4, 2), (5, 3), (6, 4))
    ]
    assert shown_of(many[:24]) == many[:24]
    nearest = min(many[:6], key=lambda plan: abs(plan.layout.bits_packed - 2)).budget
    assert [(plan.recipe, plan.budget) for plan in shown_of(many)] == [(f"r{i}", nearest) for i in range(5)]


def test_memory_lines_are_the_byte_law_and_plans_alike_share_one() -> None:
    own, wide, narrow = memory_series(PLANS, (256, 4096, 65536), {"loss-aware2": [(4096, 1234)]})
    assert (own.recipes, own.share) == (("fp16",), (100.0,) * 3)
    assert own.bytes == tuple(PLANS[0].layout.reference_bytes(n) for n in (256, 4096, 65536))
    assert narrow.recipes == ("paper", "loss-aware")
    assert narrow.measured == ((4096, 1234),)
    assert wide.bytes == tuple(PLANS[2].layout.bytes(n) for n in (256, 4096, 65536))
    # far from the window the share is that of packed bits
    assert narrow.share[-1] == pytest.approx(100 * PLANS[0].layout.bits_packed / 16, rel=0.02)
    assert f"{PLANS[0].layout.bits_packed:.2f}" in memory_figure([own, wide, narrow])


def test_a_recipe_looks_the_same_wherever_it_is_drawn() -> None:
    def colours(recipes: tuple[str, ...]) -> dict[str, str]:
        lines = tuple(Line(name, name, (1.0, 2.0), (0.1 + i, 0.05 + i), (None, None)) for i, name in enumerate(recipes))
        drawn = quality_figure([QualityPanel("t", lines, None)])
        return {name: look(name)[0] for name in recipes if look(name)[0] in drawn}

    assert colours(("paper", "kivi")) == colours(("kivi", "paper"))
    assert colours(("kivi",))["kivi"] == colours(("paper", "loss-aware", "kivi"))["kivi"]
    assert len({look(name) for name in ("paper", "loss-aware", "var-only", "kivi", "kvquant", "kvtc", "uniform")}) == 7
    # what a user wrote has a place by its name
    assert look("mine") == look("mine")
    assert look("mine")[0] in SERIES
    assert look("mine")[1] in MARKERS


def test_long_titles_are_cut_and_figures_say_what_they_are() -> None:
    line = Line("paper", "paper", (1.0, 2.0), (0.2, 0.1), (0.01, None))
    panels = [QualityPanel("a very long name of a text that would run into the next panel " * 4, (line,), None)] * 2
    drawn = quality_figure(panels, "q")
    root = ElementTree.fromstring(standalone(drawn))
    space = "{http://www.w3.org/2000/svg}"
    assert (root.get("role"), root.get("aria-labelledby")) == ("img", "q-title q-told")
    assert root.find(f"{space}title").text == "KL against packed bits"
    assert root.find(f"{space}desc").text == "KL of paper over packed bits."
    titles = [text for text in re.findall(r">([^<>]+)</text>", drawn) if "long" in text or "run into" in text]
    assert max(map(len, titles)) <= 48


def test_many_figures_and_long_tables_are_folded_away() -> None:
    table = Table.plain("bytes", ("a",), [["1"]])
    section = Section("s", "S", (), (FigureBlock(("<svg>x</svg>",) * 5, "c", open=2),), (table,))
    html = render_html(Document("t", (), (section,)))
    assert html.index("<details>") > html.index("<svg>x")
    assert "<summary>3 more</summary>" in html
    assert html.count("<svg>x") == 5
    folded = Section("s", "S", (), (), (Table.plain("bytes", ("a",), [["1"]]), Table("b", ("a",), (), folded=True)))
    assert render_html(Document("t", (), (folded,))).count("<summary>b</summary>") == 1


def traced() -> Evaluation:
    trace = TokenTrace(window=0, first=513, tokens=["def", " <b>", "\n"], kl=[0.0001, 5.0, LEVELS[1]])
    values = {"task": "kl", "recipe": "paper", "budget": "2", "model": "m", "bits": 2.0, "bits_at_context": 3.0}
    values |= {"ratio": 4.0, "context": 1024, "text": "t", "text_sha256": "0", "windows": 1, "length": 1024}
    values |= {"stride": 1024, "first_position": 512, "tokens_scored": 3, "sinks": 4, "recent": 128, "flush": 16}
    values |= {"kl_mean": 1.0, "seconds": 1.0, "device": "cpu", "dtype": "float32", "versions": {}, "traces": [trace]}
    return Evaluation.model_validate(values)


def test_pieces_of_a_text_are_marked_by_their_kl() -> None:
    [marked] = marked_texts([traced()])
    assert [piece.level for piece in marked.pieces] == [0, 6, 2]
    assert marked.pieces[1].told == "5.00 nats at position 514"
    document = Document("t", (), (Section("tokens", "KL token by token", marked=(marked,)),))
    html = render_html(document)
    assert '<span class="m6" title="5.00 nats at position 514"> &lt;b&gt;</span>' in html
    assert '<span title="0.000100 nats at position 513">def</span>' in html
    text = render_markdown(document)
    assert r"\<b\>: 5.00 nats at position 514" in text
    assert "def: " not in text
    none = MarkedText("c", (Piece("a", 0, "n"),), ())
    assert "report.html#s" in render_markdown(Document("t", (), (Section("s", "S", marked=(none,)),)))
