"""What errors and intervals are about, and why there may be none, in words."""

from __future__ import annotations

from attnlens.records import Report, Text
from attnlens.wording import listed


def no_errors(report: Report) -> str:
    """Why there are no errors and intervals, where one window was all that was read; else empty."""
    return f"one {_unit(report)} has no spread: no errors" if report.settings.sequences == 1 else ""


def population(report: Report, counted: str = "") -> str:
    """What the errors are about: windows of the texts named, or texts like them; empty where no text was fed.

    Windows in a row from the beginning stand for no others of their text. Several texts are weighted by their windows,
    or by what is `counted` instead.
    """
    settings = report.settings
    texts, what = _read(report), f"{_unit(report)}s"
    if not texts:
        return f"errors are over the {len(settings.texts)} files and hold for files like them" if settings.texts else ""
    first, names = settings.windows == "first", listed([text.name for text in texts], 4)
    counts = [len(text.windows) for text in texts]
    weights = (
        f"; every {counted or _unit(report)} counts once, and the texts gave {listed(counts)} {what}"
        if len(texts) > 1
        else ""
    )
    if len(texts) < len(settings.texts) and settings.noise is None:
        weights += "; what reads no text varies by what stands beside it alone"
    if settings.intervals == "texts":
        return f"errors are over {len(texts)} texts and hold for {'beginnings of ' * first}texts like these{weights}"
    if first:
        about = f"over the first {sum(counts)} {what} and hold for {what} like these, not for all of {names}"
    else:
        about = f"over {what} and hold for the {sum(text.available or 0 for text in texts)} {what} of {names}"
    return f"errors are {about}{weights}"


def _unit(report: Report) -> str:
    """A window, a line, or where no text was fed an input."""
    return "input" if not _read(report) else "line" if report.settings.pack is False else "window"


def _read(report: Report) -> list[Text]:
    """The texts that were cut; images and sounds, of files or noise, may stand beside them."""
    return [text for text in report.settings.texts if text.available is not None]
