"""Pictures of experiments, series of checkpoints, studies, and comparisons of two models."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.ticker import LogLocator, MaxNLocator, ScalarFormatter

from attnlens.analyzers.registry import FORMS, OWN_ROWS
from attnlens.records import Comparison, Curve, Experiment, Report, StudyCell, StudyColumn, StudyTable, Trajectory
from attnlens.report.pictures import charts, style
from attnlens.report.pictures.charts import Dot, Panel, Row, as_array
from attnlens.report.pictures.maps import heading
from attnlens.report.sections.comparisons import effect_sizes, rank_distances
from attnlens.report.sections.experiments import changed_measures, format_label, judgement, measures_of, setting
from attnlens.report.sections.facts import ran_on, standing, title
from attnlens.report.shapes import Names, describe_measure
from attnlens.wording import LEAST_P, capitalise, clean, format_count, shorten_line, source_of

if TYPE_CHECKING:
    from jaxtyping import Float
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


WHOLE_RANGE = 1e6  # ratio of the largest to the smallest distance on the colour scale
QUANTITIES = {"correlation": "correlation (cosine) to SVM"}  # Quantity of curves → clearer axis label
NAME = 34  # maximum number of characters in a cell's name
OWN, PUBLISHED = style.CATEGORIES[0], style.CATEGORIES[2]
WIDE = 3  # ratio of largest to smallest perplexity above which the axis is logarithmic
DASHES = ("-", "--", ":", "-.")


def comparison_overview(report: Report, *, bare: bool = False) -> Figure:
    """Draw the panels of a comparison on one page."""
    rows = [Row(comparison_panels(report), 2.6)]
    return charts.overview(report, rows, [clean(report.coverage.sentence)], title(report), bare=bare)


def comparison_panels(report: Report) -> list[Panel]:
    """Build up to two panels: the most informative distance between the models' heads, and a volcano plot."""
    comparison = report.comparison
    if comparison is None or not comparison.rows:
        return []
    panels = []
    for name in rank_distances(comparison)[:1]:
        title_of_map = "where M differs: ‖ΔM‖/‖M‖" if name == FORMS else "where attention differs: KL, nats"
        info, significant = describe_measure(report, name), f"q ≤ {comparison.fdr:g}"
        condition = "with equal hidden states; " * (name == OWN_ROWS)
        note = f"{condition}dots: {significant}; hatched: no change at all"
        caption = f"{capitalise(info.meaning)}: {info.formula}. Logarithmic colours; KL in nats. "
        caption += (
            f"Dots: heads with a significant change, {significant} (q: adjusted p-value). Hatched: no change at all."
        )
        layers = len({row.layer for row in comparison.rows})
        draw = partial(draw_differences, comparison=comparison, name=name, number=report.model.layer_number)
        panels.append(Panel("differences", title_of_map, note, caption, draw, 2 * layers))
    caption = (
        "One dot per head and measure; changes are in units of the measure's interquartile range over the heads of the "
        "first model. q: the p-value adjusted for the number of heads and measures (Benjamini–Hochberg)."
    )
    sizes = effect_sizes(comparison)
    if panels and not any(row.delta for row in comparison.rows if row.measure in sizes):
        return panels
    draw = partial(draw_volcano, comparison=comparison)
    return [*panels, Panel("volcano", "size and significance of changes", "", caption, draw)]


def draw_differences(axes: Axes, comparison: Comparison, name: str, number: Names = str) -> None:
    """Draw a map of a distance between two models' heads; dots mark changes that are significant and not negligible."""
    rows = {(row.layer, row.head): row for row in comparison.rows if row.measure == name and (row.delta or 0) > 0}
    places = [(head.layer, head.head, head.part) for head in comparison.heads]
    changes = [rows.get(place[:2]) for place in places]
    grid = charts.grid_of(places, (None if row is None else row.delta for row in changes))
    most = float(np.nanmax(grid.values, initial=0.0)) or 1.0
    least = max(float(np.nanmin(grid.values, initial=most)), most / WHOLE_RANGE)
    bar = charts.heat_map(axes, grid, (style.SEQUENTIAL, LogNorm(min(least, most / 10), most), "min"), number=number)
    bar.locator = LogLocator(subs=(1, 2, 5) if most < 100 * least else (1,))
    bar.formatter = style.Powers()
    bar.minorticks_off()
    charts.mark_cells(
        axes, charts.grid_of(places, (row is not None and row.named for row in changes)).values > 0, "white", style.INK
    )


