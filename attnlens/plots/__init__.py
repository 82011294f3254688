"""Pictures of a report as files: maps of layers × heads, fans of curves, the overview."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from attnlens.errors import OutputError, UsageError
from attnlens.files import make_folder, write_atomically
from attnlens.plots.experiment_pages import experiment_overview
from attnlens.plots.experiments import experiment_panels
from attnlens.plots.fans import fan_figure
from attnlens.plots.maps import map_figure
from attnlens.plots.overview import overview_figure
from attnlens.plots.selection import margins_figure
from attnlens.plots.style import FORMATS, encoded, house_style
from attnlens.plots.swaps import panel_figure, pictures, swap_overview
from attnlens.records import Report
from attnlens.shapes import Shapes
from attnlens.wording import clean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "Drawing",
    "drawings",
    "experiment_overview",
    "fan_figure",
    "figure",
    "house_style",
    "is_file",
    "map_figure",
    "margins_figure",
    "overview",
    "overview_figure",
    "save_all",
    "swap_overview",
]


FURTHEST = 1e300
"""The largest number, either side of 0, that an axis reaches."""

Drawing = Callable[[], bytes]
"""Draws one picture; the bytes of its file."""


def save_all(report: Report, target: Path) -> list[Path]:
    """Draw the report and return the files written; the same report gives the same bytes.

    A folder is made where there is none. Raises UsageError where the report has nothing to draw, OutputError where the
    target can't be written or names another kind of picture.
    """
    found = drawings(report, target)
    if not is_file(target):
        make_folder(target)
    for path, draw in found.items():
        write_atomically(path, draw())
    return list(found)


def drawings(report: Report, target: Path) -> dict[Path, Drawing]:
    """What draws each file; nothing is drawn yet.

    A folder gets `overview.png`, a `<measure>.png` per scalar and a `<curve>.png` per curve; a path that ends in .png,
    .svg or .pdf gets the overview alone, or the margins of the one head whose selection is shown; in a folder these are
    `selection-<layer>.<head>.png`. A swap's folder gets `sites.png`, `sweep.png`, `healing.png`, `kernels.png` instead,
    as far as there is something to draw; that of experiments a picture per group of curves, per measure that is
    followed, and `published.png`. Raises UsageError where the report has nothing to draw, OutputError where the target
    names another kind of picture.
    """
    if is_file(target):
        return {target: partial(overview, report, target.suffix.lower())}
    return {target / file: partial(_drawn, draw, ".png") for file, draw in _figures(report, alone=False).items()}


def overview(report: Report, suffix: str = ".png") -> bytes:
    """The one picture that stands for the report, as the bytes of a file. Raises UsageError where there is none."""
    (draw,) = _figures(report, alone=True).values()
    return _drawn(draw, suffix)


def figure(report: Report) -> Figure:
    """The same picture as a figure of matplotlib's. Raises UsageError where there is none."""
    (draw,) = _figures(report, alone=True).values()
    with house_style():
        return draw()


def _figures(report: Report, *, alone: bool) -> dict[str, Callable[[], Figure]]:
    """The report's pictures by file name, or the one that stands for it."""
    if report.swap is not None:
        return _swap_drawings(report, alone=alone)
    if report.experiments:
        return _experiment_drawings(report, alone=alone)
    shapes = Shapes(report)
    if not shapes.readings and not shapes.curves:
        raise UsageError("The report has no measures to draw.", "Make one with: attnlens inspect MODEL --json FILE.")
    _refuse_extreme(shapes)
    if not alone:
        return _head_drawings(shapes)
    shown = report.selections
    one = partial(margins_figure, report, shown[0]) if len(shown) == 1 else partial(overview_figure, shapes)
    return {"overview.png": one}


def is_file(target: Path) -> bool:
    """Whether the target means one picture and not a folder of them. Raises OutputError for another ending."""
    suffix = target.suffix.lower()
    if target.is_dir() or not suffix:
        return False
    if suffix not in FORMATS:
        raise OutputError(
            f"{target} can't be drawn: {suffix} is not offered.",
            "End it in .png, .svg or .pdf, or name a folder without a dot.",
        )
    return True


def file_names(names: Iterable[str]) -> dict[str, str]:
    """Measure or curve → file name; what can't stand in a file name becomes `_`, and no two get the same one."""
    taken = {"overview.png"}
    chosen: dict[str, str] = {}
    for name in names:
        stem = re.sub(r"[^A-Za-z0-9_.-]", "_", name)[:100].lstrip(".") or "measure"
        candidates = (f"{stem}{number}.png" for number in ("", *range(2, 2 + len(taken))))
        chosen[name] = next(candidate for candidate in candidates if candidate.lower() not in taken)
        taken.add(chosen[name].lower())
    return chosen


def _head_drawings(shapes: Shapes) -> dict[str, Callable[[], Figure]]:
    """The pictures of heads by file name: the overview, one a measure and curve, and the selections shown."""
    shown = {f"selection-{one.layer}.{one.head}": one for one in shapes.report.selections}
    names = file_names([*shapes.readings, *shapes.curves, *shown])
    found: dict[str, Callable[[], Figure]] = {"overview.png": partial(overview_figure, shapes)}
    for name in shapes.readings:
        found[names[name]] = partial(map_figure, shapes, name)
    for name in shapes.curves:
        found[names[name]] = partial(fan_figure, shapes, name)
    for name, selection in shown.items():
        found[names[name]] = partial(margins_figure, shapes.report, selection)
    return found


def _refuse_extreme(shapes: Shapes) -> None:
    """Raise UsageError for numbers whose differences no axis can hold: float64 ends at 1.8e308."""
    curves = {name: np.concatenate([curve for _, curve in found]) for name, found in shapes.curves.items()}
    for name, values in ({name: reading.present for name, reading in shapes.readings.items()} | curves).items():
        if np.any(np.abs(values) > FURTHEST):
            raise UsageError(
                f"{clean(name)} has values beyond {FURTHEST:g}, which no picture can show.", "Write them with --csv."
            )


def _swap_drawings(report: Report, *, alone: bool) -> dict[str, Callable[[], Figure]]:
    """The pictures of a swap by file name."""
    drawings: dict[str, Callable[[], Figure]] = {"overview.png": partial(swap_overview, report)}
    panels = {} if alone else {panel.stem: panel for panel in pictures(report)}
    return drawings | {file: partial(panel_figure, report, panels[stem]) for stem, file in file_names(panels).items()}


def _experiment_drawings(report: Report, *, alone: bool) -> dict[str, Callable[[], Figure]]:
    """The pictures of experiments by file name. Raises UsageError where none has curves or published figures."""
    found = experiment_panels(report)
    if not found:
        raise UsageError("The experiments have no curves to draw.", "Leave out --png and --html.")
    panels = {} if alone else {panel.stem: panel for panel in found}
    drawings: dict[str, Callable[[], Figure]] = {"overview.png": partial(experiment_overview, report)}
    return drawings | {file: partial(panel_figure, report, panels[stem]) for stem, file in file_names(panels).items()}


def _drawn(draw: Callable[[], Figure], suffix: str) -> bytes:
    with house_style():
        return encoded(draw(), suffix)
