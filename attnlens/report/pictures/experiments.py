"""Pictures of experiments and of checkpoints: curves, steps and trajectories."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from attnlens.analyzers.registry import find_measure
from attnlens.records import Curve, Experiment, Report, Trajectory
from attnlens.report.pictures.maps import draw_lines, show_depths
from attnlens.report.pictures.style import (
    CATEGORIES,
    FOOT,
    HEAD,
    INK,
    LINE,
    MUTED,
    Panel,
    PlainNumbers,
    fitted,
    head,
    heading,
    legend_above,
    new_figure,
    picture_title,
    size_in_points,
)
from attnlens.report.sentences.reports import judgement, measures_of, outcome, ran_on, setting, title, told_of, worded
from attnlens.wording import big, clean, counted, source_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE = 20.0  # ratio of the last step to the first positive one above which the axis is logarithmic
DIGIT, BETWEEN = 4.8, 5.0  # width of a digit of a step's number, and least gap between two numbers, in points
ROOM = 0.05  # margin of an axis at each end, as a share of the range of its values
NARROW = 0.35  # width of the stretch from 0 to the first step, as a share of a decade


def scale_steps(axes: Axes, steps: Sequence[float], name: str) -> None:
    """Scale and label the x axis: logarithmic if the steps span a factor of 20 (with room for 0), else linear."""
    present = sorted(set(steps))
    positive = [step for step in present if step > 0]
    if present and present[0] >= 0 and len(positive) > 2 and positive[-1] >= WIDE * positive[0]:
        if present[0] == 0:
            axes.set_xscale("symlog", linthresh=positive[0], linscale=NARROW)
        else:
            axes.set_xscale("log")
    low, high = (present[0], present[-1]) if present else (0.0, 1.0)
    axes.set_xlim(low, high if high > low else low + 1)
    axes.xaxis.set_major_locator(FixedLocator(_labelled_steps(axes, present)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:g}"))  # the shortest form of each number
    axes.set_xlabel(name, labelpad=1.5)


def scale_values(axes: Axes, least: float, most: float, *, logarithmic: bool) -> None:
    """Set the y axis slightly wider than the values; label powers of ten if it is logarithmic."""
    if logarithmic:
        axes.set_yscale("log")
        low, high = least / 1.3, most * 1.3
        axes.set_ylim(low, high)
        powers = LogLocator(numticks=6).tick_values(low, high)
        axes.yaxis.set_major_locator(FixedLocator([power for power in powers if low <= power <= high]))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(
            FuncFormatter(lambda tick, _: f"{tick:g}".replace("e-0", "e−").replace("-", "−"))
        )
        return
    room = ROOM * (most - least) or 0.5
    axes.set_ylim(least - room, most + room)
    axes.yaxis.set_major_formatter(PlainNumbers())


def _labelled_steps(axes: Axes, steps: list[float]) -> list[float]:
    """Choose the steps to label: all if there are few, else round ones that keep a distance; the ends come first."""
    if len(steps) > 12:
        low, high = steps[0], steps[-1]
        linear = axes.get_xscale() == "linear"
        whole = all(step == int(step) for step in steps)
        ticks = axes.xaxis.get_major_locator().tick_values(low, high) if linear else [10.0**p for p in range(-6, 10)]
        round_ones = [float(step) for step in ticks if step == int(step) or not whole]
        steps = [low, *(step for step in round_ones if low < step < high), high]
    places = axes.transScale.transform([(step, 0.5) for step in steps])[:, 0] if steps else np.array([])
    width = size_in_points(axes)[0]
    span = float(np.ptp(places)) or 1.0
    halves = [DIGIT * len(f"{step:g}") / 2 for step in steps]
    labelled = sorted({0, len(steps) - 1}) if steps else []
    for index in range(1, len(steps) - 1):
        free = [abs(places[index] - places[other]) / span * width - halves[index] - halves[other] for other in labelled]
        if min(free) >= BETWEEN:
            labelled.append(index)
    return [steps[index] for index in sorted(labelled)]


BAND = "#dcdcdc"
"""Colour of the null's band, mean ± sd."""
TRAJECTORY_RANGE = 30.0  # ratio of a median's largest to its least value from which its axis is logarithmic

