"""Sections as one self-contained HTML page."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from attnlens.render.pictures import encoded_picture
from attnlens.sections.section import Column, Document, Picture, grouped
from attnlens.wording import clean


def html(told: Document) -> str:
    """The document as a page without any other file; whatever it holds is cleaned and escaped, and it runs no script.

    Raises UsageError where there is nothing to draw.
    """
    return _template().render(head=told.head, sections=told.sections)


@cache
def _template() -> Template:
    loader = PackageLoader("attnlens.render", ".")
    page = Environment(loader=loader, autoescape=True, finalize=_cleaned, undefined=StrictUndefined)
    page.globals |= {"drawn": _drawn, "grouped": grouped, "runs": _runs}
    return page.get_template("page.html.jinja")


def _cleaned(value: Any) -> Any:
    """A stranger's string without control characters; what the template itself has written stays as it is."""
    return clean(value) if type(value) is str else value


def _runs(columns: Sequence[Column]) -> list[tuple[str, int]]:
    """The columns' groups from left to right, and how many columns each has."""
    return [(group, len(list(members))) for group, members in groupby(columns, key=lambda column: column.group)]


def _drawn(picture: Picture) -> str:
    return base64.b64encode(encoded_picture(picture)).decode()
