"""Compares two models, or two saved reports, on the same windows: which heads changed, and how surely."""

from __future__ import annotations

import csv
import io
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import torch
from torch import Tensor

from attnlens import requests
from attnlens.arguments import public
from attnlens.errors import UsageError
from attnlens.files import read_bytes, sha256
from attnlens.maths.statistics import Design
from attnlens.models import loading
from attnlens.records import Comparison, Head, HeadChange, Report, Settings, Shift, Spread, Windows, read_report
from attnlens.requests import CompareRequest, Loading
from attnlens.runs import feeding
from attnlens.runs.compare import significance
from attnlens.runs.compare.changes import Changes
from attnlens.runs.compare.sides import ComparedModel, Pairing, correspond, same_input
from attnlens.runs.compare.significance import Judged, change, is_category, named_rows
from attnlens.runs.in_memory import at_rest, held
from attnlens.runs.inspect.pipeline import inspect, prepared
from attnlens.runs.progress import Progress, silent
from attnlens.runs.provenance import report_of
from attnlens.runs.swap.saved import restored

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


UNPAIRED = (
    "Not paired window by window: errors are those of two independent readings, which is too much for readings of the "
    "same windows. Reports whose --windows-csv lies beside them are paired."
)
UNROUNDED = (
    "Reports hold no weights, so that rounding is not taken into account; compare the models themselves to do so."
)
NO_ROUNDING = "a report holds no weights, so that nothing says what rounding does"
SAME = ("seed", "text", "noise", "sequences", "tokens", "pack", "windows", "intervals", "select", "layers", "heads")
"""Settings that must be the same on both sides."""
AGAIN = "Make both with the same text and options, or give the models themselves."


def read(path: Path) -> Report:
    """A report with what each window read, where the file of --windows-csv that it names lies beside it."""
    report = read_report(path)
    if not report.heads:
        raise UsageError(f"{path} has no heads.", "Make one with: attnlens inspect MODEL --json FILE.")
    if report.windows_file is None:
        return report
    if Path(report.windows_file.name).name != report.windows_file.name:
        raise UsageError(f"{path} names windows that don't lie beside it.", "Write it again with --windows-csv.")
    beside = path.parent / report.windows_file.name
    if not beside.exists():
        return report
    if sha256(beside) != report.windows_file.sha256:
        raise UsageError(
            f"{beside} is not the file that {path.name} was written with.", "Write both again, or take it away."
        )
    try:
        return report.with_windows(_windows(beside, report))
    except (KeyError, ValueError, csv.Error):  # UnicodeDecodeError is a ValueError
        raise UsageError(f"{beside} does not hold the windows of {path.name}.", AGAIN) from None


def _windows(path: Path, report: Report) -> Windows:
    """What --windows-csv wrote of these heads."""
    content = read_bytes(path, UsageError, "Write it again with --windows-csv.").decode()
    places = {(head.layer, head.head): place for place, head in enumerate(report.heads)}
    windows: dict[tuple[str, int], int] = {}
    values: dict[str, dict[tuple[int, int], float]] = defaultdict(dict)
    names = report.measure_names()
    for row in csv.DictReader(io.StringIO(content)):
        window = windows.setdefault((row["text"], int(row["window"])), len(windows))
        place = places[int(row["layer"]), int(row["head"])]
        for name in names:
            if row.get(name):
                values[name][window, place] = float(row[name])
    tables = {name: _table(found, len(windows), len(places)) for name, found in values.items()}
    return Windows(list(windows), [head.model_dump(include={"layer", "head"}) for head in report.heads], tables)


def _table(found: dict[tuple[int, int], float], windows: int, heads: int) -> Tensor:
    table = torch.full((windows, heads), math.nan, dtype=torch.float64)
    for place, value in found.items():
        table[place] = value
    return table


def refuse_other_settings(first: Settings, second: Settings) -> None:
    """Raise UsageError for the first setting in which two readings differ, so that their difference means nothing."""
    for name in SAME:
        one, other = (getattr(side, name) for side in (first, second))
        one, other = (
            f"a text of hash {side.sha256[:12]}" if hasattr(side, "sha256") else side for side in (one, other)
        )
        if one != other:
            raise UsageError(f"The two sides read differently: settings.{name} is {one} and {other}.", AGAIN)
    windows = [[(text.sha256, text.windows) for text in side.texts] for side in (first, second)]
    if windows[0] != windows[1]:
        raise UsageError("The two sides read differently: settings.texts are other windows of the text.", AGAIN)


def _windows_read(report: Report) -> list[tuple[object, int]] | None:
    """Return each window as the place of its text among those read, whose name does not count, and its number there."""
    if report.windows is None:
        return None
    places = {text.name: place for place, text in enumerate(report.settings.texts)}
    return [(places.get(name, name), number) for name, number in report.windows.windows]


