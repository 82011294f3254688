"""Pictures of a study (results and learning curves of each cell) and of a comparison of two models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import LogNorm

from attnlens.records import PARTS, Report, StudyCell, StudyColumn
from attnlens.report.pictures.maps import heat_map
from attnlens.report.pictures.style import (
    CATEGORIES,
    INK,
    MUTED,
    Panel,
    PlainNumbers,
    Powers,
    legend_above,
    panels_overview,
    size_in_points,
)
from attnlens.report.sentences.comparisons import LOCAL, effect_sizes, title, worth
from attnlens.wording import clean, counted, shortened, source_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from attnlens.records import Comparison, Report


LEAST_Q = 1e-20  # smaller q are drawn at the top of the picture
WHOLE_RANGE = 1e6  # ratio of the largest to the smallest distance with its own colour; smaller ones get the last colour


def comparison_overview(report: Report) -> Figure:
    """Draw both panels of a comparison on one page."""
    comparison = _comparison(report)
    facts = (f"against {comparison.base.title}", clean(report.coverage.sentence))
    made = (clean(report.settings.fed), f"{clean(report.tool.name)} {clean(report.tool.version)}")
    return panels_overview(comparison_panels(report), report.model.title, facts, made)


def comparison_panels(report: Report) -> list[Panel]:
    """Build a map of the most informative distance between heads and a volcano plot of all measures."""
    comparison = _comparison(report)
    if not comparison.rows:
        return []
    panels = []
    for name in worth(comparison)[:1]:
        title = f"where heads differ: {LOCAL[name]}"
        note = "dots: named; hatched: no change at all"
        caption = "Logarithmic colours; of a KL each head's mean over queries and windows, in nats."
        rows = len({row.layer for row in comparison.rows})
        draw = partial(_draw_map, found=comparison, name=name)
        panels.append(Panel("differences", title, note, caption, draw, rows, bar=True))
    caption = "One dot a head and measure; size in interquartile ranges of the measure over the first model's heads."
    panels.append(Panel("volcano", "size against certainty", "", caption, partial(_draw_volcano, found=comparison)))
    return panels


def _comparison(report: Report) -> Comparison:
    comparison = report.comparison
    assert comparison is not None  # noqa: S101
    return comparison


def _draw_map(axes: Axes, found: Comparison, name: str) -> None:
    parts = {head.layer: head.part for head in found.heads}
    layers = sorted(parts, key=lambda layer: (PARTS.index(parts[layer]), layer))
    heads = sorted({head.head for head in found.heads})
    values = np.full((len(layers), len(heads)), np.nan)
    marked = []
    for row in found.rows:
        if row.measure == name and row.delta is not None and row.delta > 0:
            place = layers.index(row.layer), heads.index(row.head)
            values[place] = row.delta
            marked += [place] * row.named
    most = float(np.nanmax(values)) if np.isfinite(values).any() else 1.0
    least = max(float(np.nanmin(values)) if np.isfinite(values).any() else 0.0, most / WHOLE_RANGE)
    scale = (colormaps["viridis"], LogNorm(min(least, most / 10), most), "min")
    bar = heat_map(axes, values, layers, heads, [parts[layer] for layer in layers], scale, named=True)
    bar.formatter = Powers()
    bar.minorticks_off()
    bar.update_ticks()
    wide, high = size_in_points(axes)
    size = min(wide / len(heads), high / len(layers)) / 3
    if marked:
        rows, columns = np.array(marked).T
        axes.scatter(columns, rows, s=min(size, 5.0) ** 2, color="white", edgecolor=INK, linewidth=0.4, zorder=2)


def _draw_volcano(axes: Axes, found: Comparison) -> None:
    sizes = effect_sizes(found)
    sources = dict.fromkeys(source_of(name) for name in sizes)
    for source, colour in zip(sources, (CATEGORIES[0], CATEGORIES[2], *CATEGORIES[4:]), strict=False):
        rows = [row for row in found.rows if source_of(row.measure) == source and row.measure in sizes]
        points = [
            (row.delta / sizes[row.measure], row.q) for row in rows if row.delta is not None and row.q is not None
        ]
        if points:
            x, q = np.array(points, dtype=float).T
            sure = -np.log10(np.clip(q, LEAST_Q, None))
            axes.scatter(x, sure, s=6, color=colour, alpha=0.6, linewidth=0, label=f"{source}.*", rasterized=True)
    level = f"named above q = {found.fdr:g}"
    axes.axhline(-np.log10(found.fdr), color=MUTED, linewidth=0.6, linestyle="--", label=level)
    axes.axvline(0, color=MUTED, linewidth=0.4)
    axes.set_xscale("symlog", linthresh=0.1)
    axes.xaxis.set_major_formatter(PlainNumbers())
    axes.set_xlabel("second − first, in interquartile ranges over heads", labelpad=1.5)
    axes.set_ylabel("−log₁₀ q")
    axes.set_ylim(-0.02 * -np.log10(LEAST_Q), 1.04 * -np.log10(LEAST_Q))
    legend_above(axes, 4)


NAME, LETTER = 34, 0.055  # largest number of characters in a row's name, and width of one in inches
OWN, OTHER = CATEGORIES[0], CATEGORIES[2]
WIDE = 3  # ratio of largest to smallest perplexity above which the axis is logarithmic
DASHES = ("-", "--", ":", "-.")


def study_overview(report: Report) -> Figure:
    """Draw the results and learning curves of every task on one page, two panels per row."""
    facts = [f"{study.name}: scale {study.scale}, {counted(len(study.cells), 'cell')}" for study in report.studies]
    panels = [panel for panel in study_panels(report) if panel.stem.endswith(("-reached", "-learned"))]
    return panels_overview(panels, title(report), facts, dict.fromkeys(study.source for study in report.studies))


def study_panels(report: Report) -> list[Panel]:
    """Build two panels per task, results and validation loss during training, and one per measure of its heads."""
    panels = []
    for study in report.studies:
        for task in study.tasks:
            cells = [cell for cell in study.cells if cell.task == task.name]
            stem = f"{study.name}-{task.form}-{task.name}".replace(" ", "-").lower()
            left = 0.25 + LETTER * max(len(shortened(clean(cell.name), NAME)) for cell in cells)
            panels += [
                Panel(
                    f"{stem}-reached",
                    f"{task.name}: {task.metric}",
                    "dots: seeds · bar: mean ± se",
                    f"{study.question} {study.source}"
                    + (f"; published on {task.published}." if task.published else "."),
                    partial(_draw_results, task=task, cells=cells),
                    rows=max(6, 2 * len(cells)),
                    left=left,
                ),
                Panel(
                    f"{stem}-learned",
                    f"{task.name}: validation loss, nats",
                    "median over seeds",
                    f"{study.question} Validation loss against training steps.",
                    partial(_draw_losses, cells=cells),
                    rows=max(6, 2 * len(cells)),
                ),
                *_head_panels(study.question, stem, task, cells),
            ]
    return panels


def _head_panels(question: str, stem: str, task: StudyColumn, cells: list[StudyCell]) -> Iterator[Panel]:
    """Yield one panel per measure of the task's heads, for the folder of pictures."""
    for name in dict.fromkeys(name for cell in cells for name in cell.heads):
        yield Panel(
            f"{stem}-{name}",
            f"{task.name}: {name}",
            "median over heads, first seed",
            f"{question} {name} while each cell is trained.",
            partial(_draw_measure, name=name, cells=cells),
            rows=max(6, 2 * len(cells)),
        )


