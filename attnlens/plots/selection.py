"""Margins of a head's selections, beside those of its null and the best least margin."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from attnlens.choices import WHERE_POSED
from attnlens.plots.captions import fitted, model_line, settings_line, wrapped
from attnlens.plots.style import CATEGORIES, INK, MUTED, legend_above, new_figure
from attnlens.shapes import Shapes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from attnlens.records import Report, Selection

WIDTH, HEIGHT = 6.2, 4.7
CAPTION = (
    "Least margin of each posed query, (logit_α − logit_t)/‖ΠM‖ over the best least margin 1/‖W_mm‖, ascending; "
    "a single query may exceed 1. "
    "Null: the head turned by random rotations on both sides, with its own selection and its own best. "
    "Posed {where}."
)


def margins_figure(report: Report, found: Selection) -> Figure:
    """The sorted margins of one head (blue), of its null heads (grey), and the best least margin (dashed)."""
    figure = new_figure(WIDTH, HEIGHT)
    axes = figure.add_axes((0.1, 0.28, 0.86, 0.59))
    draw_margins(axes, found)
    shapes = Shapes(report)
    title = f"layer {found.layer} head {found.head}: margins of its selection"
    figure.text(0.1, 0.955, title, fontsize=11, weight="bold", va="center", color=INK)
    lines = [CAPTION.format(where=WHERE_POSED[found.space]), fitted(model_line(shapes), 200), settings_line(shapes)]
    caption = wrapped(lines, int(WIDTH * 17))
    figure.text(0.1, 0.175, caption, fontsize=6.8, va="top", color=MUTED, linespacing=1.35)
    return figure


def draw_margins(axes: Axes, found: Selection) -> None:
    """Lines over the share of queries with at most that margin."""
    for number, margins in enumerate(found.null_margins):
        axes.plot(*_sorted(margins), color="#aaaaaa", linewidth=0.8, label="_" * bool(number) + "null heads")
    own = [pick.margin for pick in found.picks]
    axes.plot(*_sorted(own), color=CATEGORIES[0], linewidth=1.8, label="the head")
    axes.axhline(1, color=INK, linewidth=0.8, linestyle="--", label="best least margin, 1/‖W_mm‖")
    every = [margin for line in [own, *found.null_margins] for margin in line]
    if min(every) > 0 and max(every) > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of the posed queries with no larger margin")
    axes.set_ylabel("margin over the best least margin")
    axes.grid(visible=True, color="#eeeeee", linewidth=0.5)
    legend_above(axes, 3, handlelength=1.6)


def _sorted(margins: list[float]) -> tuple[np.ndarray, np.ndarray]:
    values = np.sort(np.asarray(margins, dtype=float))
    return np.arange(1, len(values) + 1) / len(values), values
