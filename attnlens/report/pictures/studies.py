"""Pictures of a study (results and learning curves of each cell) and of a comparison of two models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.ticker import LogLocator, ScalarFormatter

from attnlens.records import Comparison, Report, StudyCell, StudyColumn, StudyTable
from attnlens.report.pictures.charts import Dot, Panel, Row, as_array, dot_plot, grid_of, heat_map, mark_cells, overview
from attnlens.report.pictures.style import (
    CATEGORIES,
    INK,
    MUTED,
    SEQUENTIAL,
    Powers,
    Style,
    legend_above,
    scale_logarithmically,
)
from attnlens.report.sections.comparisons import LOCAL, effect_sizes, rank_distances
from attnlens.report.sections.facts import title
from attnlens.wording import clean, format_count, shorten_line, source_of

if TYPE_CHECKING:
    from jaxtyping import Float
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEAST_Q = 1e-20  # smaller q are drawn at the top of the picture
WHOLE_RANGE = 1e6  # ratio of the largest to the smallest distance with its own colour; smaller ones get the last colour
NAME = 34  # largest number of characters in a cell's name
OWN, PUBLISHED = CATEGORIES[0], CATEGORIES[2]
WIDE = 3  # ratio of largest to smallest perplexity above which the axis is logarithmic
DASHES = ("-", "--", ":", "-.")


def comparison_overview(report: Report) -> Figure:
    """Draw both panels of a comparison on one page."""
    against = [f"against {report.comparison.base.title}"] if report.comparison is not None else []
    return overview(report, [Row(comparison_panels(report), 2.6)], [*against, clean(report.coverage.sentence)])


def comparison_panels(report: Report) -> list[Panel]:
    """Build a map of the most informative distance between heads and a volcano plot of all measures."""
    comparison = report.comparison
    if comparison is None or not comparison.rows:
        return []
    panels = []
    for name in rank_distances(comparison)[:1]:
        unit = ", nats" * ("KL" in LOCAL[name])
        name_of_map = f"where heads differ: {LOCAL[name]}{unit}"
        note = "dots: named; hatched: no change at all"
        caption = (
            "Logarithmic colours. KL: mean over queries and windows, in nats. Dots: heads whose change is named. "
            "Hatched: no change at all."
        )
        layers = len({row.layer for row in comparison.rows})
        draw = partial(draw_differences, comparison=comparison, name=name)
        panels.append(Panel("differences", name_of_map, note, caption, draw, 2 * layers))
    caption = (
        "One dot per head and measure; the size of a change is in interquartile ranges of the measure over the first "
        "model's heads. q: the p-value adjusted for the number of heads and measures (Benjamini–Hochberg)."
    )
    draw = partial(draw_volcano, comparison=comparison)
    return [*panels, Panel("volcano", "size and significance of changes", "", caption, draw)]


def draw_differences(axes: Axes, comparison: Comparison, name: str) -> None:
    """Draw a map of a distance between the heads of two models, on a logarithmic scale."""
    rows = {(row.layer, row.head): row for row in comparison.rows if row.measure == name and (row.delta or 0) > 0}
    places = [(head.layer, head.head, head.part) for head in comparison.heads]
    changes = [rows.get(place[:2]) for place in places]
    grid = grid_of(places, (None if row is None else row.delta for row in changes))
    most = float(np.nanmax(grid.values, initial=0.0)) or 1.0
    least = max(float(np.nanmin(grid.values, initial=most)), most / WHOLE_RANGE)
    bar = heat_map(axes, grid, (SEQUENTIAL, LogNorm(min(least, most / 10), most), "min"))
    bar.locator = LogLocator(subs=(1, 2, 5) if most < 100 * least else (1,))
    bar.formatter = Powers()
    bar.minorticks_off()
    mark_cells(axes, grid_of(places, (row is not None and row.named for row in changes)).values > 0, "white", INK)


def draw_volcano(axes: Axes, comparison: Comparison) -> None:
    """Draw one dot per head and measure: how large the change is, and how certain."""
    sizes = effect_sizes(comparison)
    sources = dict.fromkeys(source_of(name) for name in sizes)
    for source, colour in zip(sources, (CATEGORIES[0], CATEGORIES[2], *CATEGORIES[4:]), strict=False):
        rows = [row for row in comparison.rows if source_of(row.measure) == source and row.measure in sizes]
        points = [
            (row.delta / sizes[row.measure], row.q) for row in rows if row.delta is not None and row.q is not None
        ]
        if points:
            x, q = np.array(points, dtype=float).T
            certainty = -np.log10(np.clip(q, LEAST_Q, None))
            axes.scatter(x, certainty, s=6, color=colour, alpha=0.6, linewidth=0, label=f"{source}.*", rasterized=True)
    level = f"named above q = {comparison.fdr:g}"
    axes.axhline(-np.log10(comparison.fdr), color=MUTED, linewidth=0.6, linestyle="--", label=level)
    axes.axvline(0, color=MUTED, linewidth=0.4)
    axes.set_xscale("symlog", linthresh=0.1)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_xlabel("second − first, in interquartile ranges over heads")
    axes.set_ylabel("−log₁₀ q")
    axes.set_ylim(-0.02 * -np.log10(LEAST_Q), 1.04 * -np.log10(LEAST_Q))
    legend_above(axes, 80, handlelength=0.8)


def study_overview(report: Report) -> Figure:
    """Draw the results and learning curves of every task on one page, two panels per row."""
    facts = [f"{study.name}: scale {study.scale}, {format_count(len(study.cells), 'cell')}" for study in report.studies]
    panels = [panel for panel in study_panels(report) if panel.stem.endswith(("-reached", "-learned"))]
    rows = [Row(panels[n : n + 2], max(1.9, 0.16 * panels[n].rows)) for n in range(0, len(panels), 2)]
    return overview(report, rows, facts, title(report), dict.fromkeys(study.source for study in report.studies))


def study_panels(report: Report) -> list[Panel]:
    """Build two panels per task, results and validation loss during training, and one per measure of its heads."""
    return [panel for study in report.studies for task in study.tasks for panel in _task_panels(study, task)]


def _task_panels(study: StudyTable, task: StudyColumn) -> Iterator[Panel]:
    cells = [cell for cell in study.cells if cell.task == task.name]
    stem = f"{study.name}-{task.form}-{task.name}".replace(" ", "-").lower()
    rows = max(10, 2 * len(cells))
    caption = f"{study.question} {study.source}{f'; published on {task.published}' if task.published else ''}."
    title, note = f"{task.name}: {task.metric}", "dots: seeds; line: mean ± se"
    draw = partial(draw_results, task=task, cells=cells)
    yield Panel(f"{stem}-reached", title, note, caption, draw, rows, width=6.0)
    losses = []
    for cell in cells:  # up to the shortest of its runs
        length = min(len(run.losses) for run in cell.runs)
        median = np.median([run.losses[:length] for run in cell.runs], axis=0)
        losses.append((cell.name, cell.runs[0].steps[:length], median))
    title, note = f"{task.name}: validation loss, nats", "median over seeds"
    caption = f"{study.question} Validation loss against training steps, median over seeds."
    yield Panel(f"{stem}-learned", title, note, caption, partial(draw_lines, lines=losses), rows)
    for name in dict.fromkeys(name for cell in cells for name in cell.heads):
        curves = [(cell.name, cell.heads[name]) for cell in cells if name in cell.heads]
        draw = partial(draw_lines, lines=[(cell, curve.steps, as_array(curve.median)) for cell, curve in curves])
        note = "median over heads, first seed"
        caption = f"{study.question} {name} while each cell is trained, {note}."
        yield Panel(f"{stem}-{name}", f"{task.name}: {name}", note, caption, draw, rows)


def draw_results(axes: Axes, task: StudyColumn, cells: list[StudyCell]) -> None:
    """Draw one row per cell; cells that did not converge get a text instead of marks."""
    factor = 100.0 if task.metric == "accuracy" else 1.0
    rows = []
    for row, cell in enumerate(cells):
        values = [run.scores[task.metric] * factor for run in cell.runs if task.metric in run.scores]
        if cell.mean is None:
            rows.append([Dot(None, text="did not converge")])
            continue
        axes.scatter(values, [row] * len(values), s=9, color=OWN, alpha=0.55, linewidths=0, zorder=3)
        mean, se = cell.mean * factor, (cell.se or 0.0) * factor
        rows.append([Dot(mean, (mean - se, mean + se), INK, "|", 9)])
    dot_plot(axes, rows, [shorten_line(clean(cell.name), NAME) for cell in cells])
    means = [cell.mean for cell in cells if cell.mean]
    if task.metric == "perplexity" and means and max(means) > WIDE * min(means):
        scale_logarithmically(axes, "x", subs=(1, 2, 5))
    unit, better = ", %" if factor > 1 else "", "more" if task.higher_is_better else "less"
    axes.set_xlabel(f"{task.metric}{unit}, {better} is better")
    axes.grid(axis="y", color="#eeeeee", lw=0.6, zorder=0)
    place: Style = {"va": "center", "clip_on": False, "color": PUBLISHED, "fontsize": 6}
    published = {row: cell for row, cell in enumerate(cells) if cell.published_diverged or cell.published is not None}
    if published:
        axes.text(1.02, 1, "published", transform=axes.transAxes, **place)
    for row, cell in published.items():
        text = "none: diverged" if cell.published_diverged else f"{cell.published:g}"
        axes.text(1.02, row, text, transform=axes.get_yaxis_transform(), **place)


def draw_lines(axes: Axes, lines: Sequence[tuple[str, Sequence[float], Float[np.ndarray, " steps"]]]) -> None:
    """Draw one line per cell: name, steps and values."""
    axes.set_prop_cycle(color=len(DASHES) * CATEGORIES, linestyle=np.repeat(DASHES, len(CATEGORIES)))
    for name, steps, values in lines:
        axes.plot(steps, values, lw=1.1, label=shorten_line(clean(name), NAME))
    axes.set_xlabel("step")
    axes.legend(loc="best", fontsize=6, handlelength=1.6)
