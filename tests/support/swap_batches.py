"""The batches that a swap reads."""

from attnlens.models import texts
from attnlens.runs.swap import pipeline


def watched(monkeypatch):
    """Return a list that will contain the evaluated and the calibration batches of the next run."""
    batches, original = [], texts.batches
    monkeypatch.setattr(
        pipeline.texts, "batches", lambda *args, **more: batches.append(original(*args, **more)) or batches[-1]
    )
    return batches