STRAY = 2.0  # the 1 % most extreme values may widen the axis to this many times the range of the others


def trajectory_panels(experiment: Experiment) -> list[Panel]:
    """Build a panel for every measure that changes; those the series is about come first."""
    names = told_of(experiment) or measures_of(experiment)
    return [_trajectory_panel(experiment, name) for name in names]


def _trajectory_panel(experiment: Experiment, name: str) -> Panel:
    info = find_measure(name)
    lines = _trajectories(experiment, name)
    kind = clean(fitted(experiment.curves[name].quantity or source_of(name), 30))
    null = "; grey: null ± sd" if experiment.null(name) is not None else ""
    beyond = _count_beyond(experiment, name)
    cut = f"; {counted(beyond, 'head')} cut" if beyond else ""
    meaning = f"{info.meaning}: {info.formula}. " if info.meaning else ""
    heads = f"{_describe_heads(experiment, lines)}{'; grey: null, mean ± sd' if null else ''}."
    cut_heads = f" {counted(beyond, 'head')} of {len(lines)} partly beyond the frame." if beyond else ""
    caption = f"{meaning[:1].upper()}{meaning[1:]}{heads}{cut_heads}"
    draw = partial(draw_trajectories, experiment=experiment, name=name)
    return Panel(name, heading(info), f"{kind}{null}{cut}", caption, draw, bar=_has_layers(experiment))


def _describe_heads(experiment: Experiment, lines: list[Trajectory]) -> str:
    """Describe the heads whose lines are drawn."""
    if len(lines) == 1:
        return f"Layer {lines[0].layer} head {lines[0].head}"
    if not lines:
        return "One number a step"
    return f"{counted(len(lines), 'head')}{', coloured by layer' * _has_layers(experiment)}. Black: their median"


def draw_trajectories(axes: Axes, *, experiment: Experiment, name: str, bar: bool = True) -> None:
    """Draw the null as a grey band, one thin line per head in its layer's colour, and their median thick and black."""
    curve = experiment.curves[name]
    steps = np.asarray(curve.steps, dtype=float)
    lines = _trajectories(experiment, name)
    null = experiment.null(name)
    if null is not None and null.low is not None and null.high is not None:
        axes.fill_between(steps, _numbers(null.low), _numbers(null.high), color=BAND, linewidth=0, zorder=0)
        axes.plot(steps, _numbers(null.median), color=MUTED, linewidth=0.7, linestyle=(0, (4, 2)), zorder=1)
    if len(lines) > 1:
        points = [(found.layer, np.column_stack([steps, _numbers(found.values)])) for found in lines]
        draw_lines(axes, points, depth(experiment), (40, 0.25, 0.75))
    middle = _numbers(curve.median)
    dots = "o" if len(steps) <= 12 else ""
    axes.plot(steps, middle, color="white", linewidth=2.9, zorder=3)
    axes.plot(steps, middle, color="black", linewidth=1.7, zorder=4, marker=dots, markersize=2.6, clip_on=False)
    scale_steps(axes, curve.steps, clean(fitted(experiment.axis, 30)))
    limits = _limits(experiment, name)
    if limits is not None:
        low, high, logarithmic = limits
        scale_values(axes, low, high, logarithmic=logarithmic)
    axes.spines[["top", "right"]].set_visible(False)
    if bar and lines and _has_layers(experiment):
        norm = depth(experiment)
        show_depths(axes, range(int(norm.vmax or 0) + 1), norm, INK)


def depth(experiment: Experiment) -> Normalize:
    """Return the norm of the layers' colours; dark is the first."""
    return Normalize(0, max(1, max((found.layer for found in experiment.trajectories), default=0)))


def _trajectories(experiment: Experiment, name: str) -> list[Trajectory]:
    return [found for found in experiment.trajectories if found.measure == name]


