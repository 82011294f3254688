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
from attnlens.report.pictures.style import DPI, FORMATS, crowded, encoded, house_style
from attnlens.report.sections.section import Column, Document, Picture, grouped
from attnlens.wording import clean

if TYPE_CHECKING:
    from matplotlib.figure import Figure


__all__ = ["FORMATS", "Drawing", "embedded_picture", "encoded_picture", "figure", "file_names", "files_of", "is_file"]

LARGEST_VECTOR = 400_000  # bytes of a picture in vectors beyond which a page holds it as pixels
Drawing = Callable[[], bytes]
"""Draws one picture; the bytes of its file."""


def figure(picture: Picture) -> Figure:
    """Draw it as a figure of matplotlib's."""
    with house_style():
        return picture.draw()


def encoded_picture(picture: Picture, suffix: str = ".png") -> bytes:
    """Draw it; the bytes of a file of that kind. The same picture gives the same bytes."""
    with house_style():
        return encoded(picture.draw(), suffix)


def embedded_picture(picture: Picture) -> tuple[str, bytes]:
    """The picture for a page, and its media type: as vectors where these are small, else as pixels for a screen."""
    with house_style():
        drawn = picture.draw()
        vectors = b"" if crowded(drawn) else encoded(drawn, ".svg")
        if 0 < len(vectors) <= LARGEST_VECTOR:
            return "image/svg+xml", vectors
        return "image/png", encoded(drawn, ".png", DPI)


def files_of(pictures: Sequence[Picture], folder: Path) -> dict[Path, Drawing]:
    """What draws each picture's file in the folder; nothing is drawn yet."""
    names = file_names(picture.stem for picture in pictures)
    return {folder / name: partial(encoded_picture, picture) for name, picture in zip(names, pictures, strict=True)}


def is_file(target: Path) -> bool:
    """Whether the target means one picture and not a folder of them. Raises OutputError for another ending."""
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
    """A file name for each; what can't stand in a file name becomes `_`, and no two get the same one."""
    taken: set[str] = set()
    chosen = []
    for name in stems:
        stem = re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:100].lstrip(".") or "measure"
        candidates = (f"{stem}{number}.png" for number in ("", *range(2, 2 + len(taken))))
        chosen.append(next(candidate for candidate in candidates if candidate.lower() not in taken))
        taken.add(chosen[-1].lower())
    return chosen


SCRIPTS = ("data", "state", "scale", "map", "curves", "attention", "head", "table", "start")
"""The files of the page's script, in the order in which they run."""


def html(told: Document) -> str:
    """The document as a page without any other file; whatever it holds is cleaned and escaped.

    It runs one script, its own, which its policy names by hash, and reaches no other place. Raises UsageError where
    there is nothing to draw.
    """
    style, script = _file("page.css"), "\n".join(_file(f"{name}.js") for name in SCRIPTS)
    data = ""
    if told.explorer is not None:  # as JSON that no HTML parser can leave: no `<`, and letters beyond ASCII as escapes
        data = json.dumps(told.explorer, default=vars, separators=(",", ":"), allow_nan=False)
        data = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {"head": told.head, "opening": told.opening, "sections": told.sections}
    return _template().render(**parts, data=data, style=style, script=script, policy=policy)


@cache
def _template() -> Template:
    loader = PackageLoader("attnlens.report.render", "page")
    page = Environment(loader=loader, autoescape=True, finalize=_cleaned, undefined=StrictUndefined)
    page.globals |= {"drawn": _drawn, "grouped": grouped, "runs": _runs}
    return page.get_template("page.html.jinja")


@cache
def _file(name: str) -> str:
    return files("attnlens.report.render").joinpath("page", name).read_text("utf-8")


def _hash(text: str) -> str:
    """A script's or style's source, as a policy names it."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _cleaned(value: Any) -> Any:
    """A stranger's string without control characters; what the template itself has written stays as it is."""
    return clean(value) if type(value) is str else value


def _runs(columns: Sequence[Column]) -> list[tuple[str, int]]:
    """The columns' groups from left to right, and how many columns each has."""
    return [(group, len(list(members))) for group, members in groupby(columns, key=lambda column: column.group)]


def _drawn(picture: Picture) -> str:
    media, content = embedded_picture(picture)
    return f"data:{media};base64,{base64.b64encode(content).decode()}"
