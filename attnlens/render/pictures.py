"""Pictures as files: formats, file names, bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from attnlens.errors import OutputError
from attnlens.plots.style import DPI, FORMATS, crowded, encoded, house_style
from attnlens.sections.section import Picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["FORMATS", "Drawing", "embedded_picture", "encoded_picture", "figure", "file_names", "files_of", "is_file"]

LARGEST_VECTOR = 400_000
"""Bytes of a picture in vectors beyond which a page holds it as pixels."""
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