def _has_layers(experiment: Experiment) -> bool:
    """Check whether several layers are followed and need colours."""
    return len({found.layer for found in experiment.trajectories}) > 1


def _limits(experiment: Experiment, name: str) -> tuple[float, float, bool] | None:
    """Return the least and largest value shown and whether the axis is logarithmic; None without values.

    It is logarithmic if the median spans a factor of 30; else all values show unless the outer 1 % double the range.
    """
    middle = _numbers(experiment.curves[name].median)
    values = np.concatenate([middle, *(_numbers(found.values) for found in _trajectories(experiment, name))])
    values = values[np.isfinite(values)]
    if not values.size:
        return None
    least, most = float(np.nanmin(middle)), float(np.nanmax(middle))
    if values.min() > 0 and most >= TRAJECTORY_RANGE * least:
        return float(values.min()), float(values.max()), True
    low, high = np.percentile(values, [0.5, 99.5])
    low, high = min(float(low), least), max(float(high), most)
    if values.max() - values.min() <= STRAY * (high - low):
        low, high = float(values.min()), float(values.max())
    return low, high, False


def _count_beyond(experiment: Experiment, name: str) -> int:
    """Count the heads whose lines leave the frame, which is 5 % wider than the limits on each side."""
    limits = _limits(experiment, name)
    if limits is None or limits[2]:
        return 0
    low, high, _ = limits
    room = ROOM * (high - low)
    rows = [_numbers(found.values) for found in _trajectories(experiment, name)]
    return sum(bool(np.any((row < low - room) | (row > high + room))) for row in rows)


COLOURS = tuple(CATEGORIES[number] for number in (0, 2, 4, 5, 1, 6))  # lines that can be distinguished on white
MARKED = 12  # number of steps up to which each one gets a marker
LOG_RANGE = 100.0  # ratio of the largest to the least positive value from which the curves' axis is logarithmic
DEEPEST = 1e-16
"""Least value on a logarithmic axis relative to the largest; float64 does not resolve smaller ones."""
EXACT = 0.03  # half the width, in tolerances, of the line if only the published value is allowed
FARTHEST = 3.0  # tolerances from which a figure is drawn at the edge
MOST_ROWS = 80
"""Largest number of figures in one picture. Of more, the farthest off are drawn, and the picture says so."""
NAME = 44  # characters of a figure's name next to its row
BESIDE = 0.6  # inches for an axis' numbers and quantity
BELOW = " Not shown: 0 and what is under 1e−16 of the largest value."
"""Note under a logarithmic axis that does not show all values."""
LEGEND = 46  # characters of names that fit next to each other above a picture


def experiment_panels(report: Report) -> list[Panel]:
    """Build panels of every experiment's curves or trajectories, then one of our figures against published ones."""
    panels: list[Panel] = []
    for experiment in report.experiments:
        panels += trajectory_panels(experiment) if experiment.trajectories else _curve_panels(experiment)
    rows, total = compared(report)
    return [*panels, _compared_panel(rows, total)] if rows else panels


def compared(report: Report) -> tuple[list[tuple[Experiment, str]], int]:
    """Return the figures with a published counterpart (at most MOST_ROWS, the farthest off), and their total number."""
    figures = [(e, figure) for e in report.experiments for figure in e.final if e.meets(figure) is not None]
    worst = sorted(
        range(len(figures)),
        key=lambda number: (figures[number][0].meets(figures[number][1]), -abs(deviation(*figures[number]))),
    )
    return [figures[number] for number in sorted(worst[:MOST_ROWS])], len(figures)


def deviation(experiment: Experiment, figure: str) -> float:
    """Compute (ours − published) / tolerance, cut at ±3; without tolerance 0 or ±3, a missing value −3."""
    ours = experiment.final.get(figure)
    expected = (experiment.published or {}).get(figure, 0.0)
    slack = (experiment.tolerance or {}).get(figure, 0.0)
    if ours is None:
        return -FARTHEST
    if slack == 0:
        return float(np.clip(np.sign(ours - expected) * FARTHEST, -FARTHEST, FARTHEST))
    return float(np.clip((ours - expected) / slack, -FARTHEST, FARTHEST))