def draw_volcano(axes: Axes, comparison: Comparison) -> None:
    """Draw one dot per head and measure: the change (x, in interquartile ranges) and its significance (y)."""
    sizes = effect_sizes(comparison)
    sources = dict.fromkeys(source_of(name) for name in sizes)
    for source, colour in zip(sources, (style.CATEGORIES[0], style.CATEGORIES[2], *style.CATEGORIES[4:]), strict=False):
        rows = [row for row in comparison.rows if source_of(row.measure) == source and row.measure in sizes]
        rows = [row for row in rows if row.delta is not None and row.q is not None]
        if rows:
            x = as_array(row.delta for row in rows) / [sizes[row.measure] for row in rows]
            certainty = -np.log10(np.clip(as_array(row.q for row in rows), LEAST_P, None))
            axes.scatter(x, certainty, s=6, color=colour, alpha=0.6, linewidth=0, label=f"{source}.*", rasterized=True)
    level = f"q = {comparison.fdr:g}"
    axes.axhline(-np.log10(comparison.fdr), color=style.MUTED, linewidth=0.6, linestyle="--", label=level)
    axes.axvline(0, color=style.MUTED, linewidth=0.4)
    axes.set_xscale("symlog", linthresh=0.1)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_xlabel("second − first, in interquartile ranges over heads")
    axes.set_ylabel("−log₁₀ q (4: q ≤ 10⁻⁴)")
    top = -np.log10(LEAST_P)  # smaller q-values are drawn here
    axes.set_ylim(-0.02 * top, 1.04 * top)
    style.legend_above(axes, 80, handlelength=0.8)


def study_overview(report: Report, *, bare: bool = False) -> Figure:
    """Draw the results and learning curves of every task on one page, two panels per row."""
    facts = [f"{study.name}: scale {study.scale}, {format_count(len(study.cells), 'cell')}" for study in report.studies]
    panels = [panel for panel in study_panels(report) if panel.stem.endswith(("-reached", "-learned"))]
    rows = [Row(panels[n : n + 2], max(1.9, 0.16 * panels[n].rows)) for n in range(0, len(panels), 2)]
    sources = dict.fromkeys(study.source for study in report.studies)
    return charts.overview(report, rows, facts, title(report), sources, bare=bare)


def study_panels(report: Report) -> list[Panel]:
    """Build the panels of each task: results, validation losses, and one panel per measure of the heads."""
    return [panel for study in report.studies for task in study.tasks for panel in _task_panels(study, task)]


def _task_panels(study: StudyTable, task: StudyColumn) -> Iterator[Panel]:
    cells = [cell for cell in study.cells if cell.task == task.name]
    stem = f"{study.name}-{task.form}-{task.name}".replace(" ", "-").lower()
    rows = max(10, 2 * len(cells))
    caption = f"{study.question} {study.source}{f'; published on {task.published}' if task.published else ''}."
    caption += " Dots: seeds; black line: mean ± standard error; at the right: published values."
    title, note = f"{task.name}: {task.metric}", "dots: seeds; line: mean ± se"
    draw = partial(draw_results, task=task, cells=cells)
    yield Panel(f"{stem}-reached", title, note, caption, draw, rows, width=6.0)
    losses = []
    for cell in cells:  # up to the end of the cell's shortest run
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
        caption = f"{study.question} {name} during the training of each cell, {note}."
        yield Panel(f"{stem}-{name}", f"{task.name}: {name}", note, caption, draw, rows)


