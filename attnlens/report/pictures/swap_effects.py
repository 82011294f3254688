"""Panels of a swap's effects: sites, kernels, stages, sweeps."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import CenteredNorm, Normalize
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from attnlens.records import PARTS
from attnlens.report.pictures.maps import hatch, heat_map
from attnlens.report.pictures.style import (
    CATEGORIES,
    INK,
    MISSING,
    MUTED,
    PlainNumbers,
    fitted,
    label_layers,
    legend_above,
    size_in_points,
    typeset,
)
from attnlens.report.sentences.swaps import (
    EFFECTS,
    distance,
    distance_ci95,
    effect_name,
    figures,
    is_hybrid,
    loss_decimals,
    rise_interval,
    rise_words,
)
from attnlens.wording import clean, decimals_for

if TYPE_CHECKING:
    from jaxtyping import Float
    from matplotlib.axes import Axes

    from attnlens.choices import ControlRole
    from attnlens.records import Control, Effect, Outcome, Swap

OF_PART = dict.fromkeys(PARTS, CATEGORIES[0]) | {"cross": CATEGORIES[6]}
"""Colours of self-attention and cross-attention; the names of the parts are written next to the layers."""
LINES = (CATEGORIES[0], CATEGORIES[2], CATEGORIES[4], CATEGORIES[5], CATEGORIES[6], CATEGORIES[1], "#222222", "#999999")
MARKERS = "osD^vPX*"  # kernels differ in marker as well as in colour
CROWDED = 24  # number of layers above which bars touch
LEGEND_WIDTH = 66  # characters of all names in one line of the legend
PARAMETERS = re.compile(r":(?:[^+]|(?<=\d[eE])\+)*")
"""Pattern of a kernel's or filter's parameters; they end at a plus sign, but not at that of 1e+06."""
LEGEND_NAME = 22  # largest number of characters of a kernel's name in a legend


def draw_sites(axes: Axes, swap: Swap, *, named: bool = True) -> None:
    """Draw ‖new − own‖ / ‖own‖ of every site's output, layer 0 at the top; sites without a value are hatched."""
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


def draw_lines(
    axes: Axes, lines: Sequence[tuple[str, Float[np.ndarray, " layers"]]], label: str, *, zero: bool = False
) -> None:
    """Draw one line per kernel over the layers, with gaps for missing values; `zero` adds a line at 0."""
    if zero:
        axes.axhline(0, color="#999999", linewidth=0.6, zorder=0)
    labels = short_names([name for name, _ in lines])
    for number, (_, values) in enumerate(lines):
        colour, mark = LINES[number % len(LINES)], MARKERS[number % len(MARKERS)]
        axes.plot(values, color=colour, marker=mark, markersize=3, linewidth=1, label=labels[number])
    axes.set_xlabel("layer", labelpad=1.5)
    axes.set_ylabel(label, labelpad=2)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.yaxis.set_major_formatter(PlainNumbers())
    axes.spines[["top", "right"]].set_visible(False)
    legend_above(axes, _names_per_line(labels), handlelength=1.6)