def groups(experiment: Experiment) -> dict[str, dict[str, Curve]]:
    """Group curves by picture title; those without one share the title '', or stand alone if of unknown quantity."""
    curves_of: dict[str, dict[str, Curve]] = {}
    for name, curve in experiment.curves.items():
        title = curve.picture or ("" if curve.quantity else worded(experiment, name))
        curves_of.setdefault(title, {})[name] = curve
    return curves_of


def draw_curves(axes: Axes, *, experiment: Experiment, curves: dict[str, Curve]) -> None:
    """Draw a line and a band of quartiles for each curve."""
    for colour, (name, curve) in zip(cycle(COLOURS), curves.items(), strict=False):
        steps, middle = np.asarray(curve.steps, dtype=float), _numbers(curve.median)
        order = np.argsort(steps, kind="stable")
        mark = "o" if len(steps) <= MARKED else ""
        if curve.low is not None and curve.high is not None:
            low, high = _numbers(curve.low), _numbers(curve.high)
            axes.fill_between(steps[order], low[order], high[order], color=colour, alpha=0.18, linewidth=0)
        axes.plot(
            steps[order],
            middle[order],
            "--" if curve.published else "-",
            color=MUTED if curve.published else colour,
            linewidth=1.4,
            marker=mark,
            markersize=3,
            clip_on=False,
            label=fitted(_curve_label(experiment, name), 40),
        )
    scale_steps(axes, [step for curve in curves.values() for step in curve.steps], clean(fitted(experiment.axis, 30)))
    _scale_values(axes, list(curves.values()))
    axes.set_ylabel(fitted(clean(next(iter(curves.values())).quantity or ""), 30), labelpad=2)
    axes.spines[["top", "right"]].set_visible(False)
    if all(value is None for curve in curves.values() for value in curve.median):
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no value", transform=axes.transAxes, ha="center", va="center", color=MUTED)
    if len(curves) > 1:
        legend_above(axes, _names_per_line(experiment, curves), handlelength=1.4)


def draw_compared(axes: Axes, *, rows: list[tuple[Experiment, str]]) -> None:
    """Draw one row per figure: its distance from the published value in tolerances, with the allowed range shaded."""
    for row, (experiment, figure) in enumerate(rows):
        bound = experiment.bounds.get(figure, "within")
        reach = 1.0 if (experiment.tolerance or {}).get(figure) else EXACT
        low = -FARTHEST * 1.1 if bound == "at most" else -reach
        high = FARTHEST * 1.1 if bound == "at least" else reach
        axes.fill_between([low, high], row - 0.38, row + 0.38, color="#e3edf6", linewidth=0, zorder=0)
        at, met = deviation(experiment, figure), experiment.meets(figure)
        missing = experiment.final.get(figure) is None
        mark = "x" if not met else ">" if at >= FARTHEST else "<" if at <= -FARTHEST else "o"
        axes.plot([at], [row], mark, color=CATEGORIES[0] if met else CATEGORIES[2], markersize=4.5)
        if not met:
            verdict = "no value" if missing else judgement(experiment, figure)
            side, align = (-6, "right") if at > 0 else (6, "left")
            axes.annotate(
                verdict, (at, row), (side, -2), textcoords="offset points", ha=align, fontsize=6.5, color=CATEGORIES[2]
            )
    axes.axvline(0, color=MUTED, linewidth=0.7, zorder=0)
    names = [fitted(f"{clean(experiment.name)}: {worded(experiment, figure)}", NAME) for experiment, figure in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=6.5, color=INK)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(-FARTHEST * 1.1, FARTHEST * 1.1)
    axes.xaxis.set_major_formatter(PlainNumbers())
    axes.set_xlabel("(ours − published) / tolerance", labelpad=1.5)
    axes.spines[["top", "right"]].set_visible(False)


