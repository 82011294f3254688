"""A report as the program shows it, from its record, and checks of pages and pictures."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Callable
from csv import DictReader
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.text import Text
from rich.console import Console

from attnlens.files import make_folder, write_atomically
from attnlens.report import export
from attnlens.report.pictures.charts import panel_figure
from attnlens.report.pictures.maps import head_panels
from attnlens.report.pictures.style import house_style, new_figure
from attnlens.report.render import terminal
from attnlens.report.render.html import is_file
from attnlens.report.report import Report
from attnlens.report.sections.layers import head_table
from attnlens.report.sections.section import Document, Section, build_sections
from attnlens.report.shapes import Shapes


def printed(document: Document, width: int = 100) -> str:
    """Return what a terminal of that width shows, without colours."""
    console = Console(width=width, file=io.StringIO(), highlight=False)
    console.print(terminal.document(document))
    return console.file.getvalue()  # type: ignore[attr-defined]


def alone(*sections: Section) -> Document:
    """Return a document of these sections without a head."""
    return Document(None, sections)


def absent(text: str, *parts: str) -> list[str]:
    """Return the parts that the text lacks."""
    return [part for part in parts if part not in text]


def screen(report: Report) -> str:
    """Return what a command prints by default."""
    return printed(export.summary(report))


def summary(report: Report, width: int = 100, *, verbose: bool = False) -> str:
    """Return what a command prints with --table, without the table of all heads."""
    shown = export.summary(report, verbose=verbose)
    tables = build_sections(Shapes(report), "terminal")
    return printed(replace(shown, sections=[*shown.sections, *tables]), width)


def all_heads(report: Report, width: int = 100) -> str:
    return printed(alone(*head_table(Shapes(report), "table")), width)


def flowing(report: Report) -> str:
    """Return the summary without line breaks, because a sentence can take several lines."""
    return " ".join(summary(report, 600).split())


def rows(report: Report) -> list[dict[str, str]]:
    """Return the rows of the report as CSV."""
    return list(DictReader(io.StringIO(csv(report))))


details = partial(summary, verbose=True)
markdown, csv, page = (export.WRITERS[name] for name in ("markdown", "csv", "html"))


class Tags(HTMLParser):
    """All tags of a page with their attributes, the text between tags, and the contents of its scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script":
            self.scripts.append((self.tags[-1][1], data))
        else:
            self.text += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self.tags.append(("/script", {}))


def runs_its_own_script_alone(page: str) -> bool:
    """Return True if the page's only scripts are data and the one whose hash its policy contains."""
    parsed = Tags(page)
    policy = next(attributes["content"] or "" for _, attributes in parsed.tags if attributes.get("http-equiv"))
    running = [text for attributes, text in parsed.scripts if attributes.get("type") != "application/json"]
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in running]
    tags = [tag for tag, _ in parsed.tags if tag == "script"]
    allowed = [f"script-src 'sha256-{one}';" in policy for one in hashes]
    return len(tags) == len(parsed.scripts) <= 2 and allowed == [True]


def draw_panel(shapes: Shapes, stem: str) -> Figure:
    """Draw the picture of that stem as for its own file."""
    return panel_figure(shapes.report, next(panel for panel in head_panels(shapes) if panel.stem == stem))


def save_pictures(report: Report, target: Path) -> list[Path]:
    """Draw the report as `--figure` does; return the files."""
    drawings = export.drawings(report, target)
    if not is_file(target):
        make_folder(target)
    for path, draw in drawings.items():
        write_atomically(path, draw()[0])
    return list(drawings)


def draw(function: Callable[..., object], *arguments: object) -> Figure:
    """Return a small figure with axes on which the function drew."""
    with house_style():
        figure = new_figure(5, 4)
        function(figure.add_subplot(), *arguments)
        figure.draw_without_rendering()
    return figure


def check_layout(figure: Figure) -> None:
    """Check that no two texts overlap; two that do are the control."""
    settle(figure)
    assert overlapping(figure) == []
    for name in ("over", "under"):
        figure.text(0.5, 0.5, name, fontsize=30)
    assert ("under", "over") in overlapping(figure)
    del figure.texts[-2:]


def settle(figure: Figure) -> None:
    """Lay the figure out, and remove or hide the ticks that it does not draw."""
    figure.draw_without_rendering()
    for place in (place for axes in figure.axes for place in (axes, *axes.child_axes)):
        for axis in (place.xaxis, place.yaxis):
            del axis.majorTicks[len(axis.get_majorticklocs()) :]
            low, high = sorted(axis.get_view_interval())
            for tick in axis.majorTicks:
                tick.label1.set_visible(low - 1e-9 <= tick.get_loc() <= high + 1e-9 and tick.label1.get_visible())


def overlapping(figure: Figure) -> list[tuple[str, str]]:
    """Return pairs of texts whose boxes overlap by more than 2 × 4 pixels, and texts that leave the page."""
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts]
    pairs = [
        (name, other)
        for number, (name, box) in enumerate(boxes)
        for other, next_box in boxes[:number]
        if min(box.x1, next_box.x1) - max(box.x0, next_box.x0) > 2
        and min(box.y1, next_box.y1) - max(box.y0, next_box.y0) > 4
    ]
    outside = [(name, "the page") for name, box in boxes if box.x0 < 0 or box.x1 > figure.bbox.width]
    return pairs + outside
