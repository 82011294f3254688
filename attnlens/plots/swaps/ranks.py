"""Map of the rank that each head gets within a budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import Normalize

from attnlens.plots.heatmap import heat_map
from attnlens.plots.style import size_in_points
from attnlens.records import PARTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from attnlens.records import Plan

LEGIBLE = 11.0
"""Points that a cell needs on both sides for its number to be read."""


def draw_ranks(axes: Axes, plan: Plan, *, named: bool = True) -> None:
    """Every query head's rank in colour, from 0 to head_dim; as a number too, where there is room."""
    parts = {key.layer: key.part for key in plan.ranks}
    layers = sorted(parts, key=lambda layer: (PARTS.index(parts[layer]), layer))
    heads = sorted({head for key in plan.ranks for head in key.heads})
    values = np.full((len(layers), len(heads)), np.nan)
    for key in plan.ranks:
        for head in key.heads:
            values[layers.index(key.layer), heads.index(head)] = key.rank / key.keys
    top = max(key.head_dim / key.keys for key in plan.ranks)
    colours = (colormaps["viridis"], Normalize(0, top), "neither")
    bar = heat_map(axes, values, layers, heads, [parts[layer] for layer in layers], colours, named=named)
    bar.set_label("rank r of head_dim", fontsize=6.5, labelpad=2)
    bar.set_ticks([tick for tick in bar.get_ticks() if tick <= top])  # none beyond the scale
    wide, high = size_in_points(axes)
    if min(wide / len(heads), high / len(layers)) >= LEGIBLE:
        for row, column in np.argwhere(~np.isnan(values)):
            ink = "black" if values[row, column] > 0.6 * top else "white"
            axes.text(column, row, f"{values[row, column]:.0f}", ha="center", va="center", fontsize=6, color=ink)