def _draw_results(axes: Axes, task: StudyColumn, cells: list[StudyCell]) -> None:
    """Draw one row per cell; cells that did not converge get a text instead of marks."""
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    transform = axes.get_yaxis_transform()
    factor = 100.0 if task.metric == "accuracy" else 1.0
    for row, cell in enumerate(cells):
        values = [run.scores[task.metric] * factor for run in cell.runs if task.metric in run.scores]
        if cell.mean is None:
            axes.text(0.02, row, "did not converge", transform=transform, color=OTHER, va="center", fontsize=6.5)
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
    for row, text in ({-1: "published"} | known if known else {}).items():
        axes.text(1.02, row, text, transform=transform, color=OTHER, va="center", fontsize=6, clip_on=False)


def _draw_losses(axes: Axes, cells: list[StudyCell]) -> None:
    """Draw one line per cell, up to the shortest of its runs."""
    for number, cell in enumerate(cells):
        length = min(len(run.losses) for run in cell.runs)
        curve = np.median([run.losses[:length] for run in cell.runs], axis=0)
        _draw_line(axes, number, cell, cell.runs[0].steps[:length], curve)
    _draw_legend(axes, cells)


def _draw_measure(axes: Axes, name: str, cells: list[StudyCell]) -> None:
    """Draw one line per cell that has the measure."""
    for number, cell in enumerate(cells):
        if name in cell.heads:
            values = [np.nan if value is None else value for value in cell.heads[name].median]
            _draw_line(axes, number, cell, cell.heads[name].steps, values)
    _draw_legend(axes, cells)


def _draw_line(axes: Axes, number: int, cell: StudyCell, steps: Sequence[float], values: Any) -> None:
    colour, dash = CATEGORIES[number % len(CATEGORIES)], DASHES[number // len(CATEGORIES) % len(DASHES)]
    axes.plot(steps, values, dash, color=colour, lw=1.1, label=shortened(clean(cell.name), NAME))


def _draw_legend(axes: Axes, cells: list[StudyCell]) -> None:
    axes.set_xlabel("step", labelpad=2)
    axes.legend(fontsize=5.5, frameon=False, ncols=1 + (len(cells) > 8), handlelength=1.6)
