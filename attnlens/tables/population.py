"""What errors and intervals are about, in words."""

from __future__ import annotations

from attnlens.records import Report
from attnlens.wording import listed


def population(report: Report) -> str:
    """What the errors are about: windows of the texts named, or texts like them; empty where no text was fed.

    Windows in a row from the beginning stand for no others of their text.
    """
    settings = report.settings
    texts, what = settings.texts, "lines" if settings.pack is False else "windows"
    if not texts:
        return ""
    first, names = settings.windows == "first", listed([text.name for text in texts], 4)
    if settings.intervals == "texts":
        return f"errors are over {len(texts)} texts and hold for {'beginnings of ' * first}texts like these"
    if first:
        fed = sum(len(text.windows) for text in texts)
        return f"errors are over the first {fed} {what} and hold for {what} like these, not for all of {names}"
    total = sum(text.available or 0 for text in texts)
    return f"errors are over {what} and hold for the {total} {what} of {names}"
