"""Compares saved reports, paired where what each window read was kept beside them."""

from __future__ import annotations

import csv
import io
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnlens.errors import UsageError
from attnlens.files import read_bytes, sha256
from attnlens.records import Comparison, Head, HeadChange, Report, Settings, Shift, Spread, Windows, read_report
from attnlens.run.compare import significance
from attnlens.run.compare.significance import Judged, change, is_category, named_rows
from attnlens.statistics import Design

UNPAIRED = (
    "Not paired window by window: errors are those of two independent readings, which is too much for readings of the "
    "same windows. Reports whose --windows-csv lies beside them are paired."
)
NO_ROUNDING = "a report holds no weights, so that nothing says what rounding does"
SAME = ("seed", "text", "noise", "sequences", "tokens", "pack", "windows", "intervals", "select", "layers", "heads")
"""Settings that must be the same on both sides."""
AGAIN = "Make both with the same text and options, or give the models themselves."


def read(path: Path) -> Report:
    """A report with what each window read, where the file of --windows-csv that it names lies beside it.

    Raises UsageError for what is no report, or has no heads, and for a file of windows that is another one.
    """
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
        return apart(first, second, fdr, OTHER_HEADS)
    windows = _windows_read(first), _windows_read(second)
    if None not in windows and windows[0] != windows[1]:
        raise UsageError("The two sides list their windows in another order.", AGAIN)
    heads = first.heads, second.heads
    judged = {name: _judged(first, second, name) for name in first.measure_names()}
    rows = named_rows(heads, judged, fdr, NO_ROUNDING)
    paired = first.windows is not None and second.windows is not None
    return Comparison(
        base=first.model,
        paired=paired,
        fdr=fdr,
        tests=sum(row.p is not None for row in rows),
        named=sum(row.named for row in rows),
        heads=[HeadChange(**_place(head), partner=head.head, reason=NO_ROUNDING) for head in first.heads],
        rows=rows,
        notes=[*_of_rounding(first, second), *([] if paired else [UNPAIRED])],
    )


def _of_rounding(first: Report, second: Report) -> Iterator[str]:
    """That reports say nothing of rounding, and whether these were read in other number types."""
    kinds = [report.settings.dtype for report in (first, second)]
    if kinds[0] != kinds[1]:
        yield f"The models were run in {kinds[0]} and {kinds[1]}: every head differs by that rounding alone."
    yield "Reports hold no weights, so that rounding is not taken into account; compare the models themselves to do so."


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


def apart(first: Report, second: Report, fdr: float, why: str) -> Comparison:
    """A comparison of distributions, and why it is no more."""
    return Comparison(base=first.model, paired=False, fdr=fdr, shifts=shifts(first, second), notes=[why])


def shifts(first: Report, second: Report) -> list[Shift]:
    """The quartiles of every measure that both have."""
    found = []
    for name in first.measure_names():
        spreads = [_spread(report, name) for report in (first, second)]
        if spreads[0] is not None and spreads[1] is not None:
            found.append(Shift(measure=name, before=spreads[0], after=spreads[1]))
    return found


def _spread(report: Report, name: str) -> Spread | None:
    """The quartiles over the heads that have a value; None for categories, and where no head has one."""
    each = [head.measures[name] for head in report.heads if name in head.measures]
    values = [measure.value for measure in each if measure.value is not None and measure.label is None]
    if not values:
        return None
    low, middle, high = (float(part) for part in np.quantile(values, (0.25, 0.5, 0.75)))
    return Spread(heads=len(values), quartiles=(low, middle, high), median_se=report.summary.median_errors.get(name))
