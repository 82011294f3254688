"""Sections as one self-contained HTML page, with the heads that its script lets a reader explore."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from itertools import groupby
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from attnlens.render.pictures import embedded_picture
from attnlens.sections.explorer import Explorer
from attnlens.sections.section import Column, Document, Picture, grouped
from attnlens.wording import clean

SCRIPTS = ("data", "state", "scale", "map", "curves", "attention", "head", "table", "start")
"""The files of the page's script, in the order in which they run."""


def html(told: Document) -> str:
    """The document as a page without any other file; whatever it holds is cleaned and escaped.

    It runs one script, its own, which its policy names by hash, and reaches no other place. Raises UsageError where
    there is nothing to draw.
    """
    style, script = _file("page.css"), "\n".join(_file(f"{name}.js") for name in SCRIPTS)
    data = "" if told.explorer is None else _embedded(told.explorer)
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {"head": told.head, "opening": told.opening, "sections": told.sections}
    return _template().render(**parts, data=data, style=style, script=script, policy=policy)


@cache
def _template() -> Template:
    loader = PackageLoader("attnlens.render", "page")
    page = Environment(loader=loader, autoescape=True, finalize=_cleaned, undefined=StrictUndefined)
    page.globals |= {"drawn": _drawn, "grouped": grouped, "runs": _runs}
    return page.get_template("page.html.jinja")


@cache
def _file(name: str) -> str:
    return files("attnlens.render").joinpath("page", name).read_text("utf-8")


def _hash(text: str) -> str:
    """A script's or style's source, as a policy names it."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _embedded(explorer: Explorer) -> str:
    """The explorer as JSON that no HTML parser can leave: no `<`, and letters beyond ASCII as escapes."""
    text = json.dumps(explorer, default=vars, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _cleaned(value: Any) -> Any:
    """A stranger's string without control characters; what the template itself has written stays as it is."""
    return clean(value) if type(value) is str else value


def _runs(columns: Sequence[Column]) -> list[tuple[str, int]]:
    """The columns' groups from left to right, and how many columns each has."""
    return [(group, len(list(members))) for group, members in groupby(columns, key=lambda column: column.group)]


def _drawn(picture: Picture) -> str:
    media, content = embedded_picture(picture)
    return f"data:{media};base64,{base64.b64encode(content).decode()}"
