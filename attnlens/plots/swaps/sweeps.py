"""Effects of a sweep: a diverging map of heads, or a dot for each layer with its interval."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import CenteredNorm, Normalize

from attnlens.plots.captions import typeset
from attnlens.plots.heatmap import hatch, heat_map
from attnlens.plots.style import (
    CATEGORIES,
    INK,
    MUTED,
    PlainNumbers,
    label_layers,
    size_in_points,
)
from attnlens.records import PARTS
from attnlens.sentences.swaps.controls import EFFECTS
from attnlens.wording import decimals_for

if TYPE_CHECKING:
    from jaxtyping import Float
    from matplotlib.axes import Axes

    from attnlens.records import Effect, Swap

OUTLYING = 3.0
"""How many times as large as the 98th percentile a head's effect must be for it to be drawn in the last colour."""


def of_heads(swap: Swap) -> bool:
    """Whether single heads were swapped, and not whole layers."""
    return any(effect.head is not None for effect in swap.sweep)


def draw_sweep(axes: Axes, swap: Swap, *, named: bool = True) -> None:
    """Heads as a map, layers as dots; layer 0 at the top either way."""
    if of_heads(swap):
        _draw_map(axes, swap.sweep, named=named)
    else:
        _draw_layers(axes, swap, named=named)


def limit(values: Float[np.ndarray, "*cells"]) -> tuple[float, str]:
    """Where the colours end on both sides of 0, and which ends are cut, since one head must not bleach the others."""
    present = values[np.isfinite(values)]
    most = float(np.abs(present).max(initial=0.0))
    usual = float(np.percentile(np.abs(present), 98, method="lower")) if present.size else 0.0
    if not 0 < OUTLYING * usual < most:
        return most or 1.0, "neither"
    over, under = bool((present > usual).any()), bool((present < -usual).any())
    return usual, "both" if over and under else "max" if over else "min"


def _draw_map(axes: Axes, effects: list[Effect], *, named: bool) -> None:
    parts = {effect.layer: effect.part for effect in effects}
    layers = sorted(parts, key=lambda layer: (PARTS.index(parts[layer]), layer))
    heads = sorted({effect.head for effect in effects if effect.head is not None})
    values, quiet, lost = _grids(effects, layers, heads)
    half, extend = limit(values)
    signed = any(effect.p_value is not None for effect in effects)
    colours, norm = ("RdBu_r", CenteredNorm(0, half)) if signed else ("viridis", Normalize(0, half))
    scale = (colormaps[colours], norm, extend)
    bar = heat_map(axes, values, layers, heads, [parts[layer] for layer in layers], scale, named=named)
    bar.update_ticks()
    hatch(axes, lost, "xxxxx")
    wide, high = size_in_points(axes)
    rows, columns = np.nonzero(quiet)
    size = min(wide / len(heads), high / len(layers)) / 4
    axes.scatter(columns, rows, s=min(size, 3.0) ** 2, color=MUTED, linewidth=0, zorder=2)
    for row, column in np.argwhere(np.abs(np.nan_to_num(values)) > half):
        number = typeset(values[row, column], decimals_for([values[row, column]], 2))
        ink = "white" if signed else "black"
        axes.annotate(
            number, (column, row), (0, 3), textcoords="offset points", ha="center", fontsize=5, color=ink, zorder=3
        )


def _unsure(effect: Effect) -> bool:
    """Whether it was tested and does not stand; a distance is not tested."""
    return effect.p_value is not None and not effect.significant


def _grids(effects: list[Effect], layers: list[int], heads: list[int]):  # type: ignore[no-untyped-def]
    values = np.full((len(layers), len(heads)), np.nan)
    quiet, lost = np.zeros(values.shape, bool), np.zeros(values.shape, bool)
    for effect in effects:
        if effect.head is not None:
            at = layers.index(effect.layer), heads.index(effect.head)
            lost[at] = effect.delta is None
            if effect.delta is not None:
                values[at], quiet[at] = effect.delta, _unsure(effect)
    return values, quiet, lost


def _draw_layers(axes: Axes, swap: Swap, *, named: bool) -> None:
    effects = sorted(swap.sweep, key=lambda effect: (PARTS.index(effect.part), effect.layer))
    axes.axvline(0, color=MUTED, linewidth=0.6, zorder=0)
    mark = 4.5 if len(effects) <= 16 else 3.2
    for row, effect in enumerate(effects):
        if effect.delta is None:
            axes.annotate(
                "diverged",
                (0.98, row),
                xycoords=("axes fraction", "data"),
                ha="right",
                va="center",
                fontsize=6.5,
                color=CATEGORIES[2],
                style="italic",
            )
            continue
        colour = MUTED if _unsure(effect) else CATEGORIES[0]
        if effect.ci95 is not None:
            axes.plot(effect.ci95, [row, row], color=colour, linewidth=1.3, alpha=0.6, solid_capstyle="butt")
        filled = "white" if _unsure(effect) else colour
        axes.plot([effect.delta], [row], "o", color=colour, markerfacecolor=filled, markersize=mark)
    axes.margins(x=0.08)
    axes.xaxis.set_major_formatter(PlainNumbers())
    axes.set_xlabel(f"Δ of the {EFFECTS[swap.judged_by]}, that layer alone", labelpad=1.5, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    label_layers(axes, [effect.layer for effect in effects], [effect.part for effect in effects], named=named)
