"""The harm of each head against measures of it: one picture a measure, a dot a head in its layer's colour."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.ticker import MaxNLocator

from attnlens.plots.captions import fitted, typeset
from attnlens.plots.style import INK, MUTED, PlainNumbers, figure_of
from attnlens.sentences.swaps.controls import EFFECTS
from attnlens.wording import clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from attnlens.records import Predictor, Swap

ASKED = ("tokens.share_positive", "tokens.share_skew", "tokens.share_key", "ksvd.rank90", "tokens.entropy")
"""The measures that are drawn where the model has them."""
PICTURES, ACROSS = 6, 3
"""How many are drawn; the strongest others take the places that are left."""
LAYERS = "viridis"
SQUASHED = 30.0
"""How many times as large as the middle effect the largest must be for the axis of effects to be drawn as asinh."""


def drawn_predictors(swap: Swap) -> list[Predictor]:
    """Those asked for, then the strongest others."""
    by_name = {one.measure: one for one in swap.predictors}
    first = [by_name[name] for name in ASKED if name in by_name]
    others = sorted((one for one in swap.predictors if one not in first), key=lambda one: -abs(one.rho))
    return [*first, *others][:PICTURES]


def missing(swap: Swap) -> str:
    """Why measures asked for are not drawn; nothing where all are."""
    left = {} if swap.prediction is None else swap.prediction.left_out
    why = [f"{name}: {clean(left[name])}" for name in ASKED if name in left]
    return f" Not drawn: {'; '.join(why)}." if why else ""


def strongest(swap: Swap) -> Predictor:
    """The measure of largest |ρ| among those that hold, or among all."""
    holding = [one for one in swap.predictors if one.holds]
    return max(holding or swap.predictors, key=lambda one: abs(one.rho))


def draw_strongest(axes: Axes, swap: Swap) -> None:
    """The harm against the measure that goes with it most."""
    _scatter(axes, swap, strongest(swap), size=13)
    axes.set_xlabel(clean(strongest(swap).measure), labelpad=1.5, color=INK)
    axes.set_ylabel(f"Δ of the {EFFECTS[swap.judged_by]}", color=INK)
    _layer_bar(axes, swap)


def draw_predictors(axes: Axes, swap: Swap) -> None:
    """A picture for each measure, in rows."""
    axes.set_axis_off()
    figure, box = figure_of(axes), axes.get_position()
    found = drawn_predictors(swap)
    rows = -(-len(found) // ACROSS)
    tall, wide = box.height / rows, box.width / ACROSS
    for number, one in enumerate(found):
        row, column = divmod(number, ACROSS)
        bottom = box.y1 - (row + 1) * tall
        inner = figure.add_axes((box.x0 + column * wide + 0.12 * wide, bottom + 0.2 * tall, 0.8 * wide, 0.6 * tall))
        _scatter(inner, swap, one, size=9)
        inner.set_title(fitted(clean(one.measure), 34), fontsize=7.5, pad=13, color=INK, weight="bold")
        inner.annotate(_said(one), (0, 1), (0, 4), xycoords="axes fraction", textcoords="offset points", fontsize=6.5)
        if column == 0:
            inner.set_ylabel(f"Δ of the {EFFECTS[swap.judged_by]}", color=INK, fontsize=7)
        inner.tick_params(labelsize=6.5)
    _layer_bar(axes, swap)


def _said(one: Predictor) -> str:
    """`ρ 0.87 [0.71, 0.93] over heads, holds`."""
    low, high = (typeset(end, 2) for end in one.heads_ci95 or (float("nan"),) * 2)
    ends = "" if one.heads_ci95 is None else f" [{low}, {high}]"
    verdict = "holds" if one.holds else "does not hold"
    return f"ρ {typeset(one.rho, 2)}{ends} over heads; {verdict}"


def _scatter(axes: Axes, swap: Swap, one: Predictor, size: float) -> None:
    """A dot a head; heads without the measure, or that diverged, are not there."""
    nothing = float("nan")
    x = np.array([nothing if value is None else value for value in one.values])
    y = np.array([nothing if effect.delta is None else effect.delta for effect in swap.sweep])
    layers = np.array([effect.layer for effect in swap.sweep])
    usual = float(np.nanmedian(np.abs(y))) if np.isfinite(y).any() else 0.0
    if usual > 0 and float(np.nanmax(np.abs(y))) > SQUASHED * usual:
        axes.set_yscale("asinh", linear_width=2 * usual)
    axes.axhline(0, color=MUTED, linewidth=0.6, zorder=0)
    axes.scatter(x, y, c=layers, cmap=LAYERS, norm=_norm(swap), s=size, linewidth=0.3, edgecolor="white")
    axes.margins(0.06)
    axes.xaxis.set_major_formatter(PlainNumbers())
    axes.yaxis.set_major_formatter(PlainNumbers())
    axes.locator_params(axis="x", nbins=5)
    axes.spines[["top", "right"]].set_visible(False)


def _norm(swap: Swap) -> Normalize:
    layers = [effect.layer for effect in swap.sweep]
    return Normalize(min(layers), max(max(layers), min(layers) + 1))


def _layer_bar(axes: Axes, swap: Swap) -> None:
    """The colours of layers, beside the axes."""
    figure, box = figure_of(axes), axes.get_position()
    width = float(figure.get_size_inches()[0])
    beside = figure.add_axes((box.x1 + 0.12 / width, box.y0, 0.09 / width, box.height))
    bar = figure.colorbar(ScalarMappable(_norm(swap), colormaps[LAYERS]), cax=beside, ticks=MaxNLocator(integer=True))
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=6)
    bar.ax.set_title("layer", fontsize=6.5, pad=3)