def draw_results(axes: Axes, task: StudyColumn, cells: list[StudyCell]) -> None:
    """Draw one row per cell (attention variant): result of each seed, mean ± standard error, and published result."""
    factor = 100.0 if task.metric == "accuracy" else 1.0
    rows = []
    for row, cell in enumerate(cells):
        values = [run.scores[task.metric] * factor for run in cell.runs if task.metric in run.scores]
        if cell.mean is None:
            rows.append([Dot(None, text="did not converge")])
            continue
        axes.scatter(values, [row] * len(values), s=9, color=OWN, alpha=0.55, linewidths=0, zorder=3)
        mean, se = cell.mean * factor, (cell.se or 0.0) * factor
        rows.append([Dot(mean, (mean - se, mean + se), style.INK, "|", 9)])
    charts.dot_plot(axes, rows, [shorten_line(clean(cell.name), NAME) for cell in cells])
    means = [cell.mean for cell in cells if cell.mean]
    if task.metric == "perplexity" and means and max(means) > WIDE * min(means):
        style.scale_logarithmically(axes, "x", subs=(1, 2, 5))
    unit, better = ", %" if factor > 1 else "", "more" if task.higher_is_better else "less"
    axes.set_xlabel(f"{task.metric}{unit}, {better} is better")
    axes.grid(axis="y", color="#eeeeee", lw=0.6, zorder=0)
    place: style.Style = {"va": "center", "clip_on": False, "color": PUBLISHED, "fontsize": 6}
    published = {row: cell for row, cell in enumerate(cells) if cell.published_diverged or cell.published is not None}
    if published:
        axes.text(1.02, 1, "published", transform=axes.transAxes, **place)
    for row, cell in published.items():
        text = "none: diverged" if cell.published_diverged else f"{cell.published:g}"
        axes.text(1.02, row, text, transform=axes.get_yaxis_transform(), **place)


def draw_lines(axes: Axes, lines: Sequence[tuple[str, Sequence[float], Float[np.ndarray, " steps"]]]) -> None:
    """Draw one line per cell (attention variant); `lines` contains (name, steps, values)."""
    axes.set_prop_cycle(color=len(DASHES) * style.CATEGORIES, linestyle=np.repeat(DASHES, len(style.CATEGORIES)))
    for name, steps, values in lines:
        axes.plot(steps, values, lw=1.1, label=shorten_line(clean(name), NAME))
    axes.set_xlabel("step")
    axes.legend(loc="best", fontsize=6, handlelength=1.6)


MOST = 12  # maximum number of measures of a series of checkpoints on one page
MARKED = 12  # number of steps up to which each step has a marker
COLOURS = tuple(style.CATEGORIES[number] for number in (0, 2, 4, 5, 1, 6))  # distinguishable on white
COMPARED = "published"  # file name, without suffix, of the picture that compares our values with references
MOST_ROWS = 80  # maximum number of values in this picture, those farthest from their references
FARTHEST = 3.0  # deviation from the reference, in tolerances, from which a value is drawn at the edge


def experiment_overview(report: Report, *, bare: bool = False) -> Figure:
    """Draw the panels on one page, at most MOST panels of curves if heads are tracked over steps."""
    panels = experiment_panels(report)
    followed = any(experiment.trajectories for experiment in report.experiments)
    curves = [panel for panel in panels if panel.stem != COMPARED][: MOST if followed else None]
    across, height = (4, 1.35) if followed else (3, 1.9)  # panels per row, and their height in inches
    rows = charts.arrange(curves, max(1, min(across, len(curves))), height)
    rows += [Row([panel], max(0.5, 0.15 * panel.rows)) for panel in panels if panel.stem == COMPARED]
    steps = [len(curve.steps) for e in report.experiments if e.trajectories for curve in e.curves.values()]
    checkpoints = [format_count(max(steps), "checkpoint")] if steps else []
    facts = [*charts.model_facts(report), standing(report)[0], *checkpoints]
    more, hint = [ran_on(report), f"seed {report.settings.seed}"], "black: median over heads" * followed
    return charts.overview(report, rows, facts, title(report), more, hint, bare=bare)


def experiment_panels(report: Report) -> list[Panel]:
    """Build panels of each experiment's curves or trajectories, and a panel that compares values with references."""
    panels: list[Panel] = []
    for experiment in report.experiments:
        if experiment.trajectories:
            names = changed_measures(experiment) or measures_of(experiment)  # the main measures come first
            panels += [_trajectory_panel(report, experiment, name) for name in names]
        else:
            panels += _curve_panels(experiment)
    return [*panels, *_compared_panels(report)]