def _curve_panels(experiment: Experiment) -> Iterator[Panel]:
    for group, curves in groups(experiment).items():
        picture = group if len(experiment.curves) > 1 else ""
        stem = f"{experiment.name}-{picture}" if picture else experiment.name
        title = clean(fitted(f"{experiment.name}: {picture}" if picture else experiment.name, 60))
        bands = any(curve.low is not None for curve in curves.values())
        note = "" if len(curves) > 1 else "median, quartiles" if bands else ""
        text = "Lines: median, bands: first to third quartile." if bands else ""
        floor = _least_shown(list(curves.values()))
        text += BELOW if floor is not None and _finite_values(list(curves.values())).min() < floor else ""
        facts = ", ".join(setting(experiment, name) for name, value in experiment.settings.items() if value is not None)
        caption = " ".join(part for part in (experiment.question, text.strip(), f"({facts})" if facts else "") if part)
        draw = partial(draw_curves, experiment=experiment, curves=curves)
        lines = -(-len(curves) // _names_per_line(experiment, curves)) if len(curves) > 1 else 1
        yield Panel(clean(stem).replace(" ", "-"), title, note, clean(caption), draw, left=BESIDE, legend=lines)


def _compared_panel(rows: list[tuple[Experiment, str]], total: int) -> Panel:
    caption = (
        "Each figure with a published counterpart: (ours − published) / tolerance. Shaded: what is allowed; a bound is "
        "open to one side, and a mere line allows nothing but the published value. At the edge: three tolerances or "
        "more."
    )
    longest = max(min(NAME, len(f"{e.name}: {worded(e, figure)}")) for e, figure in rows)
    draw = partial(draw_compared, rows=rows)
    note = "shaded: what is allowed" + (f"; {len(rows)} of {total}, farthest off" if len(rows) < total else "")
    left = max(1.4, 0.3 + 0.058 * longest)  # names this long put the panel in a row of its own on the overview
    return Panel("published", "ours against the published", note, caption, draw, len(rows), left)


def _curve_label(experiment: Experiment, name: str) -> str:
    """Return the label of a curve's line."""
    return clean(experiment.curves[name].label or worded(experiment, name))


def _names_per_line(experiment: Experiment, curves: dict[str, Curve]) -> int:
    """Return the number of names per line of the legend."""
    longest = max(min(40, len(_curve_label(experiment, name))) for name in curves)
    return max(1, min(len(curves), LEGEND // (longest + 5)))


def _scale_values(axes: Axes, curves: list[Curve]) -> None:
    """Scale the y axis: logarithmic if positive values span a factor of 100 and no curve is bounded by 1."""
    values = _finite_values(curves)
    if not values.size:
        return
    least, most = float(values.min()), float(values.max())
    floor = _least_shown(curves)
    if floor is None:
        scale_values(axes, min(0.0, least) if least < 0.5 * most else least, most, logarithmic=False)
        return
    scale_values(axes, floor, most, logarithmic=True)
    for line in axes.lines:
        heights = np.asarray(line.get_ydata(), dtype=float)
        line.set_ydata(np.where(heights > 0, heights, np.nan))  # a line to 0 would leave the frame
        line.set_clip_on(least < floor)


def _least_shown(curves: list[Curve]) -> float | None:
    """Return the least value shown on a logarithmic axis; None if the axis is linear."""
    values = _finite_values(curves)
    above = values[values > 0]
    if any(curve.bounded for curve in curves) or 2 * above.size <= values.size or np.any(values < 0):
        return None
    least, most = float(above.min()), float(above.max())
    return max(least, DEEPEST * most) if most >= LOG_RANGE * least else None


def _finite_values(curves: list[Curve]) -> np.ndarray:
    """Collect all finite values of all curves and their quartiles."""
    parts = [_numbers(part) for c in curves for part in (c.median, c.low, c.high) if part is not None]
    values = np.concatenate(parts)
    return np.asarray(values[np.isfinite(values)])


def _numbers(values: list[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], dtype=float)


WIDTH = 10.0
"""Width of the page in inches."""
LEFT, RIGHT = 0.2, 9.8  # left edge of the first column's numbers and right edge of the last panel, in inches
OVER, UNDER, NUMBERS, GAP = 0.5, 0.42, 0.42, 0.22
"""Inches above a panel for its title, below and left of it for its axes, and between two panels."""
ACROSS, TALL = 3, 1.9  # panels per row, and height of one in inches
MANY, FLAT = 4, 1.35  # panels per row and height if heads are followed
NAMED = 0.16  # inches for the quantity next to an axis' numbers
ROW_WIDE, BAR = 4.6, 0.45  # inches of a picture in its own row, and of the layers' colour bar
LETTERS = "abcdefghijklmnopqrstuvwxyz"
MOST = 12  # largest number of followed measures on one page
SHORTEST = 8  # least characters that identify an experiment's name
NOTE = 42  # characters that fit above a panel


def experiment_overview(report: Report) -> Figure:
    """Draw all panels on a page, three per row; four if heads are followed, with a colour bar of the layers."""
    panels = experiment_panels(report)
    followed = any(experiment.trajectories for experiment in report.experiments)
    shared = [panel for panel in panels if not _needs_row(panel)][: MOST if followed else None]
    across = max(1, min(MANY if followed else ACROSS, len(shared)))
    rows = [shared[start : start + across] for start in range(0, len(shared), across)]
    rows += [[panel] for panel in panels if _needs_row(panel)]
    # panels with long names are as tall as their number of rows needs
    talls = [max(0.5, 0.15 * row[0].rows) if _needs_row(row[0]) else FLAT if followed else TALL for row in rows]
    cell, beside = (RIGHT - BAR * followed - LEFT) / across, NUMBERS if followed else NUMBERS + NAMED
    blocks = [
        tall + OVER + UNDER + LINE * (max(panel.legend for panel in row) - 1)
        for row, tall in zip(rows, talls, strict=True)
    ]
    height = HEAD + sum(blocks) + FOOT
    figure = new_figure(WIDTH, height, dpi=300)
    model = report.model
    facts = [clean(model.architecture), f"{big(model.parameters)} parameters", outcome(report)[0]]
    steps = [len(curve.steps) for e in report.experiments if e.trajectories for curve in e.curves.values()]
    facts += [counted(max(steps), "checkpoint")] if steps else []
    made = f"{clean(report.tool.name)} {clean(report.tool.version)} · seed {report.settings.seed}"
    head(figure, title(report), facts, (ran_on(report), clean(report.settings.fed), made), left=LEFT, right=RIGHT)
    letters = cycle(LETTERS)
    for number, row in enumerate(rows):
        bottom = height - HEAD - sum(blocks[: number + 1]) + UNDER
        for column, panel in enumerate(row):
            left, wide = LEFT + column * cell + beside, cell - beside - GAP
            if _needs_row(panel):
                left, wide = LEFT + panel.left, ROW_WIDE
            axes = figure.add_axes((left / WIDTH, bottom / height, wide / WIDTH, talls[number] / height))
            name = _shorten_title(panel.title, int(wide * 14))
            picture_title(axes, f"{next(letters)}  {name}", fitted(panel.note, NOTE), panel.legend)
            last = number == 0 and panel is row[-1]
            panel.draw(axes, **({"bar": last} if panel.bar else {}))
    return figure


def _needs_row(panel: Panel) -> bool:
    """Check whether a panel needs a row of its own because its rows have long names."""
    return panel.left > 2 * (NUMBERS + NAMED)


def _shorten_title(title: str, width: int) -> str:
    """Cut a title that is too long, in the experiment's name before the colon if enough of that remains."""
    name, _, quantity = title.rpartition(": ")
    room = width - len(quantity) - 2
    short = len(title) > width and name and room >= SHORTEST
    return f"{fitted(name, room)}: {quantity}" if short else fitted(title, width)
