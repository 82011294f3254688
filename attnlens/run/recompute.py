"""Recomputes some heads of a report from a model, and says where the report reads otherwise."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch

from attnlens import models, requests
from attnlens.arguments import public
from attnlens.errors import UsageError
from attnlens.files import written
from attnlens.records import Breach, Check, Head, Measure, Report
from attnlens.run.inspect.pipeline import inspect
from attnlens.run.progress import Progress, silent

REPEATED = ("sequences", "tokens", "pack", "windows", "intervals", "select", "source", "analyzers", "seed")
"""The settings of a report under which its heads are computed once more."""
EXACT = 1e-6
"""Relative difference of weights.*, computed in float64 from the same stored numbers; reports carry nine digits."""


@public
def recompute(report: Report, model: str, heads: int, *, progress: Progress = silent, **more: Any) -> list[Check]:
    """Two checks: the model's files are those of the report, and so many of its heads, drawn by the seed, read the same.

    tokens.* may differ by √ε of the model's type, weights.* by EXACT; both relative to the larger value. `more` are
    options of `inspect` that a report does not hold: its text, and how the model is loaded. Raises UsageError for a
    report without heads, and for another text than the report's.
    """
    count = requests.whole("recompute", heads, 1)
    if report.command != "inspect" or not report.heads:
        raise UsageError(f"A report of {report.command} has no heads to recompute.", "Name one of attnlens inspect.")
    loading = {name: more.pop(name) for name in list(more) if name in requests.Loading.__annotations__}
    loaded = models.load(model, **{"dtype": report.settings.dtype, **loading})
    files = _files(report, loaded.info.files)
    if (loaded.info.architecture, loaded.info.parameters) != (report.model.architecture, report.model.parameters):
        return [files, _unlike(report, count)]
    drawn = random.Random(report.settings.seed).sample(report.heads, min(count, len(report.heads)))  # noqa: S311  # no secret
    where = {name: sorted({getattr(head, name[:-1]) for head in drawn}) for name in ("layers", "heads")}
    again = inspect(loaded, progress=progress, **{**_repeated(report), **more, **where})
    _refuse_other_text(report, again)
    found = {(head.site, head.head): head for head in again.heads}
    tolerance = torch.finfo(getattr(torch, report.settings.dtype)).eps ** 0.5
    pairs = [(head, found.get((head.site, head.head))) for head in drawn]
    breaches = [breach for head, other in pairs for breach in _differences(head, other, tolerance)]
    return [files, _heads(len(drawn), breaches)]


def _repeated(report: Report) -> dict[str, Any]:
    """The report's own settings as options; those that say nothing are left out."""
    found = {name: getattr(report.settings, name) for name in REPEATED}
    found["sequences"] = report.settings.sequences_asked or found["sequences"]
    return {name: value for name, value in found.items() if value is not None}


def _refuse_other_text(report: Report, again: Report) -> None:
    texts = [None if one.settings.text is None else one.settings.text.sha256 for one in (report, again)]
    if texts[0] != texts[1]:
        raise UsageError(
            f"The text is another: settings.text.sha256 is {written(texts[0])} in the report, {written(texts[1])} here.",
            "Name the report's text with --text.",
        )


def _files(report: Report, files: list[Any]) -> Check:
    hashes = [sorted(file.sha256 for file in found) for found in (report.model.files, files)]
    wanted = "the SHA-256 of every file as in the report"
    return _check("model.files", wanted, passed=hashes[0] == hashes[1])


def _unlike(report: Report, count: int) -> Check:
    of = f"{report.model.architecture} with {report.model.parameters} parameters"
    return _check("recompute", f"{count} heads of a {of}, as in the report", passed=False)


def _heads(count: int, breaches: list[tuple[float, Breach]]) -> Check:
    worst = [breach for _, breach in sorted(breaches, key=lambda one: one[0], reverse=True)]
    return _check("recompute", f"{count} heads as in the report", passed=not worst, heads=count, breaches=worst)


def _check(subject: str, wanted: str, **found: Any) -> Check:
    return Check(id=f"recompute: {subject}", rule=f"{subject}: {wanted}", subject=subject, wanted=wanted, **found)


def _differences(head: Head, again: Head | None, tolerance: float) -> list[tuple[float, Breach]]:
    """The measure in which the head differs most, and by what share; nothing where none does."""
    read: Mapping[str, Measure] = {} if again is None else again.measures
    shares = {name: _share(measure, read.get(name)) for name, measure in head.measures.items()}
    beyond = {
        name: share for name, share in shares.items() if share > (EXACT if name.startswith("weights.") else tolerance)
    }
    if not beyond:
        return []
    name = max(beyond, key=beyond.__getitem__)
    other = read.get(name)
    place = {"site": head.site, "layer": head.layer, "head": head.head, "part": head.part}
    found = Breach(**place, value=head.measures[name].value, base=None if other is None else other.value)
    return [(beyond[name], found)]


def _share(measure: Measure, other: Measure | None) -> float:
    """|a − b| / max(|a|, |b|, 10⁻⁶); 1 where one of the two has no value."""
    now, then = measure.value, None if other is None else other.value
    if now is None or then is None:
        return float(now is not then)
    return abs(now - then) / max(abs(now), abs(then), 1e-6)