def compared_reports(first: Report, second: Report, fdr: float) -> Comparison:
    """What two reports have to do with each other. Raises UsageError where they read other windows."""
    refuse_other_settings(first.settings, second.settings)
    if [_place(head) for head in first.heads] != [_place(head) for head in second.heads]:
        return apart(first, second, fdr)
    windows = _windows_read(first), _windows_read(second)
    if None not in windows and windows[0] != windows[1]:
        raise UsageError("The two sides list their windows in another order.", AGAIN)
    heads = first.heads, second.heads
    judged = {name: _judged(first, second, name) for name in first.measure_names()}
    rows = named_rows(heads, judged, fdr, NO_ROUNDING)
    paired = first.windows is not None and second.windows is not None
    kinds = [report.settings.dtype for report in (first, second)]
    otherwise = f"The models were run in {kinds[0]} and {kinds[1]}: every head differs by that rounding alone."
    return Comparison(
        base=first.model,
        paired=paired,
        fdr=fdr,
        tests=sum(row.p is not None for row in rows),
        named=sum(row.named for row in rows),
        heads=[HeadChange(**_place(head), partner=head.head, reason=NO_ROUNDING) for head in first.heads],
        rows=rows,
        notes=[*[otherwise] * (kinds[0] != kinds[1]), UNROUNDED, *[UNPAIRED] * (not paired)],
    )


def _place(head: Head) -> dict[str, Any]:
    return head.model_dump(include=set(HeadChange.model_fields) & set(Head.model_fields))


def _judged(first: Report, second: Report, name: str) -> Judged | None:
    """The changes of a measure: paired, or of two readings; None for categories and what no text has part in."""
    heads = first.heads, second.heads
    if is_category(heads, name):
        return None
    read = [None if report.windows is None else report.windows.values.get(name) for report in (first, second)]
    if read[0] is not None and read[1] is not None:
        design = _design(first)
        return significance.sampled(read[1] - read[0], design, None, first.settings.seed)
    errors = change(heads, name, "se")
    if bool(errors[0].isnan().all() | errors[1].isnan().all()):
        return None
    before, after = change(heads, name)
    error = (errors[0].square() + errors[1].square()).sqrt()
    return significance.independent(after - before, error, _design(first).freedom)


def _design(report: Report) -> Design:
    """How the report's windows were sampled."""
    names = [text.name for text in report.settings.texts for _ in text.windows]
    return Design.of(names or [""] * (report.settings.sequences or 0), report.settings.intervals)


OTHER_HEADS = "The models have other sites or heads, so that none corresponds to one: distributions alone."


def apart(first: Report, second: Report, fdr: float) -> Comparison:
    """A comparison of the quartiles of every measure that both have, as heads don't correspond."""
    spreads = {name: (_spread(first, name), _spread(second, name)) for name in first.measure_names()}
    shifts = [
        Shift(measure=name, before=before, after=after)
        for name, (before, after) in spreads.items()
        if before is not None and after is not None
    ]
    return Comparison(base=first.model, paired=False, fdr=fdr, shifts=shifts, notes=[OTHER_HEADS])


def _spread(report: Report, name: str) -> Spread | None:
    """The quartiles over the heads that have a value; None for categories, and where no head has one."""
    each = [head.measures[name] for head in report.heads if name in head.measures]
    values = [measure.value for measure in each if measure.value is not None and measure.label is None]
    if not values:
        return None
    low, middle, high = (float(part) for part in np.quantile(values, (0.25, 0.5, 0.75)))
    return Spread(heads=len(values), quartiles=(low, middle, high), median_se=report.summary.median_errors.get(name))


SECOND = ("revision", "adapter")
"""Options that hold for the second model alone."""
OTHER_INPUT = (
    "The models read other numbers in the same windows (another tokenizer, or none; other lengths of windows or sizes "
    "of images): what reads them is not compared."
)


