"""Pictures of a study: what each cell reached, seed by seed, beside the published, and how it learned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from attnlens.plots.page import Panel, panels_overview
from attnlens.plots.style import CATEGORIES, INK
from attnlens.records import Report, StudyCell, StudyColumn
from attnlens.sentences.comparisons import title
from attnlens.wording import clean, counted, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME, LETTER = 34, 0.055
"""Most characters of a row's name, and inches of one."""
OWN, OTHER = CATEGORIES[0], CATEGORIES[2]
WIDE = 3
"""Times the least perplexity, from which on the axis is logarithmic."""
DASHES = ("-", "--", ":", "-.")


def study_overview(report: Report) -> Figure:
    """Every task's cells and curves, two panels a row."""
    facts = [f"{study.name}: scale {study.scale}, {counted(len(study.cells), 'cell')}" for study in report.studies]
    panels = [panel for panel in study_panels(report) if panel.stem.endswith(("-reached", "-learned"))]
    return panels_overview(panels, title(report), facts, dict.fromkeys(study.source for study in report.studies))


def study_panels(report: Report) -> list[Panel]:
    """Two a task: what was reached, and the validation loss while it was trained."""
    found = []
    for study in report.studies:
        for task in study.tasks:
            cells = [cell for cell in study.cells if cell.task == task.name]
            stem = f"{study.name}-{task.form}-{task.name}".replace(" ", "-").lower()
            left = 0.25 + LETTER * max(len(shortened(clean(cell.name), NAME)) for cell in cells)
            found += [
                Panel(
                    f"{stem}-reached",
                    f"{task.name}: {task.metric}",
                    "dots: seeds · bar: mean ± se",
                    f"{study.question} {study.source}"
                    + (f"; published on {task.published}." if task.published else "."),
                    partial(_reached, task=task, cells=cells),
                    rows=max(6, 2 * len(cells)),
                    left=left,
                ),
                Panel(
                    f"{stem}-learned",
                    f"{task.name}: validation loss, nats",
                    "median over seeds",
                    f"{study.question} Validation loss against training steps.",
                    partial(_learned, cells=cells),
                    rows=max(6, 2 * len(cells)),
                ),
                *_head_panels(study.question, stem, task, cells),
            ]
    return found


def _head_panels(question: str, stem: str, task: StudyColumn, cells: list[StudyCell]) -> Iterator[Panel]:
    """A panel a measure that the task's heads have, for the folder of pictures."""
    for name in dict.fromkeys(name for cell in cells for name in cell.heads):
        yield Panel(
            f"{stem}-{name}",
            f"{task.name}: {name}",
            "median over heads, first seed",
            f"{question} {name} while each cell is trained.",
            partial(_followed, name=name, cells=cells),
            rows=max(6, 2 * len(cells)),
        )


def _reached(axes: Axes, task: StudyColumn, cells: list[StudyCell]) -> None:
    """A row a cell; of those that did not converge the words alone."""
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    factor = 100.0 if task.metric == "accuracy" else 1.0
    for row, cell in enumerate(cells):
        values = [run.scores[task.metric] * factor for run in cell.runs if task.metric in run.scores]
        if cell.mean is None:
            axes.text(
                0.02,
                row,
                "did not converge",
                transform=axes.get_yaxis_transform(),
                color=OTHER,
                va="center",
                fontsize=6.5,
            )
            continue
        axes.scatter(values, [row] * len(values), s=9, color=OWN, alpha=0.55, linewidths=0, zorder=3)
        error = None if cell.se is None else cell.se * factor
        axes.errorbar(cell.mean * factor, row, xerr=error, fmt="|", color=INK, markersize=9, lw=1.2, zorder=4)
    means = [cell.mean for cell in cells if cell.mean]
    if task.metric == "perplexity" and means and max(means) > WIDE * min(means):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(range(len(cells)), [shortened(clean(cell.name), NAME) for cell in cells])
    axes.set_ylim(len(cells) - 0.5, -0.5)
    unit, better = ", %" if factor > 1 else "", "more" if task.higher_is_better else "less"
    axes.set_xlabel(f"{task.metric}{unit}, {better} is better", labelpad=2)
    axes.grid(axis="y", color="#eeeeee", lw=0.6, zorder=0)
    known = {row: f"{cell.published:g}" for row, cell in enumerate(cells) if cell.published is not None}
    known |= {row: "none: diverged" for row, cell in enumerate(cells) if cell.published_diverged}
    for row, said in ({-1: "published"} | known if known else {}).items():
        where = axes.get_yaxis_transform()
        axes.text(1.02, row, said, transform=where, color=OTHER, va="center", fontsize=6, clip_on=False)


def _learned(axes: Axes, cells: list[StudyCell]) -> None:
    """A line a cell, as far as all its runs went."""
    for number, cell in enumerate(cells):
        length = min(len(run.losses) for run in cell.runs)
        curve = np.median([run.losses[:length] for run in cell.runs], axis=0)
        _line(axes, number, cell, cell.runs[0].steps[:length], curve)
    _legend(axes, cells)


def _followed(axes: Axes, name: str, cells: list[StudyCell]) -> None:
    """A line a cell that has the measure."""
    for number, cell in enumerate(cells):
        if name in cell.heads:
            values = [np.nan if value is None else value for value in cell.heads[name].median]
            _line(axes, number, cell, cell.heads[name].steps, values)
    _legend(axes, cells)


def _line(axes: Axes, number: int, cell: StudyCell, steps: Sequence[float], values: Any) -> None:
    colour, dash = CATEGORIES[number % len(CATEGORIES)], DASHES[number // len(CATEGORIES) % len(DASHES)]
    axes.plot(steps, values, dash, color=colour, lw=1.1, label=shortened(clean(cell.name), NAME))


def _legend(axes: Axes, cells: list[StudyCell]) -> None:
    axes.set_xlabel("step", labelpad=2)
    axes.legend(fontsize=5.5, frameon=False, ncols=1 + (len(cells) > 8), handlelength=1.6)
