"""The kinds of report, and what is told of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from attnlens.errors import UsageError
from attnlens.records import Head, HeadId, Report
from attnlens.sections.checkpoints import series_sections, step_cells
from attnlens.sections.doctor import site_checks
from attnlens.sections.every_head import head_table
from attnlens.sections.figures import experiment_sections, figure_cells
from attnlens.sections.layers import layer_sections
from attnlens.sections.section import Cell, Picture, Row, Section
from attnlens.sections.swaps import site_sections, swap_rows, swap_sections
from attnlens.sentences import reports
from attnlens.sentences.followed import told_of
from attnlens.sentences.verdicts import outcome
from attnlens.shapes import Shapes
from attnlens.wording import clean

FURTHEST = 1e300
"""The largest number, either side of 0, that an axis reaches: float64 ends at 1.8e308, and differences are drawn."""


def _nothing(_report: Report) -> tuple[Section, ...]:
    return ()


@dataclass(frozen=True)
class Kind:
    """What is told of one kind of report."""

    summary: Callable[[Report, bool], Iterable[Section]]
    """Below the model and its coverage; True: whole."""
    page: Callable[[Report], Iterable[Section]]
    """Where there is room for everything."""
    rows: Callable[[Report], Sequence[Row]]
    """For a spreadsheet."""
    overview: Callable[[Report], Picture]
    """The picture that stands for the report."""
    pictures: Callable[[Report], list[Picture]]
    """All of them."""
    measured: Callable[[Report], list[str]]
    """The measures and curves whose meaning a page explains."""
    standing: Callable[[Report], tuple[str, bool]] = reports.standing
    """How much was read, or how the experiments ended; whether that is all, or as published."""
    more: Callable[[Report], Iterable[Section]] = _nothing
    """What else --verbose shows."""
    headed: bool = True
    """Whether the model and its coverage stand above."""


def kind_of(report: Report) -> Kind:
    """The kind of this report."""
    if report.swap is not None:
        return SWAP
    if report.experiments:
        return EXPERIMENTS
    return CHECKS if report.command == "doctor" else HEADS


def _head_summary(report: Report, whole: bool) -> Iterator[Section]:
    yield from layer_sections(Shapes(report), whole=whole)
    yield from _extremes(report)


def _head_page(report: Report) -> Iterator[Section]:
    yield from _extremes(report)
    if report.heads:
        yield head_table(Shapes(report))


def _extremes(report: Report) -> Iterator[Section]:
    found = tuple(map(reports.extreme, report.summary.extremes))
    if found:
        yield Section("Most extreme heads (ranks, not tests)", items=found)


def _head_rows(report: Report) -> list[Row]:
    return [_head_row(head) for head in report.heads]


def _head_row(head: Head) -> dict[str, Cell]:
    row: dict[str, Cell] = {name: getattr(head, name) for name in HeadId.model_fields}
    for name, measure in head.measures.items():
        row[name] = measure.value if measure.label is None else measure.label
        row |= {f"{name}.{part}": value for part in ("se", "z") if (value := getattr(measure, part)) is not None}
    return row


def _head_overview(report: Report) -> Picture:
    from attnlens import plots  # late here and below: it loads matplotlib

    shapes, shown = _drawable(report), report.selections
    one = partial(plots.margins_figure, report, shown[0]) if len(shown) == 1 else partial(plots.overview_figure, shapes)
    return Picture("overview", one, "maps of layers by heads, shares and curves")


def _head_pictures(report: Report) -> list[Picture]:
    from attnlens import plots

    shapes = _drawable(report)
    found = [Picture("overview", partial(plots.overview_figure, shapes))]
    found += [Picture(name, partial(plots.map_figure, shapes, name)) for name in shapes.readings]
    found += [Picture(name, partial(plots.fan_figure, shapes, name)) for name in shapes.curves]
    return found + [
        Picture(f"selection-{one.layer}.{one.head}", partial(plots.margins_figure, report, one))
        for one in report.selections
    ]


def _drawable(report: Report) -> Shapes:
    """Its shapes. Raises UsageError where there is nothing to draw, or numbers whose differences no axis can hold."""
    shapes = Shapes(report)
    if not shapes.readings and not shapes.curves:
        raise UsageError("The report has no measures to draw.", "Make one with: attnlens inspect MODEL --json FILE.")
    curves = {name: np.concatenate([curve for _, curve in found]) for name, found in shapes.curves.items()}
    for name, values in ({name: reading.present for name, reading in shapes.readings.items()} | curves).items():
        if np.any(np.abs(values) > FURTHEST):
            raise UsageError(
                f"{clean(name)} has values beyond {FURTHEST:g}, which no picture can show.", "Write them with --csv."
            )
    return shapes


def _head_measures(report: Report) -> list[str]:
    shapes = Shapes(report)
    return [*shapes.readings, *shapes.curves]


def _swap_summary(report: Report, _whole: bool) -> Iterator[Section]:
    assert report.swap is not None  # noqa: S101
    return swap_sections(report, report.swap)


def _swap_page(report: Report) -> Iterator[Section]:
    yield from _swap_summary(report, True)
    yield from site_sections(report)


def _swap_overview(report: Report) -> Picture:
    from attnlens import plots

    return Picture("overview", partial(plots.swap_overview, report), "what the kernel does")


def _swap_pictures(report: Report) -> list[Picture]:
    from attnlens import plots

    panels = plots.swap_panels(report)
    return [_swap_overview(report), *(Picture(p.stem, partial(plots.panel_figure, report, p)) for p in panels)]


def _experiment_summary(report: Report, whole: bool) -> Iterator[Section]:
    if whole:
        yield from _head_summary(report, whole)  # the head that was trained anew, as the model has it
    yield from experiment_sections(report, whole=whole)


def _experiment_page(report: Report) -> Iterator[Section]:
    yield from experiment_sections(report, whole=True)
    yield from _head_page(report)


def _experiment_rows(report: Report) -> list[Row]:
    followed: list[Row] = [row for experiment in report.experiments for row in step_cells(experiment)]
    return followed or [row for experiment in report.experiments for row in figure_cells(experiment)]


def _experiment_overview(report: Report) -> Picture:
    return _experiment_pictures(report)[0]


def _experiment_pictures(report: Report) -> list[Picture]:
    from attnlens import plots

    panels = plots.experiment_panels(report)
    if not panels:
        raise UsageError("The experiments have no curves to draw.", "Leave out --png and --html.")
    overview = Picture("overview", partial(plots.experiment_overview, report), "curves of the experiments")
    return [overview, *(Picture(p.stem, partial(plots.panel_figure, report, p)) for p in panels)]


def _followed(report: Report) -> list[str]:
    return [name for experiment in report.experiments if experiment.trajectories for name in told_of(experiment)]


HEADS = Kind(
    summary=_head_summary,
    page=_head_page,
    rows=_head_rows,
    overview=_head_overview,
    pictures=_head_pictures,
    measured=_head_measures,
)
SWAP = Kind(
    summary=_swap_summary,
    page=_swap_page,
    rows=lambda report: swap_rows(report.swaps),
    overview=_swap_overview,
    pictures=_swap_pictures,
    measured=lambda _report: [],
    more=site_sections,
)
EXPERIMENTS = Kind(
    summary=_experiment_summary,
    page=_experiment_page,
    rows=_experiment_rows,
    overview=_experiment_overview,
    pictures=_experiment_pictures,
    measured=lambda report: [*_head_measures(report), *_followed(report)],
    standing=outcome,
    more=series_sections,
)
CHECKS = replace(HEADS, summary=lambda report, _whole: site_checks(report), headed=False)
