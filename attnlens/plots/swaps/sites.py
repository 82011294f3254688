"""Change of the attention's output at each site, as bars or a line for each kernel."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from attnlens.plots.captions import fitted
from attnlens.plots.style import CATEGORIES, MISSING, MUTED, PlainNumbers, label_layers, legend_above
from attnlens.records import PARTS
from attnlens.wording import clean

if TYPE_CHECKING:
    from jaxtyping import Float
    from matplotlib.axes import Axes

    from attnlens.records import Swap

OF_PART = dict.fromkeys(PARTS, CATEGORIES[0]) | {"cross": CATEGORIES[6]}
"""Self-attention in one colour, cross-attention in another; the parts' names stand beside the layers."""
LINES = (CATEGORIES[0], CATEGORIES[2], CATEGORIES[4], CATEGORIES[5], CATEGORIES[6], CATEGORIES[1], "#222222", "#999999")
MARKERS = "osD^vPX*"
"""Kernels differ in mark as well as in colour."""
CROWDED = 24
"""Layers beyond which bars touch."""
WIDE = 66
"""Characters of all names in a line of the legend."""
PARAMETERS = re.compile(r":(?:[^+]|(?<=\d[eE])\+)*")
"""The numbers of a kernel or filter; the plus of 1e+06 ends none."""
NAME = 22
"""Characters of a kernel's name in a legend."""


def draw_sites(axes: Axes, swap: Swap, *, named: bool = True) -> None:
    """‖new − own‖ / ‖own‖ of every site's output, layer 0 at the top; sites without a value are hatched."""
    sites = sorted(swap.sites, key=lambda site: (PARTS.index(site.part), site.layer))
    errors = np.array([np.nan if site.output_error is None else site.output_error for site in sites])
    rows = np.arange(len(errors))
    colours = [OF_PART[site.part] for site in sites]
    height = 1.0 if len(rows) > CROWDED else 0.78
    axes.barh(rows, np.nan_to_num(errors), height=height, color=colours, linewidth=0, antialiased=len(rows) <= CROWDED)
    reach = max(float(np.nanmax(errors, initial=0.0)), 1e-9)
    for row in rows[np.isnan(errors)]:
        place = ((0, row - 0.4), reach, 0.8)
        axes.add_patch(Rectangle(*place, facecolor=MISSING, edgecolor=MUTED, hatch="/////", linewidth=0))
    axes.set_xlim(0, 1.06 * reach)
    axes.xaxis.set_major_formatter(PlainNumbers())
    axes.set_xlabel("‖new − own‖ / ‖own‖ of the output", labelpad=1.5)
    axes.spines[["top", "right"]].set_visible(False)
    label_layers(axes, [site.layer for site in sites], [site.part for site in sites], named=named)


def draw_lines(axes: Axes, lines: Sequence[tuple[str, Float[np.ndarray, " layers"]]], label: str) -> None:
    """A line a kernel over the layers; gaps where there is no value."""
    labels = short_names([name for name, _ in lines])
    for number, (_, values) in enumerate(lines):
        colour, mark = LINES[number % len(LINES)], MARKERS[number % len(MARKERS)]
        axes.plot(values, color=colour, marker=mark, markersize=3, linewidth=1, label=labels[number])
    axes.set_xlabel("layer", labelpad=1.5)
    axes.set_ylabel(label, labelpad=2)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.yaxis.set_major_formatter(PlainNumbers())
    axes.spines[["top", "right"]].set_visible(False)
    legend_above(axes, _across(labels), handlelength=1.6)


def legend_lines(names: Sequence[str]) -> int:
    """How many lines the legend of these kernels takes."""
    return -(-len(names) // _across(short_names(names)))


def _across(labels: Sequence[str]) -> int:
    """Names in a line of the legend."""
    return max(1, min(4, WIDE // max(map(len, labels))))


def short_names(names: Sequence[str]) -> list[str]:
    """Without their numbers, where that leaves them different; cut to what a legend can hold."""
    bare = [clean(PARAMETERS.sub("", name)) for name in names]
    chosen = bare if len(set(bare)) == len(bare) else map(clean, names)
    return [fitted(name, NAME) for name in chosen]
