"""Pictures of experiments: their curves with quartiles, and ours against the published."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from attnlens.plots.captions import fitted
from attnlens.plots.experiments.steps import scale_steps, scale_values
from attnlens.plots.experiments.trajectories import trajectory_panels
from attnlens.plots.page import Panel
from attnlens.plots.style import CATEGORIES, INK, MUTED, PlainNumbers, legend_above
from attnlens.records import Curve, Experiment, Report
from attnlens.sentences.verdicts import judgement, setting, worded
from attnlens.wording import clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = tuple(CATEGORIES[number] for number in (0, 2, 4, 5, 1, 6))
"""Lines that can be told apart on white."""
MARKED = 12
"""Steps up to which each is marked."""
LOG_RANGE = 100.0
"""How many times their least value above 0 curves must reach for their axis to be logarithmic."""
DEEPEST = 1e-16
"""The part of the largest value below which a logarithmic axis shows nothing: float64 tells no smaller ones apart."""
EXACT = 0.03
"""Half the width, in tolerances, of the line where nothing but the published value is allowed."""
FARTHEST = 3.0
"""Tolerances beyond which a figure stands at the edge."""
MOST_ROWS = 80
"""Figures that one picture compares; of more, those that are farthest off, and the picture says so."""
NAME = 44
"""Characters of a figure's name beside its row."""
BESIDE = 0.6
"""Inches that an axis' numbers and quantity take."""
BELOW = " Not shown: 0 and what is under 1e−16 of the largest value."
"""What a reader of a logarithmic axis must know where it does not show all."""
LEGEND = 46
"""Characters of names that fit side by side above a picture."""


def experiment_panels(report: Report) -> list[Panel]:
    """Every experiment's curves, then ours against the published; of a series, its trajectories."""
    found: list[Panel] = []
    for experiment in report.experiments:
        found += trajectory_panels(experiment) if experiment.trajectories else _curve_panels(experiment)
    rows, every = compared(report)
    return [*found, _compared_panel(rows, every)] if rows else found


def compared(report: Report) -> tuple[list[tuple[Experiment, str]], int]:
    """The figures that have a published counterpart, of more than eighty those farthest off; how many there are."""
    every = [(e, figure) for e in report.experiments for figure in e.final if e.meets(figure) is not None]
    worst = sorted(
        range(len(every)), key=lambda number: (every[number][0].meets(every[number][1]), -_off(every[number]))
    )
    return [every[number] for number in sorted(worst[:MOST_ROWS])], len(every)


def deviation(experiment: Experiment, figure: str) -> float:
    """(ours − published) / tolerance, cut at ±3; exact figures stand at 0 or at an edge, missing ones at an edge."""
    ours = experiment.final.get(figure)
    expected = (experiment.published or {}).get(figure, 0.0)
    slack = (experiment.tolerance or {}).get(figure, 0.0)
    if ours is None:
        return -FARTHEST
    if slack == 0:
        return float(np.clip(np.sign(ours - expected) * FARTHEST, -FARTHEST, FARTHEST))
    return float(np.clip((ours - expected) / slack, -FARTHEST, FARTHEST))


def groups(experiment: Experiment) -> dict[str, dict[str, Curve]]:
    """Title → the curves that share those axes: of one picture, or without one; of unknown quantity, each its own."""
    found: dict[str, dict[str, Curve]] = {}
    for name, curve in experiment.curves.items():
        title = curve.picture or ("" if curve.quantity else worded(experiment, name))
        found.setdefault(title, {})[name] = curve
    return found


def draw_curves(axes: Axes, *, experiment: Experiment, curves: dict[str, Curve]) -> None:
    """A line and a band of quartiles for each curve."""
    for colour, (name, curve) in zip(_cycle(len(curves)), curves.items(), strict=True):
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
            label=fitted(_line(experiment, name), 40),
        )
    scale_steps(axes, [step for curve in curves.values() for step in curve.steps], clean(fitted(experiment.axis, 30)))
    _scale_values(axes, list(curves.values()))
    axes.set_ylabel(fitted(clean(next(iter(curves.values())).quantity or ""), 30), labelpad=2)
    axes.spines[["top", "right"]].set_visible(False)
    if all(value is None for curve in curves.values() for value in curve.median):
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no value", transform=axes.transAxes, ha="center", va="center", color=MUTED)
    if len(curves) > 1:
        legend_above(axes, _across(experiment, curves), handlelength=1.4)


