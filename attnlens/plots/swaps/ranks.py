"""Map of the rank that each head gets within a budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib import colormaps
from matplotlib.patches import Rectangle

from attnlens.plots.style import (
    MISSING,
    MUTED,
    PlainNumbers,
    figure_of,
    label_layers,
    size_in_points,
    tick_positions,
)
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
            values[layers.index(key.layer), heads.index(head)] = key.rank
    top = max(key.head_dim for key in plan.ranks)
    colours = colormaps["viridis"]
    image = axes.imshow(np.ma.masked_invalid(values), cmap=colours, vmin=0, vmax=top, aspect="auto", zorder=1)
    for row, column in np.argwhere(np.isnan(values)):
        corner = (column - 0.5, row - 0.5)
        axes.add_patch(Rectangle(corner, 1, 1, facecolor=MISSING, edgecolor=MUTED, hatch="/////", linewidth=0))
    wide, high = size_in_points(axes)
    if min(wide / len(heads), high / len(layers)) >= LEGIBLE:
        for row, column in np.argwhere(~np.isnan(values)):
            ink = "black" if values[row, column] > 0.6 * top else "white"
            axes.text(column, row, f"{values[row, column]:.0f}", ha="center", va="center", fontsize=6, color=ink)
    ticks = tick_positions(len(heads), max(2, int(wide / 16)))
    axes.set_xticks(ticks, [str(heads[column]) for column in ticks])
    axes.set_xlabel("head", labelpad=1.5)
    label_layers(axes, layers, [parts[layer] for layer in layers], named=named)
    place = axes.inset_axes((1 + 7 / wide, 0, 7 / wide, 1))
    bar = figure_of(axes).colorbar(image, cax=place)
    bar.outline.set_linewidth(0.4)
    bar.set_label("rank r of head_dim", fontsize=6.5, labelpad=2)
    place.tick_params(labelsize=6.5, length=2, pad=1.5)
    bar.formatter = PlainNumbers()
    bar.update_ticks()
