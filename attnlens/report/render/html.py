"""Sections as one self-contained HTML page, and pictures as files."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from attnlens.errors import OutputError
from attnlens.report.pictures.style import DPI, FORMATS, encode_figure, house_style, rasterize_if_crowded
from attnlens.report.sections.section import Column, Document, Picture, sort_by_group
from attnlens.wording import clean

if TYPE_CHECKING:
    from matplotlib.figure import Figure


__all__ = ["FORMATS", "Drawing", "embedded_picture", "encoded_picture", "figure", "file_names", "files_of", "is_file"]

LARGEST_VECTOR = 400_000  # bytes of an SVG picture above which a page contains it as PNG
Drawing = Callable[[], bytes]
"""Function that draws one picture and returns the bytes of its file."""


def figure(picture: Picture) -> Figure:
    """Draw a picture as a matplotlib figure."""
    with house_style():
        return picture.draw()


def encoded_picture(picture: Picture, suffix: str = ".png") -> bytes:
    """Draw a picture and return the bytes of its file, of the kind in `suffix`. Equal pictures give equal bytes."""
    with house_style():
        return encode_figure(picture.draw(), suffix)


def embedded_picture(picture: Picture) -> tuple[str, bytes]:
    """Return the media type and bytes of a picture for a page: SVG if it is small, else PNG in screen resolution."""
    with house_style():
        drawing = picture.draw()
        vectors = b"" if rasterize_if_crowded(drawing) else encode_figure(drawing, ".svg")
        if 0 < len(vectors) <= LARGEST_VECTOR:
            return "image/svg+xml", vectors
        return "image/png", encode_figure(drawing, ".png", DPI)


def files_of(pictures: Sequence[Picture], folder: Path) -> dict[Path, Drawing]:
    """Return a function per file in the folder that draws its picture; nothing is drawn yet."""
    names = file_names(picture.stem for picture in pictures)
    return {folder / name: partial(encoded_picture, picture) for name, picture in zip(names, pictures, strict=True)}


def is_file(target: Path) -> bool:
    """Return True if the target is one picture, False if it is a folder. Raises OutputError for any other suffix."""
    suffix = target.suffix.lower()
    if not suffix or target.is_dir():
        return False
    if suffix not in FORMATS:
        raise OutputError(
            f"{target} can't be drawn: {suffix} is not offered.",
            "End it in .png, .svg or .pdf, or name a folder without a dot.",
        )
    return True


def file_names(stems: Iterable[str]) -> list[str]:
    """Make a unique PNG file name of each stem; characters that are unsafe in file names become `_`."""
    taken: set[str] = set()
    names = []
    for name in stems:
        stem = re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:100].lstrip(".") or "measure"
        candidates = (f"{stem}{number}.png" for number in ("", *range(2, 2 + len(taken))))
        names.append(next(candidate for candidate in candidates if candidate.lower() not in taken))
        taken.add(names[-1].lower())
    return names


SCRIPTS = ("data", "state", "scale", "map", "curves", "attention", "head", "table", "start")
"""Files of the page's script, in the order in which they run."""


def html(document: Document) -> str:
    """Render the document as a self-contained HTML page, with all of its text cleaned and escaped.

    The page's content security policy allows only its own script and style, by hash, and no network access. Raises
    UsageError if there is nothing to draw.
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
    parts = {"head": document.head, "opening": document.opening, "sections": document.sections}
    return _template().render(**parts, data=data, style=style, script=script, policy=policy)


@cache
def _template() -> Template:
    loader = PackageLoader("attnlens.report.render", "page")
    page = Environment(loader=loader, autoescape=True, finalize=_clean_value, undefined=StrictUndefined)
    page.globals |= {"data_url": _data_url, "sort_by_group": sort_by_group, "runs": _runs}
    return page.get_template("page.html.jinja")


@cache
def _file(name: str) -> str:
    return files("attnlens.report.render").joinpath("page", name).read_text("utf-8")


def _hash(text: str) -> str:
    """Return the source expression of a script or style for the content security policy: its SHA-256."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _clean_value(value: Any) -> Any:
    """Replace control characters in plain strings; Markup that the template itself produced stays as it is."""
    return clean(value) if type(value) is str else value


def _runs(columns: Sequence[Column]) -> list[tuple[str, int]]:
    """Return the groups of the columns from left to right, each with its number of columns."""
    return [(group, len(list(members))) for group, members in groupby(columns, key=lambda column: column.group)]


def _data_url(picture: Picture) -> str:
    media, content = embedded_picture(picture)
    return f"data:{media};base64,{base64.b64encode(content).decode()}"