def draw_compared(axes: Axes, *, rows: list[tuple[Experiment, str]]) -> None:
    """A row a figure: how many tolerances ours is from the published; what is allowed is shaded."""
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
            told = "no value" if missing else judgement(experiment, figure)
            side, align = (-6, "right") if at > 0 else (6, "left")
            axes.annotate(
                told,
                (at, row),
                (side, -2),
                textcoords="offset points",
                ha=align,
                fontsize=6.5,
                color=CATEGORIES[2],
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
        own = group if len(experiment.curves) > 1 else ""
        stem = f"{experiment.name}-{own}" if own else experiment.name
        title = clean(fitted(f"{experiment.name}: {own}" if own else experiment.name, 60))
        bands = any(curve.low is not None for curve in curves.values())
        note = "" if len(curves) > 1 else "median, quartiles" if bands else ""
        said = "Lines: median, bands: first to third quartile." if bands else ""
        said += BELOW if _some_below(list(curves.values())) else ""
        facts = ", ".join(setting(experiment, name) for name, value in experiment.settings.items() if value is not None)
        caption = " ".join(part for part in (experiment.question, said.strip(), f"({facts})" if facts else "") if part)
        draw = partial(draw_curves, experiment=experiment, curves=curves)
        lines = -(-len(curves) // _across(experiment, curves)) if len(curves) > 1 else 1
        yield Panel(_stem(stem), title, note, clean(caption), draw, left=BESIDE, legend=lines)


def _compared_panel(rows: list[tuple[Experiment, str]], every: int) -> Panel:
    caption = (
        "Each figure with a published counterpart: (ours − published) / tolerance. Shaded: what is allowed; a bound is "
        "open to one side, and a mere line allows nothing but the published value. At the edge: three tolerances or "
        "more."
    )
    longest = max(min(NAME, len(f"{e.name}: {worded(e, figure)}")) for e, figure in rows)
    draw = partial(draw_compared, rows=rows)
    note = "shaded: what is allowed" + (f"; {len(rows)} of {every}, farthest off" if len(rows) < every else "")
    left = max(1.4, 0.3 + 0.058 * longest)  # the overview gives a row to what has names this long
    return Panel("published", "ours against the published", note, caption, draw, len(rows), left)


def _stem(name: str) -> str:
    return clean(name).replace(" ", "-")


def _off(row: tuple[Experiment, str]) -> float:
    return abs(deviation(*row))


def _line(experiment: Experiment, name: str) -> str:
    """How a curve is written beside its line."""
    return clean(experiment.curves[name].label or worded(experiment, name))


def _across(experiment: Experiment, curves: dict[str, Curve]) -> int:
    """How many names stand side by side."""
    longest = max(min(40, len(_line(experiment, name))) for name in curves)
    return max(1, min(len(curves), LEGEND // (longest + 5)))


def _cycle(count: int) -> list[str]:
    return [COLOURS[number % len(COLOURS)] for number in range(count)]


def _scale_values(axes: Axes, curves: list[Curve]) -> None:
    """Logarithmic where what is above 0 spans a factor of 100, unless the quantity ends at 1 by its nature."""
    values = _every(curves)
    if not values.size:
        return
    least, most = float(values.min()), float(values.max())
    floor = _floor(curves)
    if floor is None:
        scale_values(axes, min(0.0, least) if least < 0.5 * most else least, most, logarithmic=False)
        return
    scale_values(axes, floor, most, logarithmic=True)
    for line in axes.lines:
        heights = np.asarray(line.get_ydata(), dtype=float)
        line.set_ydata(np.where(heights > 0, heights, np.nan))  # a line to 0 would fall through the frame
        line.set_clip_on(least < floor)


def _some_below(curves: list[Curve]) -> bool:
    floor = _floor(curves)
    return floor is not None and bool(_every(curves).min() < floor)


def _floor(curves: list[Curve]) -> float | None:
    """The least value that a logarithmic axis shows; None where the axis is linear."""
    values = _every(curves)
    above = values[values > 0]
    if any(curve.bounded for curve in curves) or 2 * above.size <= values.size or np.any(values < 0):
        return None
    least, most = float(above.min()), float(above.max())
    return max(least, DEEPEST * most) if most >= LOG_RANGE * least else None


def _every(curves: list[Curve]) -> np.ndarray:
    """All finite values of all curves and their quartiles."""
    parts = [_numbers(part) for c in curves for part in (c.median, c.low, c.high) if part is not None]
    every = np.concatenate(parts)
    return np.asarray(every[np.isfinite(every)])


def _numbers(values: list[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], dtype=float)
