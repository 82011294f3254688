"""Batches that a swap cuts."""

from attnlens.models import texts
from attnlens.runs.swap import pipeline as entry


def watched(monkeypatch):
    """The evaluated and the calibration batches of the next run."""
    cut, honest = [], texts.batches
    monkeypatch.setattr(entry.texts, "batches", lambda *args, **given: cut.append(honest(*args, **given)) or cut[-1])
    return cut
