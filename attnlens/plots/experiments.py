"""Which pictures do experiments make? Curves with quartiles, ours against the published, the heads' trajectories."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from attnlens.plots.captions import fitted
from attnlens.plots.steps import scale_steps, scale_values
from attnlens.plots.style import CATEGORIES, INK, MUTED, PlainNumbers, legend_above
from attnlens.plots.swaps.panels import Panel
from attnlens.plots.trajectories import trajectory_panels
from attnlens.records import Curve, Experiment, Report
from attnlens.tables.experiments import judgement, worded
from attnlens.wording import clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SEPARATOR = re.compile(": |, (?=from )")
"""What stands between a quantity and the line's own name, as in `norm: from zero` and `norm, from zero`."""
COLOURS = tuple(CATEGORIES[number] for number in (0, 2, 4, 5, 1, 6))
"""Lines that can be told apart on white."""
MARKED = 12
"""Steps up to which each is marked."""
LOG_RANGE = 50.0
"""How many times their least value curves must reach for their axis to be logarithmic."""
FARTHEST = 3.0
"""Tolerances beyond which a figure stands at the edge."""
MOST_ROWS = 30
"""Figures that one picture compares; of more, those that are farthest off."""
NAME = 40
"""Characters of a figure's name beside its row."""
LEGEND = 46
"""Characters of names that fit side by side above a picture."""


def experiment_panels(report: Report) -> list[Panel]:
    """Every experiment's curves, then ours against the published; of a series, its trajectories."""
    found: list[Panel] = []
    for experiment in report.experiments:
        found += trajectory_panels(experiment) if experiment.trajectories else _curve_panels(experiment)
    rows = compared(report)
    return [*found, _compared_panel(rows)] if rows else found


def compared(report: Report) -> list[tuple[Experiment, str]]:
    """The figures that have a published counterpart; of more than thirty, those that are farthest off."""
    every = [(e, figure) for e in report.experiments for figure in e.final if e.meets(figure) is not None]
    if len(every) > MOST_ROWS:
        worst = sorted(every, key=lambda row: -abs(deviation(*row)))[:MOST_ROWS]
        every = [row for row in every if row in worst]
    return every


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
    """Which curves share axes: those with one name before a colon or `, from`; of the others, those within [−1, 1]."""
    found: dict[str, dict[str, Curve]] = {}
    plain: dict[bool, dict[str, Curve]] = {True: {}, False: {}}
    for name, curve in experiment.curves.items():
        quantity, *line = SEPARATOR.split(name, maxsplit=1)
        if line:
            found.setdefault(quantity, {})[line[0]] = curve
        else:
            plain[_unit(curve)][name] = curve
    for curves in filter(None, plain.values()):
        name = next(iter(curves)) if len(curves) == 1 or "" in found else ""
        found[name] = curves
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
        style = "--" if "published" in name else "-"
        label = fitted(clean(name), 40)
        axes.plot(
            steps[order],
            middle[order],
            style,
            color=MUTED if style == "--" else colour,
            linewidth=1.4,
            marker=mark,
            markersize=3,
            clip_on=False,
            label=label,
        )
    scale_steps(axes, [step for curve in curves.values() for step in curve.steps], clean(fitted(experiment.axis, 30)))
    _scale_values(axes, list(curves.values()))
    axes.spines[["top", "right"]].set_visible(False)
    if len(curves) > 1:
        legend_above(axes, _across(curves), handlelength=1.4)


def draw_compared(axes: Axes, *, rows: list[tuple[Experiment, str]]) -> None:
    """A row a figure: how many tolerances ours is from the published; what is allowed is shaded."""
    for row, (experiment, figure) in enumerate(rows):
        bound = experiment.bounds.get(figure, "within")
        low = -FARTHEST * 1.1 if bound == "at most" else -1.0
        high = FARTHEST * 1.1 if bound == "at least" else 1.0
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
    names = [fitted(f"{clean(experiment.name)}: {worded(figure)}", NAME) for experiment, figure in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=6.5, color=INK)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(-FARTHEST * 1.1, FARTHEST * 1.1)
    axes.xaxis.set_major_formatter(PlainNumbers())
    axes.set_xlabel("(ours − published) / tolerance", labelpad=1.5)
    axes.spines[["top", "right"]].set_visible(False)


def _curve_panels(experiment: Experiment) -> Iterator[Panel]:
    for group, curves in groups(experiment).items():
        quantity = group if len(experiment.curves) > 1 else ""
        stem = f"{experiment.name}-{quantity}" if quantity else experiment.name
        title = clean(fitted(f"{experiment.name}: {quantity}" if quantity else experiment.name, 60))
        bands = any(curve.low is not None for curve in curves.values())
        note = "" if len(curves) > 1 else "median, quartiles" if bands else ""
        said = "Lines: median, bands: first to third quartile." if bands else ""
        facts = ", ".join(f"{name} {value}" for name, value in experiment.settings.items() if value is not None)
        caption = " ".join(part for part in (experiment.question, said, f"({facts})" if facts else "") if part)
        draw = partial(draw_curves, experiment=experiment, curves=curves)
        lines = -(-len(curves) // _across(curves)) if len(curves) > 1 else 1
        yield Panel(_stem(stem), title, note, clean(caption), draw, legend=lines)


def _compared_panel(rows: list[tuple[Experiment, str]]) -> Panel:
    caption = (
        "Each figure with a published counterpart: (ours − published) / tolerance. Shaded: what is allowed; a bound is "
        "open to one side. At the edge: three tolerances or more."
    )
    longest = max(min(NAME, len(f"{e.name}: {figure}")) for e, figure in rows)
    draw = partial(draw_compared, rows=rows)
    note = "shaded: what is allowed"
    return Panel("published", "ours against the published", note, caption, draw, len(rows), 0.3 + 0.058 * longest)


def _stem(name: str) -> str:
    return clean(name).replace(" ", "-")


def _unit(curve: Curve) -> bool:
    values = _numbers(curve.median)
    return bool(np.all(np.abs(values[np.isfinite(values)]) <= 1 + 1e-9))


def _across(curves: dict[str, Curve]) -> int:
    """How many names stand side by side."""
    longest = max(min(40, len(name)) for name in curves)
    return max(1, min(len(curves), LEGEND // (longest + 5)))


def _cycle(count: int) -> list[str]:
    return [COLOURS[number % len(COLOURS)] for number in range(count)]


def _scale_values(axes: Axes, curves: list[Curve]) -> None:
    """Logarithmic where all is above 0 and spans a factor of 50."""
    every = np.concatenate([_numbers(part) for c in curves for part in (c.median, c.low, c.high) if part is not None])
    values = every[np.isfinite(every)]
    if not values.size:
        return
    least, most = float(values.min()), float(values.max())
    if least > 0 and most >= LOG_RANGE * least:
        scale_values(axes, least, most, logarithmic=True)
    else:
        scale_values(axes, min(0.0, least) if least < 0.5 * most else least, most, logarithmic=False)


def _numbers(values: list[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], dtype=float)