def scale_steps(axes: Axes, steps: Sequence[float], name: str) -> None:
    """Scale and label the x axis: logarithmic if at least three positive steps span a factor of 20, otherwise linear.

    A logarithmic axis that starts at 0 is linear up to the first positive step. Negative steps need a linear axis.
    """
    present = sorted(set(steps)) or [0.0, 1.0]
    low, high = present[0], present[-1]
    positive = [step for step in present if step > 0]
    linear = low < 0 or len(positive) < 3 or high < 20 * positive[0]
    if not linear and low == 0:  # the stretch from 0 to the first step is 0.35 of a decade wide
        axes.set_xscale("symlog", linthresh=positive[0], linscale=0.35)
    elif not linear:
        axes.set_xscale("log")
    axes.set_xlim(low, high if high > low else low + 1)
    labelled = present
    if len(present) > MARKED:
        whole = all(step == int(step) for step in present)
        numbers = MaxNLocator(6, integer=whole).tick_values(low, high) if linear else 10.0 ** np.arange(-6, 10)
        labelled = [low, *(float(number) for number in numbers if low < number < high), high]
    style.thin_ticks(axes.xaxis, labelled, 0.13)
    axes.xaxis.set_major_formatter(style.Powers())
    axes.set_xlabel(clean(style.shorten_label(name, 30)))


def _trajectory_panel(report: Report, experiment: Experiment, name: str) -> Panel:
    info, layer_name = describe_measure(report, name), report.model.layer_name
    curve, lines = experiment.curves[name], _trajectories(experiment, name)
    layers = {line.layer for line in experiment.trajectories}
    rows_of_layers = list(map(layer_name, range(max(layers) + 1))) if len(layers) > 1 and lines else []
    null = "; grey: null ± sd" * (experiment.null(name) is not None)
    note = clean(style.shorten_label(curve.quantity or source_of(name), 30)) + null
    caption = f"{capitalise(info.meaning)}: {info.formula}. " if info.meaning else ""
    coloured = ", coloured by layer" if rows_of_layers else f" of layer {layer_name(max(layers))}"
    heads = f"{format_count(len(lines), 'head')}{coloured}. Black: their median" if lines else "One number per step"
    heads += f", in {curve.quantity}" if curve.quantity and not info.meaning else ""
    caption += f"{heads}{null}."
    low, high, logarithmic = _limits(experiment, name) or (0.0, 0.0, True)
    room = np.inf if logarithmic else 0.05 * (high - low)  # width of the frame on each side of the limits
    rows = [as_array(line.values) for line in lines]
    beyond = sum(bool(np.any((row < low - room) | (row > high + room))) for row in rows)
    if beyond:
        note += f"; {format_count(beyond, 'head')} cut"
        caption += f" {format_count(beyond, 'head')} of {len(lines)} extend beyond the frame."
    draw = partial(draw_trajectories, experiment=experiment, name=name)
    return Panel(name, heading(info), note, caption, draw, layers=rows_of_layers)


def draw_trajectories(axes: Axes, *, experiment: Experiment, name: str) -> None:
    """Draw the null as a grey band, one thin line per head in its layer's colour, and a thick black median."""
    curve, lines, null = experiment.curves[name], _trajectories(experiment, name), experiment.null(name)
    steps = as_array(curve.steps)
    layers = 1 + max((line.layer for line in experiment.trajectories), default=0)
    if null is not None and null.low is not None and null.high is not None:
        axes.fill_between(steps, as_array(null.low), as_array(null.high), color="#dcdcdc", linewidth=0, zorder=0)
        axes.plot(steps, as_array(null.median), color=style.MUTED, linewidth=0.7, linestyle=(0, (4, 2)), zorder=1)
    heads = [(line.layer, (steps, as_array(line.values))) for line in lines] if len(lines) > 1 else []
    charts.fan_chart(axes, heads, layers, opacity=(40, 0.25, 0.75))
    charts.draw_over(axes, (steps, as_array(curve.median)), "-", 1.7, marker="o" if len(steps) <= MARKED else "")
    scale_steps(axes, curve.steps, experiment.axis)
    if limits := _limits(experiment, name):
        style.scale_values(axes, *limits[:2], logarithmic=limits[2])


def _trajectories(experiment: Experiment, name: str) -> list[Trajectory]:
    return [line for line in experiment.trajectories if line.measure == name]


