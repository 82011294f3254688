"""A map of layers × heads with its colour bar; layer 0 at the top, cells without a value hatched."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.patches import Rectangle

from attnlens.plots.style import MISSING, MUTED, PlainNumbers, figure_of, label_layers, size_in_points, tick_positions

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from matplotlib.axes import Axes
    from matplotlib.colorbar import Colorbar
    from matplotlib.colors import Colormap, Normalize


def heat_map(
    axes: Axes,
    values: Float[np.ndarray, "layers heads"],
    layers: Sequence[int],
    heads: Sequence[int],
    parts: Sequence[str],
    colours: tuple[Colormap, Normalize, str],
    *,
    named: bool,
) -> Colorbar:
    """Draw the map; its colour bar. `colours`: the map, its norm, which ends of it are cut."""
    colour_map, norm, extend = colours
    masked = np.ma.masked_invalid(values)
    image = axes.imshow(masked, cmap=colour_map, norm=norm, aspect="auto", interpolation="nearest", zorder=1)
    hatch(axes, np.ma.getmaskarray(masked), "/////")
    wide, _ = size_in_points(axes)
    columns = tick_positions(len(heads), max(2, int(wide / 16)))
    axes.set_xticks(columns, [str(heads[column]) for column in columns])
    axes.set_xlabel("head", labelpad=1.5)
    label_layers(axes, layers, parts, named=named)
    place = axes.inset_axes((1 + 7 / wide, 0, 7 / wide, 1))
    bar = figure_of(axes).colorbar(image, cax=place, extend=extend)
    bar.outline.set_linewidth(0.4)
    place.tick_params(labelsize=6.5, length=2, pad=1.5)
    bar.formatter = PlainNumbers()
    return bar


def hatch(axes: Axes, cells: Bool[np.ndarray, "layers heads"], pattern: str) -> None:
    """Hatch these cells; neighbours in a row share a rectangle, so that 5,000 heads stay a small file."""
    for row, hatched in enumerate(cells):
        start = 0
        for found, run in groupby(hatched):
            length = len(list(run))
            if found:
                corner = (start - 0.5, row - 0.5)
                patch = Rectangle(corner, length, 1, facecolor=MISSING, edgecolor=MUTED, hatch=pattern, linewidth=0)
                patch.set_zorder(0.9)
                axes.add_patch(patch)
            start += length