def legend_lines(names: Sequence[str]) -> int:
    """Count the lines of these kernels' legend."""
    return -(-len(names) // _names_per_line(short_names(names)))


def _names_per_line(labels: Sequence[str]) -> int:
    """Return the number of names per line of the legend."""
    return max(1, min(4, LEGEND_WIDTH // max(map(len, labels))))


def short_names(names: Sequence[str]) -> list[str]:
    """Remove the kernels' parameters if the names remain distinct; cut names to what a legend can hold."""
    bare = [clean(PARAMETERS.sub("", name)) for name in names]
    chosen = bare if len(set(bare)) == len(bare) else map(clean, names)
    return [fitted(name, LEGEND_NAME) for name in chosen]


COLOUR = CATEGORIES[0]
GREY = "#8c8c8c"
MARKS: dict[ControlRole, tuple[str, str]] = {
    "same size": ("D", "◆"),
    "one key": ("v", "▼"),
    "floor": ("X", "✖"),
    "filter alone": ("<", "◀"),
    "without filter": (">", "▶"),
    "far part, healed": ("^", "▲"),
}
"""Marker of each kind of control, and the same sign as text."""
ROLES: dict[ControlRole, str] = {
    "same size": "sinks and window of its size",
    "one key": "one key",
    "floor": "all keys alike",
    "filter alone": "filter alone",
    "without filter": "without its filter",
    "far part, healed": "its far part, healed",
}
"""Short description of each kind of control."""
OF_HYBRIDS: dict[ControlRole, str] = {"filter alone": "window alone", "without filter": "far part alone"}
"""Short descriptions for hybrids, if different."""
WIDE = 30.0
"""Ratio of the largest to the smallest effect from which the axis is logarithmic."""
FINEST = 1e-3  # smaller effects are drawn in the linear part of a logarithmic axis
KERNEL_NAME = 40  # characters of a kernel's name


def draw_kernels(axes: Axes, swaps: Sequence[Swap]) -> None:
    """Draw Δ of the loss, or a distance if there is no loss, with 95 % intervals; diverged kernels get a text."""
    axes.axvline(0, color=MUTED, linewidth=0.8, linestyle=(0, (4, 2)), zorder=0)
    for row, swap in enumerate(swaps):
        # controls are grey markers in the kernel's row, one shape per kind; they need a loss
        for control in swap.controls:
            cost = cost_of(control)
            if cost is not None and swap.judged_by == "loss":
                axes.plot([cost], [row], MARKS[control.role][0], color=GREY, markersize=4, linestyle="none", zorder=2)
        _draw_kernel(axes, swap, row)
    effects = [effect for swap in swaps for effect in (effect_of(swap), *map(cost_of, swap.controls))]
    _scale_effects(axes, [effect for effect in effects if effect is not None])
    axes.set_yticks(range(len(swaps)), list(map(name_of, swaps)))
    axes.set_ylim(len(swaps) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    for row in range(1, len(swaps)):
        axes.axhline(row - 0.5, color="#e6e6e6", linewidth=0.5, zorder=0)
    axes.set_xlabel("Δ of the " * (swaps[0].judged_by == "loss") + effect_name(swaps[0]), labelpad=1.5)
    axes.spines[["top", "right"]].set_visible(False)


def cost_of(control: Control) -> float | None:
    """Return Δ of the loss under a control."""
    return None if control.loss is None else control.loss.delta


def legend_of(swaps: Sequence[Swap]) -> str:
    """Describe the grey markers that are drawn; empty if there are none."""
    of = {swap.kernel: {one.role for one in swap.controls if cost_of(one) is not None} for swap in swaps}
    drawn = {role for roles in of.values() for role in roles}
    words = ROLES | (OF_HYBRIDS if all(is_hybrid(swap) for swap in swaps if "filter alone" in of[swap.kernel]) else {})
    entries = ", ".join(f"{sign} {words[role]}" for role, (_, sign) in MARKS.items() if role in drawn)
    return f"grey: {entries}" if entries else ""


def name_of(swap: Swap) -> str:
    """Format the kernel's name and, below it, the rise of the perplexity with its interval."""
    name = fitted(clean(swap.kernel), KERNEL_NAME)
    if swap.loss is None or swap.perplexity is None:
        return name
    ends = rise_interval(swap.loss)
    return f"{name}\nperplexity {rise_words(swap.loss)}{f' ({ends})' if ends else ''}"


def effect_of(swap: Swap) -> float | None:
    """Return Δ of the loss, or the distance if there is no loss."""
    if swap.judged_by != "loss":
        return distance(swap, swap)
    return None if swap.loss is None else swap.loss.delta


def ends_of(swap: Swap) -> tuple[float, float] | None:
    """Return the 95 % interval of the effect."""
    if swap.judged_by != "loss":
        return distance_ci95(swap, swap)
    return None if swap.loss is None else swap.loss.ci95


def _draw_kernel(axes: Axes, swap: Swap, row: int) -> None:
    effect = effect_of(swap)
    if effect is None:
        _write_in_row(axes, 0.99, row, "diverged" if swap.diverged else "no value", COLOUR, ha="right", fontsize=6.5)
        return
    ends = ends_of(swap)
    if ends is not None:
        axes.plot(ends, [row, row], color=COLOUR, linewidth=1.4, alpha=0.6, solid_capstyle="butt")
    axes.plot([effect], [row], "o", color=COLOUR, markersize=4.5, linestyle="none")


def _write_in_row(axes: Axes, x: float, row: int, text: str, colour: str, **more: Any) -> None:
    place = ("axes fraction", "data")
    axes.annotate(text, (x, row), xycoords=place, va="center", color=colour, style="italic", **more)


def _scale_effects(axes: Axes, effects: Sequence[float]) -> None:
    """Scale the axis: linear if effects are of similar size, else logarithmic on both sides of a linear part at 0."""
    sizes = sorted(abs(effect) for effect in effects if abs(effect) >= FINEST)
    axes.margins(x=0.08)
    if not sizes or sizes[-1] < WIDE * sizes[0]:
        axes.xaxis.set_major_formatter(PlainNumbers())
        return
    border = 10.0 ** math.floor(math.log10(sizes[0]))
    axes.set_xscale("symlog", linthresh=border, linscale=0.6)
    tops = [border * 10**power for power in range(math.ceil(math.log10(sizes[-1] / border)) + 1)]
    low, high = axes.get_xlim()
    ticks = [0.0, *tops, *(-top for top in tops)]
    axes.xaxis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:g}".replace("-", "−")))
    axes.set_xlim(low, high)


CONTROL_NAME = 30  # characters of a control's name
BLUE, ORANGE = CATEGORIES[0], CATEGORIES[2]


def draw_stages(axes: Axes, swap: Swap) -> None:
    """Draw the loss of the original, each stage and (grey) each control; without a loss, the distance."""
    controls = drawn_controls(swap)
    names = names_of(swap)
    original = (
        next((stage.loss.before for stage in swap.stages if stage.loss is not None), None) if draws_loss(swap) else 0.0
    )
    if original is not None:
        axes.axvline(original, color=MUTED, linewidth=0.8, linestyle=(0, (4, 2)), zorder=0)
        axes.plot([original], [0], "o", color=INK, markersize=5)
        _label_point(axes, original, 0, _decimals(swap))
    for row, stage in enumerate(swap.stages, 1):
        _draw_stage(axes, swap, stage, row)
    for row, control in enumerate(controls, 1 + len(swap.stages)):
        _draw_stage(axes, swap, control, row, GREY)
    axes.set_yticks(range(len(names)), names)
    for label in axes.get_yticklabels()[1 + len(swap.stages) :]:
        label.set_color(MUTED)
    axes.set_ylim(len(names) - 0.5, -0.6)
    axes.margins(x=0.16)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(PlainNumbers())
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.set_xlabel(effect_name(swap), labelpad=1.5)
    axes.spines[["top", "right"]].set_visible(False)
    if original is None and all(_stage_effect(swap, stage) is None for stage in swap.stages):
        axes.set_xticks([])


def drawn_controls(swap: Swap) -> list[Control]:
    """Return the controls that have a loss to draw; none if the model has no loss."""
    return [control for control in swap.controls if control.loss is not None] if draws_loss(swap) else []


def names_of(swap: Swap) -> list[str]:
    """Format the names of original, stages and controls, each with the rise of its perplexity and the interval."""
    controls = drawn_controls(swap)
    spelled = [fitted(clean(one.kernel or one.role), CONTROL_NAME) for one in controls]
    changed: list[tuple[str, Outcome]] = [(stage.name, stage) for stage in swap.stages]
    changed += zip(spelled, controls, strict=True)
    gap = " " if controls else "\n"  # few rows have room for a third line, which keeps the names narrow
    first = next((stage.perplexity.before for stage in swap.stages if stage.perplexity), None)
    original = f"original\nperplexity {figures(first)}" if first is not None and draws_loss(swap) else "original"
    return [original, *(f"{name}{_format_rise(one, gap) if draws_loss(swap) else ''}" for name, one in changed)]


def _format_rise(stage: Outcome, gap: str) -> str:
    """Format the rise as a new line `+5.6 %` and, after the gap, `(4.9 to 6.4 %)`; empty if there is none."""
    if stage.perplexity is None or stage.loss is None:
        return ""
    ends = rise_interval(stage.loss)
    return f"\n{rise_words(stage.loss)}{f'{gap}({ends})' if ends else ''}"


def draws_loss(swap: Swap) -> bool:
    """Check whether the stages are drawn by their loss."""
    return swap.judged_by == "loss"


def _draw_stage(axes: Axes, swap: Swap, stage: Outcome, row: int, colour: str = BLUE) -> None:
    place = _stage_effect(swap, stage)
    if place is None:
        _write_in_row(axes, 0.03, row, "diverged" if stage.diverged else "no value", ORANGE)
        return
    ends = _stage_interval(swap, stage)
    if ends is not None:
        axes.plot(ends, [row, row], color=colour, linewidth=1.6, alpha=0.55, solid_capstyle="butt")
    axes.plot([place], [row], "o", color=colour, markersize=5)
    _label_point(axes, place, row, _decimals(swap))


def _stage_effect(swap: Swap, stage: Outcome) -> float | None:
    if draws_loss(swap):
        return None if stage.loss is None else stage.loss.after
    return distance(swap, stage)


def _stage_interval(swap: Swap, stage: Outcome) -> tuple[float, float] | None:
    """Return the 95 % interval; for a loss, the interval of the difference shifted by the original loss."""
    if not draws_loss(swap):
        return distance_ci95(swap, stage)
    if stage.loss is None or stage.loss.ci95 is None:
        return None
    low, high = stage.loss.ci95
    return stage.loss.before + low, stage.loss.before + high


def _label_point(axes: Axes, place: float, row: int, decimals: int) -> None:
    white = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    text = typeset(place, decimals)
    axes.annotate(
        text, (place, row), (0, 7), textcoords="offset points", ha="center", fontsize=7, color=INK, bbox=white
    )


def _decimals(swap: Swap) -> int:
    return min(3, loss_decimals([stage.loss for stage in swap.stages if stage.loss is not None]))


OUTLYING = 3.0
"""Ratio to the 98th percentile above which a head's effect is drawn in the last colour."""


def of_heads(swap: Swap) -> bool:
    """Check whether single heads were swapped rather than whole layers."""
    return any(effect.head is not None for effect in swap.sweep)


def draw_sweep(axes: Axes, swap: Swap, *, named: bool = True) -> None:
    """Draw heads as a map or layers as dots; layer 0 is at the top."""
    if of_heads(swap):
        parts = {effect.layer: effect.part for effect in swap.sweep}
        layers = sorted(parts, key=lambda layer: (PARTS.index(parts[layer]), layer))
        heads = sorted({effect.head for effect in swap.sweep if effect.head is not None})
        values, quiet, lost = _fill_grids(swap.sweep, layers, heads)
        half, extend = limit(values)
        signed = any(effect.p_value is not None for effect in swap.sweep)
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
    else:
        _draw_layers(axes, swap, named=named)


def limit(values: Float[np.ndarray, "*cells"]) -> tuple[float, str]:
    """Return the |effect| at which colours end, and the cut ends; one head must not bleach the others."""
    present = values[np.isfinite(values)]
    most = float(np.abs(present).max(initial=0.0))
    usual = float(np.percentile(np.abs(present), 98, method="lower")) if present.size else 0.0
    if not 0 < OUTLYING * usual < most:
        return most or 1.0, "neither"
    over, under = bool((present > usual).any()), bool((present < -usual).any())
    return usual, "both" if over and under else "max" if over else "min"


def _insignificant(effect: Effect) -> bool:
    """Check whether the effect was tested and is not significant; distances are not tested."""
    return effect.p_value is not None and not effect.significant


def _fill_grids(effects: list[Effect], layers: list[int], heads: list[int]):  # type: ignore[no-untyped-def]
    values = np.full((len(layers), len(heads)), np.nan)
    quiet, lost = np.zeros(values.shape, bool), np.zeros(values.shape, bool)
    for effect in effects:
        if effect.head is not None:
            at = layers.index(effect.layer), heads.index(effect.head)
            lost[at] = effect.delta is None
            if effect.delta is not None:
                values[at], quiet[at] = effect.delta, _insignificant(effect)
    return values, quiet, lost


def _draw_layers(axes: Axes, swap: Swap, *, named: bool) -> None:
    effects = sorted(swap.sweep, key=lambda effect: (PARTS.index(effect.part), effect.layer))
    axes.axvline(0, color=MUTED, linewidth=0.6, zorder=0)
    mark = 4.5 if len(effects) <= 16 else 3.2
    for row, effect in enumerate(effects):
        if effect.delta is None:
            _write_in_row(axes, 0.98, row, "diverged", CATEGORIES[2], ha="right", fontsize=6.5)
            continue
        colour = MUTED if _insignificant(effect) else CATEGORIES[0]
        if effect.ci95 is not None:
            axes.plot(effect.ci95, [row, row], color=colour, linewidth=1.3, alpha=0.6, solid_capstyle="butt")
        filled = "white" if _insignificant(effect) else colour
        axes.plot([effect.delta], [row], "o", color=colour, markerfacecolor=filled, markersize=mark)
    axes.margins(x=0.08)
    axes.xaxis.set_major_formatter(PlainNumbers())
    axes.set_xlabel(f"Δ of the {EFFECTS[swap.judged_by]}, that layer alone", labelpad=1.5, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    label_layers(axes, [effect.layer for effect in effects], [effect.part for effect in effects], named=named)
