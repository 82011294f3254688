"""Render a document as one self-contained HTML page, and pictures as files."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from itertools import groupby
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from matplotlib.collections import LineCollection

from attnlens.errors import OutputError
from attnlens.report.pictures.style import DPI, FORMATS, encode_figure, house_style
from attnlens.report.sections.section import Column, Document, Picture, sort_by_group
from attnlens.wording import clean

LARGEST_VECTOR = 400_000  # size of an SVG picture in bytes above which a page contains a PNG instead


def encode_picture(picture: Picture, suffix: str = ".png", *, bare: bool = False) -> tuple[bytes, str]:
    """Draw a picture; return the bytes of an image file with this suffix, and the caption."""
    with house_style(bare=bare):
        figure = picture.draw(bare=bare)
        return encode_figure(figure, suffix), str(figure.get_label())


def embed_picture(picture: Picture) -> str:
    """Draw a picture and return it as the data URL of an SVG or, if the SVG would be large, of a PNG."""
    with house_style():
        drawing, media = picture.draw(), "image/svg+xml"
        crowded = any(lines.get_rasterized() for lines in drawing.findobj(LineCollection))
        content = b"" if crowded else encode_figure(drawing, ".svg")
        if not 0 < len(content) <= LARGEST_VECTOR:
            media, content = "image/png", encode_figure(drawing, ".png", DPI)
    return f"data:{media};base64,{base64.b64encode(content).decode()}"


def is_file(target: Path) -> bool:
    """Return True for a picture file, False for a folder. Raise OutputError if the suffix is not in FORMATS."""
    suffix = target.suffix.lower()
    if not suffix or target.is_dir():
        return False
    if suffix not in FORMATS:
        raise OutputError(
            f"Cannot draw to {target}: the suffix {suffix} is not supported.",
            "Use .png, .svg or .pdf, or a folder whose name has no dot.",
        )
    return True


def file_names(stems: Iterable[str]) -> list[str]:
    """Turn each stem into a unique file name without a suffix; unsafe characters become `_`."""
    taken: set[str] = set()
    names = []
    for name in stems:
        stem = re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:100].lstrip(".") or "measure"
        candidates = (f"{stem}{number}" for number in ("", *range(2, 2 + len(taken))))
        names.append(next(candidate for candidate in candidates if candidate.lower() not in taken))
        taken.add(names[-1].lower())
    return names


WIDEST = 12  # number of columns above which a table is split by group, to fit on a screen
SCRIPTS = ("data", "state", "scale", "map", "curves", "attention", "head", "table", "start")
"""Names of the files that form the page's script, in the order in which they run."""


def html(document: Document) -> str:
    """Render the document as a self-contained HTML page, with all text cleaned and escaped.

    The content security policy allows only the page's own script and style, and no network access.
    """
    style, script = _file("page.css"), "\n".join(_file(f"{name}.js") for name in SCRIPTS)
    data = ""
    if document.explorer is not None:  # as ASCII without `<`, `>` and `&`, so that no data can close the script element
        data = json.dumps(document.explorer, default=vars, separators=(",", ":"), allow_nan=False)
        data = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return _template().render(vars(document), data=data, style=style, script=script, policy=policy)


def card(document: Document, picture: Picture | None) -> str:
    """Render a document's heading, findings and commands, and a picture if given, as HTML without scripts."""
    return _template("card.html.jinja").render(vars(document), picture=picture)


@cache
def _template(name: str = "page.html.jinja") -> Template:
    loader = PackageLoader("attnlens.report.render", "page")
    page = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    # clean every plain string, but not the Markup that the template itself produced
    # a space that does not break keeps a number and its % on one line
    page.finalize = lambda value: clean(value).replace(" %", "\xa0%") if type(value) is str else value
    page.globals |= {"data_url": embed_picture, "split_columns": _split_columns, "runs": _runs}
    return page.get_template(name)


@cache
def _file(name: str) -> str:
    return files("attnlens.report.render").joinpath("page", name).read_text("utf-8")


def _hash(text: str) -> str:
    """Return the hash of a script or style in the syntax of a content security policy."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _split_columns(columns: Sequence[Column]) -> list[list[Column]]:
    """Split the columns of a wide table, so that each group gets a table; other tables stay whole."""
    ordered = sort_by_group(columns)
    if len(ordered) <= WIDEST:
        return [ordered]
    return [[*members] for _, members in groupby(ordered, key=lambda column: column.group)]


def _runs(columns: Sequence[Column]) -> list[tuple[str, int]]:
    """Return (group, number of columns) for each run of neighbouring columns with the same group."""
    return [(group, len([*members])) for group, members in groupby(columns, key=lambda column: column.group)]
