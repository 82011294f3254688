"""What does a whole consist of, layer by layer? Stacked bars of measures that sum to 1."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.patches import Rectangle

from attnlens.plots.style import CATEGORIES, MISSING, MUTED, label_layers, legend_above
from attnlens.shapes import Shapes
from attnlens.wording import title_of

if TYPE_CHECKING:
    from jaxtyping import Float
    from matplotlib.axes import Axes


CROWDED = 24
"""Layers beyond which the bars touch: the gaps between thinner ones would be all that one sees."""


def draw_shares(axes: Axes, shapes: Shapes, whole: str, *, named: bool = True) -> None:
    """A bar a layer, its parts the means over the layer's heads; layers without a value are hatched."""
    names = shapes.shares[whole]
    shared = os.path.commonprefix([title_of(name) for name in names])  # noqa: RUF071  # titles, not paths
    means = layer_means(shapes, names)
    rows = np.arange(len(shapes.layers))
    height, crisp = (1.0, False) if len(rows) > CROWDED else (0.86, True)
    left = np.zeros(len(rows))
    for number, (name, mean) in enumerate(zip(names, means, strict=True)):
        colour = CATEGORIES[number % len(CATEGORIES)]
        label = title_of(name)[shared.rfind(" ") + 1 :]
        width = np.nan_to_num(mean)
        axes.barh(rows, width, left=left, height=height, color=colour, label=label, linewidth=0, antialiased=crisp)
        left += width
    for row in rows[np.isnan(means[0])]:
        axes.add_patch(
            Rectangle((0, row - 0.43), 1, 0.86, facecolor=MISSING, edgecolor=MUTED, hatch="/////", linewidth=0)
        )
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 0.5, 1], ["0", "½", "1"])
    axes.set_xlabel("share, mean over heads", labelpad=1.5)
    axes.spines[["top", "right"]].set_visible(False)
    label_layers(axes, shapes.layers, shapes.parts, named=named)
    legend_above(axes, min(4, len(names)))


def layer_means(shapes: Shapes, names: list[str]) -> list[Float[np.ndarray, " layers"]]:
    """Mean over the heads of each layer that have every part; the parts' means sum to 1 as each head's parts do."""
    stack = np.stack([shapes.readings[name].values for name in names])
    whole = ~np.isnan(stack.sum(axis=0))
    count = whole.sum(axis=1)
    totals = np.where(whole, stack, 0.0).sum(axis=2)
    return list(np.where(count > 0, totals / np.maximum(count, 1), np.nan))