@public
def compare(
    first: str | PathLike[str] | Report | loading.Loaded | PreTrainedModel,
    second: str | PathLike[str] | Report | loading.Loaded | PreTrainedModel,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress = silent,
    **more: Unpack[CompareRequest],
) -> Report:
    """Each head's measures in two models on the same windows: second − first, with error, p and q.

    The report is the second model's, with `comparison` (records.Comparison). p is of no change beyond what the windows
    sampled and rounding of the weights explain; q is Benjamini and Hochberg's over heads × measures; named is q ≤
    `fdr`. Either side may be a report of `inspect`, or the path of one (`.json`): a model beside it is read with its
    settings. `tokenizer` is that of models in memory. Models are loaded in float32, where `dtype` says nothing else;
    `revision` and `adapter` are of the second. Raises what `inspect` raises, and UsageError where both sides are the
    same, or read other windows.
    """
    start = time.perf_counter()
    given = requests.checked(CompareRequest, more)
    options = {name: value for name, value in more.items() if name != "fdr"}
    subjects: list[Any] = [
        read(Path(side)) if isinstance(side, str | PathLike) and Path(side).suffix == ".json" else side
        for side in (first, second)
    ]
    here = [Path(side).expanduser() for side in (first, second) if isinstance(side, str | PathLike)]
    twice = first is second
    if len(here) == 2:
        same = str(first) == str(second) or (all(path.exists() for path in here) and here[0].samefile(here[1]))
        twice = same and all(options.get(name) is None for name in SECOND)
    if twice:
        raise UsageError("Both sides are the same.", "Name another model, or another report.")
    if any(isinstance(side, Report) for side in subjects):
        _refuse_ignored(subjects, options)
        reports = _reports(subjects, tokenizer, progress, options)
        found, report = compared_reports(*reports, given["fdr"]), reports[1]
    else:
        sides = _sides(subjects, tokenizer, progress, options)
        with at_rest(sides[0].loaded.model), at_rest(sides[1].loaded.model):
            found, report = compared(*sides, given["fdr"], progress), sides[1].report
    own = {name: getattr(report, name) for name in ("model", "settings", "coverage", "heads", "summary")}
    return report_of("compare", **own, comparison=found, timings={"all": time.perf_counter() - start})


def _refuse_ignored(subjects: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Raise UsageError for options that no side of these takes: a report says itself how it was made."""
    known = requests.options(CompareRequest)
    given = [
        name
        for name, value in options.items()
        if value not in (known[name].default, [], (), None) and (name, value) != ("dtype", "float32")
    ]
    if all(isinstance(side, Report) for side in subjects):
        ignored = given
    else:
        ignored = [name for name in given if name in SECOND and isinstance(subjects[1], Report)]
    if ignored:
        raise UsageError(f"A report is read as it is, so that {', '.join(ignored)} would be ignored.", "Leave it out.")


def _reports(
    subjects: Sequence[Any], tokenizer: PreTrainedTokenizerBase | None, progress: Progress, options: Mapping[str, Any]
) -> tuple[Report, Report]:
    """Both sides as reports, a model read with the settings of the report beside it."""
    like = feeding.recorded(next(side.settings for side in subjects if isinstance(side, Report)))
    first, second = (
        side
        if isinstance(side, Report)
        else inspect(held(side, tokenizer), progress=progress, **{**like, **_loading(side, options, number)})
        for number, side in enumerate(subjects)
    )
    return first, second


def _loading(subject: Any, options: Mapping[str, Any], number: int) -> Any:
    """The options of one side: how it is loaded, and what it is fed with where no report says so."""
    found = {name: value for name, value in options.items() if number or name not in SECOND}
    if isinstance(subject, str | PathLike):
        return {"dtype": "float32", **found}
    found.pop("dtype", None)
    return found


def _sides(
    subjects: Sequence[Any], tokenizer: PreTrainedTokenizerBase | None, progress: Progress, options: Mapping[str, Any]
) -> tuple[ComparedModel, ComparedModel]:
    """Both models inspected on the first one's texts."""
    sides: list[ComparedModel] = []
    for number, subject in enumerate(subjects):
        own = None if isinstance(subject, str | PathLike | loading.Loaded) else tokenizer
        given = _loading(subject, options, number)
        swaps = None
        if isinstance(subject, str | PathLike) and (Path(subject).expanduser() / loading.SWAPPED).is_file():
            load_options = {name: value for name, value in given.items() if name in Loading.__annotations__}
            found = restored(Path(subject).expanduser(), **load_options)
            subject, swaps = found.loaded, found.swaps
            given = {name: value for name, value in given.items() if name not in load_options}
        inspection, contents, cut = prepared(subject, own, progress, given)
        if sides:
            contents = sides[0].contents
        sides.append(ComparedModel.of(inspection, contents, cut, swaps))
    return sides[0], sides[1]


def compared(first: ComparedModel, second: ComparedModel, fdr: float, progress: Progress) -> Comparison:
    """What two inspected models have to do with each other."""
    if not correspond(first, second):
        return apart(first.report, second.report, fdr)
    if same_input(first, second):
        return Changes(Pairing.of(first, second), fdr, progress).found(first.report.model)
    pairing = Pairing.of(first.without_text(), second.without_text())
    found = Changes(pairing, fdr, progress).found(first.report.model)
    return found.model_copy(update={"notes": [OTHER_INPUT, *found.notes]})
