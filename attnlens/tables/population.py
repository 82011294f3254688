"""What errors and intervals are about, in words."""

from __future__ import annotations

from attnlens.records import Report
from attnlens.wording import listed


def population(report: Report) -> str:
    """What the errors are about: windows of the texts named, or texts like them; empty where no text was fed."""
    texts = report.settings.texts
    if not texts:
        return ""
    if report.settings.intervals == "texts":
        return f"errors are over {len(texts)} texts and hold for texts like these"
    what = "lines" if report.settings.pack is False else "windows"
    total = sum(text.available or 0 for text in texts)
    return f"errors are over {what} and hold for the {total} {what} of {listed([text.name for text in texts], 4)}"