def _limits(experiment: Experiment, name: str) -> tuple[float, float, bool] | None:
    """Return the smallest and largest value to show, and whether the axis is logarithmic; None without values."""
    middle = as_array(experiment.curves[name].median)
    values = np.concatenate([middle, *(as_array(line.values) for line in _trajectories(experiment, name))])
    values = values[np.isfinite(values)]
    if not values.size:
        return None
    least, most = float(np.nanmin(middle)), float(np.nanmax(middle))
    lowest, highest = float(values.min()), float(values.max())
    if lowest > 0 and most >= 30 * least:  # the median spans a factor of 30
        return lowest, highest, True
    low, high = np.percentile(values, [0.5, 99.5])
    low, high = min(float(low), least), max(float(high), most)  # omit the outermost 1 % if they double the range
    return (lowest, highest, False) if highest - lowest <= 2 * (high - low) else (low, high, False)


def groups(experiment: Experiment) -> dict[str, dict[str, Curve]]:
    """Group the curves that are drawn in the same picture, keyed by the picture's title."""
    titles: dict[tuple[str, str | None], dict[str, Curve]] = {}
    for name, curve in experiment.curves.items():
        picture = curve.picture or ("" if curve.quantity else format_label(experiment, name))
        titles.setdefault((picture, curve.quantity), {})[name] = curve
    pictures = [picture for picture, _ in titles]
    return {
        " ".join(filter(None, [picture, quantity])) if pictures.count(picture) > 1 else picture: curves
        for (picture, quantity), curves in titles.items()
    }


def _curve_panels(experiment: Experiment) -> Iterator[Panel]:
    facts = ", ".join(setting(experiment, name) for name, value in experiment.settings.items() if value is not None)
    for picture, curves in groups(experiment).items():
        names = [experiment.name, *([picture] if len(experiment.curves) > 1 and picture else [])]
        banded = any(curve.low is not None for curve in curves.values())
        below = "Not shown: values of 0, and values below 1e−16 times the largest." * _least_shown(curves)[1]
        sentences = [experiment.question, "Lines: median, bands: first to third quartile." * banded, below]
        caption = clean(" ".join(filter(None, [*sentences, f"({facts})" if facts else ""])))
        note = "median, quartiles" if banded and len(curves) == 1 else ""
        draw = partial(draw_curves, experiment=experiment, curves=curves)
        stem, title = re.sub("[ ,]+", "-", clean("-".join(names))), clean(style.shorten_label(": ".join(names), 60))
        yield Panel(stem, title, note, caption, draw)


def draw_curves(axes: Axes, *, experiment: Experiment, curves: dict[str, Curve]) -> None:
    """Draw each curve as a line, with a band between its quartiles if they are known."""
    floor, cut = _least_shown(curves)
    for colour, (name, curve) in zip(cycle(COLOURS), curves.items(), strict=False):
        steps, middle = as_array(curve.steps), as_array(curve.median)
        order = np.argsort(steps, kind="stable")
        if curve.low is not None and curve.high is not None:
            low, high = as_array(curve.low), as_array(curve.high)
            axes.fill_between(steps[order], low[order], high[order], color=colour, alpha=0.18, linewidth=0)
        axes.plot(
            steps[order],
            (middle if floor is None else np.where(middle > 0, middle, np.nan))[order],
            "--" if curve.published else "-",
            color=style.MUTED if curve.published else colour,
            linewidth=1.4,
            marker="o" if len(steps) <= MARKED else "",
            markersize=3,
            clip_on=cut,  # lines to values below a logarithmic axis would leave the frame
            label=style.shorten_label(clean(curve.label or format_label(experiment, name)), 40),
        )
    scale_steps(axes, [step for curve in curves.values() for step in curve.steps], experiment.axis)
    quantity = clean(next(iter(curves.values())).quantity or "")
    axes.set_ylabel(style.shorten_label(QUANTITIES.get(quantity, quantity), 30))
    values = _finite_values(curves)
    if values.size:
        least, most = float(values.min()), float(values.max())
        bottom = min(0.0, least) if least < 0.5 * most else least  # the axis includes 0 if 0 is near
        style.scale_values(axes, bottom if floor is None else floor, most, logarithmic=floor is not None)
    else:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no value", transform=axes.transAxes, ha="center", va="center", color=style.MUTED)
    if len(curves) > 1:
        style.legend_above(axes, 46)


