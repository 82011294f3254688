"""Recomputes some heads of a report from a model, and says where the report reads otherwise."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from attnlens import models, requests
from attnlens.arguments import public
from attnlens.errors import UsageError
from attnlens.records import Check, File, Head, ModelInfo, Report
from attnlens.rules.judging import breach
from attnlens.run.inspect.pipeline import inspect
from attnlens.runs.progress import Progress, silent

REPEATED = ("sequences", "tokens", "pack", "windows", "intervals", "select", "source", "analyzers", "seed")
"""The settings of a report under which its heads are computed once more."""
EXACT = 1e-6
"""Relative difference of weights.*, computed in float64 from the same stored numbers; reports carry nine digits."""


@public
def recompute(report: Report, model: str, heads: int, *, progress: Progress = silent, **more: Any) -> list[Check]:
    """Checks that the model's files are the report's, and that so many of its heads read the same, measure by measure.

    The heads are drawn anew each time, so that no forger knows which. tokens.* may differ by √ε of the
    model's type, weights.* by EXACT, both relative to the larger value. `more` are options of `inspect` that a report
    does not hold: its text, and how the model is loaded. Raises UsageError for a report without heads, and for another
    text than the report's.
    """
    count = min(requests.whole("recompute", heads, 1), len(report.heads))
    if report.command != "inspect" or not report.heads:
        raise UsageError(f"A report of {report.command} has no heads to recompute.", "Name one of attnlens inspect.")
    loading = {name: more.pop(name) for name in list(more) if name in requests.Loading.__annotations__}
    loaded = models.load(model, **{"dtype": report.settings.dtype, **loading})
    first = [_files(report, loaded.info.files), _model(report, loaded.info)]
    if not first[-1].passed:
        return first
    drawn = random.SystemRandom().sample(report.heads, count)
    where = {name: sorted({getattr(head, name[:-1]) for head in drawn}) for name in ("layers", "heads")}
    again = inspect(loaded, progress=progress, **{**_repeated(report), **more, **where})
    _refuse_other_text(report, again)
    found = {(head.site, head.head): head for head in again.heads}
    tolerance = torch.finfo(loaded.model.dtype).eps ** 0.5
    pairs = [(head, found.get((head.site, head.head))) for head in drawn]
    names = dict.fromkeys([*report.measure_names(), *again.measure_names()])
    return [*first, *(_measure(name, pairs, tolerance) for name in names)]


def _repeated(report: Report) -> dict[str, Any]:
    """The report's own settings as options; those that say nothing are left out."""
    found = {name: getattr(report.settings, name) for name in REPEATED}
    found["sequences"] = report.settings.sequences_asked or found["sequences"]
    return {name: value for name, value in found.items() if value is not None}


def _refuse_other_text(report: Report, again: Report) -> None:
    texts = [None if one.settings.text is None else one.settings.text.sha256 for one in (report, again)]
    if texts[0] != texts[1]:
        raise UsageError(
            f"The text is another: settings.text.sha256 is {texts[0]} in the report, and {texts[1]} here.",
            "Name the report's text with --text.",
        )


def _files(report: Report, files: Sequence[File]) -> Check:
    hashes = [sorted(file.sha256 for file in found) for found in (report.model.files, files)]
    return _check("model.files", "the SHA-256 of every file as the report", passed=hashes[0] == hashes[1])


def _model(report: Report, info: ModelInfo) -> Check:
    same = (info.architecture, info.parameters) == (report.model.architecture, report.model.parameters)
    return _check("model", f"{report.model.architecture}, {report.model.parameters} parameters", passed=same)


def _measure(name: str, pairs: Sequence[tuple[Head, Head | None]], tolerance: float) -> Check:
    """Whether one measure reads the same; heads that do not, the furthest off first."""
    bound = EXACT if name.startswith("weights.") else tolerance
    found = [(head, *_values(head, again, name)) for head, again in pairs]
    off = [(_share(said, read), head, said, read) for head, said, read in found]
    worst = sorted((one for one in off if one[0] > bound), key=lambda one: one[0], reverse=True)
    breaches = [breach(head, read, said) for _, head, said, read in worst]
    return _check(name, "as the report", passed=not worst, heads=len(pairs), breaches=breaches)


def _check(subject: str, wanted: str, **found: Any) -> Check:
    said = f"{subject}: recomputed {wanted}"
    return Check(id=f"recompute: {subject}", rule=said, subject=subject, wanted=wanted, **found)


def _values(head: Head, again: Head | None, name: str) -> tuple[float | None, float | None]:
    """What the report says, and what was read again."""
    measures = (head.measures.get(name), None if again is None else again.measures.get(name))
    said, read = (None if measure is None else measure.value for measure in measures)
    return said, read


def _share(said: float | None, read: float | None) -> float:
    """|a − b| / max(|a|, |b|, 10⁻⁶); 1 where one of the two has no value."""
    if said is None or read is None:
        return float(said is not read)
    return abs(said - read) / max(abs(said), abs(read), 1e-6)
