"""Stacked lines of measures that sum to 1, head by head."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.patches import Rectangle

from attnlens.plots.style import CATEGORIES, MISSING, MUTED, PART_COLOURS, label_layers, legend_above
from attnlens.shapes import Shapes
from attnlens.wording import title_of

if TYPE_CHECKING:
    from jaxtyping import Float
    from matplotlib.axes import Axes


CROWDED = 24
"""Layers beyond which they touch: the gaps between thinner ones would be all that one sees."""


def draw_shares(axes: Axes, shapes: Shapes, whole: str, *, named: bool = True) -> None:
    """A line a head, of its parts, which sum to 1; a layer's heads by their first part. Without a value: hatched."""
    names = shapes.shares[whole]
    height = 1.0 if len(shapes.layers) > CROWDED else 0.86
    ends, parts, empty = _stacked(shapes, names, height)
    left = np.zeros(len(ends))
    for (label, colour), part in zip(named_parts(names), parts, strict=True):
        axes.fill_betweenx(ends, left, left + part, step="post", color=colour, label=label, linewidth=0)
        left = left + part
    for row in empty:
        place = ((0, row - height / 2), 1, height)
        axes.add_patch(Rectangle(*place, facecolor=MISSING, edgecolor=MUTED, hatch="/////", linewidth=0))
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 0.5, 1], ["0", "½", "1"])
    axes.set_xlabel("share; a line a head", labelpad=1.5)
    axes.spines[["top", "right"]].set_visible(False)
    label_layers(axes, shapes.layers, shapes.parts, named=named)
    legend_above(axes, min(4, len(names)))


def named_parts(names: Sequence[str]) -> list[tuple[str, str]]:
    """What each part of a whole is called, without the words that all begin with, and its colour."""
    shared = os.path.commonprefix([title_of(name) for name in names])  # noqa: RUF071  # titles, not paths
    labels = [title_of(name)[shared.rfind(" ") + 1 :] for name in names]
    return [(label, PART_COLOURS.get(label, CATEGORIES[n % len(CATEGORIES)])) for n, label in enumerate(labels)]


def _stacked(
    shapes: Shapes, names: list[str], height: float
) -> tuple[Float[np.ndarray, " ends"], Float[np.ndarray, "parts ends"], list[int]]:
    """Where down the side each head's line begins, what its parts are, and which layers have no head with all parts.

    After a layer's last line stands its lower end, and then NaN, which separates it from the next layer.
    """
    stack = np.stack([shapes.readings[name].values for name in names])
    ends: list[float] = []
    parts: list[Float[np.ndarray, " parts"]] = []
    empty = []
    for row in range(stack.shape[1]):
        heads = stack[:, row, ~np.isnan(stack[:, row].sum(axis=0))]
        heads = heads[:, np.argsort(-heads[0], kind="stable")]
        if not heads.shape[1]:
            empty.append(row)
            continue
        ends += [*np.linspace(row - height / 2, row + height / 2, heads.shape[1] + 1), np.nan]
        parts += [*heads.T, heads[:, -1], np.full(len(names), np.nan)]
    return np.array(ends), np.array(parts).T, empty


def has_all(shapes: Shapes, names: list[str]) -> bool:
    """Whether every layer has a head with all of these parts."""
    return not _stacked(shapes, names, 1.0)[2]