def _least_shown(curves: Mapping[str, Curve]) -> tuple[float | None, bool]:
    """Return the least value of a logarithmic axis (None for a linear axis), and whether smaller values are hidden."""
    values = _finite_values(curves)
    above = values[values > 0]
    if any(curve.bounded for curve in curves.values()) or 2 * above.size <= values.size or np.any(values < 0):
        return None, False
    least, most = float(above.min()), float(above.max())
    if most < 100 * least:
        return None, False
    floor = max(least, 1e-16 * most)  # float64 does not resolve smaller values
    return floor, bool(values.min() < floor)


def _finite_values(curves: Mapping[str, Curve]) -> Float[np.ndarray, " values"]:
    parts = (part for curve in curves.values() for part in (curve.median, curve.low, curve.high))
    values = np.concatenate([as_array(part) for part in parts if part is not None])
    return np.asarray(values[np.isfinite(values)])


def _compared_panels(report: Report) -> list[Panel]:
    """Return the panel that compares values with references, as a list; [] if no value is tested."""
    figures = [(e, figure) for e in report.experiments for figure in e.final if e.meets(figure) is not None]
    if not figures:
        return []
    offsets = [(experiment.meets(figure), -abs(deviation(experiment, figure))) for experiment, figure in figures]
    worst = sorted(range(len(figures)), key=offsets.__getitem__)
    rows = [figures[number] for number in sorted(worst[:MOST_ROWS])]
    caption = (
        "Each tested value: (ours − reference) / tolerance. Shaded: allowed range, open on one "
        "side for bounds; a line allows only the reference value. At the edge: three tolerances or more."
    )
    left_out = f"; {len(rows)} of {len(figures)} with the largest deviations" * (len(rows) < len(figures))
    draw, note = partial(draw_compared, rows=rows), f"shaded: allowed range{left_out}"
    return [Panel(COMPARED, "ours against reference values", note, caption, draw, len(rows), width=6.0)]


def deviation(experiment: Experiment, figure: str) -> float:
    """Compute (our value − reference) / tolerance, clipped to ±FARTHEST; return −FARTHEST if our value is missing."""
    ours = experiment.final.get(figure)
    if ours is None:
        return -FARTHEST
    away = ours - (experiment.published or {}).get(figure, 0.0)
    slack = (experiment.tolerance or {}).get(figure, 0.0)
    return float(np.clip(away / slack if slack else np.sign(away) * FARTHEST, -FARTHEST, FARTHEST))


def draw_compared(axes: Axes, *, rows: list[tuple[Experiment, str]]) -> None:
    """Draw one row per value: the deviation from the reference as a dot, and the allowed range as a shaded area."""
    edge = FARTHEST * 1.1
    dots = []
    for row, (experiment, figure) in enumerate(rows):
        bound, slack = experiment.bounds.get(figure, "within"), (experiment.tolerance or {}).get(figure)
        reach = 1.0 if slack else 0.03  # a mere line if only the published value is allowed
        low, high = -edge if bound == "at most" else -reach, edge if bound == "at least" else reach
        axes.fill_between([low, high], row - 0.38, row + 0.38, color="#e3edf6", linewidth=0, zorder=0)
        at, met = deviation(experiment, figure), experiment.meets(figure)
        mark = "x" if not met else ">" if at >= FARTHEST else "<" if at <= -FARTHEST else "o"
        dots.append([Dot(at, colour=style.CATEGORIES[0] if met else style.CATEGORIES[2], marker=mark)])
        if not met:
            verdict = "no value" if experiment.final.get(figure) is None else judgement(experiment, figure)
            side, align = (-6, "right") if at > 0 else (6, "left")
            place: style.Style = {"textcoords": "offset points", "ha": align, "va": "center"}
            axes.annotate(verdict, (at, row), (side, 0), fontsize=6.5, color=style.CATEGORIES[2], **place)
    axes.axvline(0, color=style.MUTED, linewidth=0.7, zorder=0)
    names = [style.shorten_label(f"{clean(e.name)}: {format_label(e, figure)}", 64) for e, figure in rows]
    charts.dot_plot(axes, dots, names)
    axes.tick_params(axis="y", labelsize=6.5, labelcolor=style.INK)
    axes.set_xlim(-edge, edge)
    axes.set_xticks(range(-3, 4))
    axes.set_xlabel("(ours − reference) / tolerance")
