"""Pictures of swaps: stages, output errors, comparisons of kernels, sweeps, predictors of harm, ranks and healing."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np
from matplotlib.colors import CenteredNorm, Normalize
from matplotlib.ticker import FuncFormatter, MaxNLocator

from attnlens.choices import PARTS
from attnlens.kernels import TIES
from attnlens.records import Effect, Healing, Outcome, Plan, Report, SiteSwap, Swap
from attnlens.report.pictures import charts, style
from attnlens.report.pictures.charts import Dot, Panel, Row, as_array
from attnlens.report.sections.plans import BUDGETED, share
from attnlens.report.sections.swaps import DESTROYED, effect, effect_name, format_rise, formula, loss_decimals
from attnlens.report.shapes import Names
from attnlens.wording import big, capitalise, clean, decimals_for, format_number

if TYPE_CHECKING:
    from jaxtyping import Float
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from attnlens.choices import ControlRole
    from attnlens.records import Control, Predictor

OWN, GREY = style.CATEGORIES[0], "#8c8c8c"
RISES = {"loss": "rise in the loss", "kl": "KL to the original", "hidden": "distance of the last hidden states"}
"""`judged_by` of a swap → the quantity by which each kernel is judged, as a title."""
MARKS: dict[ControlRole, tuple[str, str, str]] = {
    "same size": ("D", "◆", "sink-window of equal size"),
    "one key": ("v", "▼", "one key"),
    "floor": ("X", "✖", "equal weights"),
    "filter alone": ("<", "◀", "filter (or window) alone"),
    "without filter": (">", "▶", "kernel (or far part) alone"),
    "far part, healed": ("^", "▲", "far part, healed"),
}
"""Role of a control → marker in matplotlib, marker as a character, and description."""
SITES = (
    "‖new − original‖ / ‖original‖ of the output of each layer's attention, computed on the original model's queries, "
    "keys and values."
)
"""Caption of the picture of output errors by layer."""
CROWDED = 24  # number of layers above which bars have no gaps
WIDE = 30.0  # ratio of the largest to the smallest effect from which the axis is logarithmic
FINEST = 1e-3  # smaller effects are drawn in the linear part of a logarithmic axis
KERNEL_NAME, CONTROL_NAME, LEGEND_NAME = 40, 30, 22  # maximum numbers of characters of names
LINES = {
    "color": [*(style.CATEGORIES[number] for number in (0, 2, 4, 5, 6, 1)), style.INK, "#999999"],
    "marker": list("osD^vPX*"),
}
"""Colours and markers that the kernels' lines take in turn."""
PARAMETERS = re.compile(r":(?:[^+]|(?<=\d[eE])\+)*")
"""Pattern of a kernel's or filter's parameters; they end at a plus sign, but not at the one in 1e+06."""
OUTLYING = 3.0  # ratio to usual effects (98th percentile, or stages) above which an effect is off the axis or scale
ALWAYS = ("tokens.share_positive", "tokens.share_skew", "tokens.share_key", "ksvd.rank90", "tokens.entropy")
"""Predictors that are always drawn if they have values."""
HARM = "what predicts harm"  # title of the pictures of predictors
PICTURES = 6  # number of measures drawn: those in ALWAYS, then the strongest predictors
SQUASHED = 30.0  # ratio of the largest to the median effect above which the axis has an asinh scale
MOST_WRITTEN = 24  # number of layers or heads up to which a cell has room for its number
LayerValues = dict[tuple[int, int], float | None]
"""Sort key of a layer (see `_order`) → value; None for a missing value."""
STEP_GAP = 0.17  # least distance between two labelled steps, as a share of the width
DASHED: style.Style = {"linewidth": 0.8, "linestyle": (0, (4, 2))}  # line at the original model's value


def swap_overview(report: Report, *, bare: bool = False) -> Figure:
    """Draw all panels of a swap on one page."""
    swap, several, panels = report.swaps[0], len(report.swaps) > 1, _overview_panels(report)
    across = len(panels) if len(panels) <= 3 else 2
    rows = [panels[start : start + across] for start in range(0, len(panels), across)]
    page = []
    for row in [panels[:1], panels[1:]] if several else rows:
        lines = max(panel.rows for panel in row)  # more height for many layers, less for few kernels
        low = 2.3 if several or len(rows) > 1 else 2.6
        page.append(Row(row, 0.19 * lines if len(row) == 1 else float(np.clip(0.115 * lines, low, 3.4))))
    what, how = ("several kernels", "") if several else (clean(swap.kernel), formula(swap))
    # the formula comes last: if the line is too long, the formula is left to the caption
    facts = [*charts.model_facts(report), what, clean(report.coverage.sentence), how]
    return charts.overview(report, page, facts, bare=bare)


def swap_panels(report: Report) -> list[Panel]:
    """Build the panels for separate files, including those on each kernel's sweep."""
    panels = [panel for panel in _overview_panels(report) if panel.stem not in ("stages", "sweep", "predictor")]
    pairs = [(swap, f"-{clean(swap.kernel)}" * (len(report.swaps) > 1)) for swap in report.swaps if swap.sweep]
    for swap, suffix in pairs:
        panel = _sweep_panel(swap, f"sweep{suffix}", report.model.layer_number)
        panels.append(replace(panel, title=f"{panel.title}: {clean(swap.kernel)}" if suffix else panel.title))
    predicted = [(swap, suffix) for swap, suffix in pairs if swap.predictors]
    name = report.model.layer_name
    return panels + [_predictors_panel(swap, f"predictors{suffix}", name) for swap, suffix in predicted]


def _overview_panels(report: Report) -> list[Panel]:
    if len(report.swaps) > 1:
        return list(_kernel_panels(report))
    swap, plan, number = report.swaps[0], report.plan, report.model.layer_number
    note, draw = "on the original's queries, keys and values", partial(draw_sites, swap=swap, number=number)
    caption = SITES + " Hatched: no value." * any(site.output_error is None for site in swap.sites)
    sites = Panel("sites", "output error by layer", note, caption, draw, len(swap.sites))
    panels = [_stages_panel(swap), sites]
    panels += [_ranks_panel(plan, number)] if plan is not None else []
    panels += [_sweep_panel(swap, "sweep", number)] if swap.sweep else []
    if swap.predictors:  # the measure with the largest |ρ| among predictors that hold, else among all
        holding = [predictor for predictor in swap.predictors if predictor.holds]
        strongest = max(holding or swap.predictors, key=lambda predictor: abs(predictor.rho))
        panel = _scatter_panel(swap, strongest, report.model.layer_name)
        caption = f"{_predictor_caption(swap)} Here {panel.note}."
        panels.append(replace(panel, stem="predictor", title=HARM, caption=caption))
    panels += [_healing_panel(swap, swap.healing)] if swap.healing is not None else []
    return panels


def _drawn_controls(swap: Swap) -> list[Control]:
    return [control for control in swap.controls if control.loss is not None and swap.judged_by == "loss"]


def _kernel_panels(report: Report) -> Iterator[Panel]:
    swaps = report.swaps
    what = RISES[swaps[0].judged_by]
    method, units = report.settings.interval_method, report.settings.intervals or "inputs"
    paired = "paired " * (swaps[0].judged_by == "loss")
    caption = f"{capitalise(what)} with each kernel in every chosen head."
    caption += f" Bars: {paired}{method} 95 % intervals over {units}."
    cautions = dict.fromkeys(TIES[name].caution for swap in swaps for name in swap.kernel.split("+") if name in TIES)
    caption = " ".join([caption, *filter(None, cautions)])
    drawn = {control.role for swap in swaps for control in _drawn_controls(swap)}
    controls = ", ".join(f"{sign} {words}" for role, (_, sign, words) in MARKS.items() if role in drawn)
    caption += f" Controls in grey: {controls}." * bool(controls)
    note = "bars: 95 % intervals" + f"; grey: {controls}" * bool(controls)
    note = "no kernel has a value" if all(effect(swap, swap)[0] is None for swap in swaps) else note
    yield Panel("kernels", what, note, caption, partial(draw_kernels, swaps=swaps), 2 * len(swaps) + 2, width=6.0)
    errors = [(swap.kernel, {_order(site): site.output_error for site in swap.sites}) for swap in swaps]
    names = report.model.layer_name
    draw = partial(draw_layer_lines, lines=errors, label="‖new − original‖ / ‖original‖", names=names)
    yield Panel("sites", "output error by layer", "", SITES, draw)
    if any(swap.sweep for swap in swaps) and not any(map(_of_heads, swaps)):
        harms = [(swap.kernel, {_order(unit): unit.delta for unit in swap.sweep}) for swap in swaps]
        draw = partial(draw_layer_lines, lines=harms, label=f"Δ of the {effect_name(swaps[0])}", names=names)
        caption = "Effect on the model if only that layer has the kernel."
        yield Panel("sweep", "each layer alone", "", caption, draw)


def draw_kernels(axes: Axes, swaps: Sequence[Swap]) -> None:
    """Draw, per kernel, the change in the loss (or a distance) with its 95 % interval, and controls in grey."""
    axes.axvline(0, color=style.MUTED, zorder=0, **DASHED)
    rows = []
    for swap in swaps:
        # controls are grey markers in the kernel's row, one shape per kind
        dots = [
            Dot(effect(swap, control)[0], colour=GREY, marker=MARKS[control.role][0], size=4)
            for control in _drawn_controls(swap)
        ]
        rows.append([*dots, _dot(swap, swap)])
    kernels = [style.shorten_label(clean(swap.kernel), KERNEL_NAME) for swap in swaps]
    names = [kernel + _rise(swap, "perplexity ", " ") for kernel, swap in zip(kernels, swaps, strict=True)]
    charts.dot_plot(axes, rows, names)
    scale_widely(axes, "x", [dot.value or 0.0 for row in rows for dot in row])
    for row in range(1, len(swaps)):
        axes.axhline(row - 0.5, color="#e6e6e6", linewidth=0.5, zorder=0)
    axes.set_xlabel("Δ of the " * (swaps[0].judged_by == "loss") + effect_name(swaps[0]))


def scale_widely(axes: Axes, which: Literal["x", "y"], values: Iterable[float]) -> None:
    """If absolute values span a factor of WIDE or more, make an axis linear near 0 and logarithmic farther out."""
    sizes = sorted(size for value in values if math.isfinite(size := abs(value)) and size >= FINEST)
    if sizes and sizes[-1] >= WIDE * sizes[0]:
        border = 10.0 ** math.floor(math.log10(sizes[0]))
        (axes.set_xscale if which == "x" else axes.set_yscale)("symlog", linthresh=border, linscale=0.6)
        style.label_powers(axes.xaxis if which == "x" else axes.yaxis, border)


def _dot(swap: Swap, outcome: Outcome, colour: str = OWN, size: float = 4.5) -> Dot:
    return Dot(*effect(swap, outcome), colour, size=size, text="diverged" if outcome.diverged else "no value")


def _rise(outcome: Outcome, name: str, gap: str) -> str:
    """Format the rise in perplexity, or DESTROYED, as a new line of a label; return "" if the rise is unknown.

    `name` precedes the rise, and `gap` its interval.
    """
    if outcome.perplexity is None or outcome.loss is None:
        return f"\n{DESTROYED}" * outcome.destroyed
    rise, ends = format_rise(outcome.loss, outcome.perplexity, destroyed=outcome.destroyed)
    name *= not outcome.destroyed
    return f"\n{name}{rise}{f'{gap}({ends})' if ends else ''}"


def _stages_panel(swap: Swap) -> Panel:
    lossy, controls = swap.judged_by == "loss", _drawn_controls(swap)
    name = "loss by stage" if lossy else "distance by stage"
    perplexity = "left: perplexity; " * lossy
    note = f"{perplexity}bars: 95 % interval; dashed: the original"
    note = f"{perplexity}grey: controls; ▶: off axis" if controls else note
    rows = 2 * (1 + len(swap.stages) + len(controls)) if controls else 12
    caption = f"{capitalise(effect_name(swap))} of the original model (dashed), after each stage"
    caption += ", and with each control (grey)" * bool(controls) + ". Bars: 95 % intervals of the difference."
    caption += " Left: rise in the perplexity in % or as a factor ×, with its interval." * lossy
    caption += " ▶: off axis." * bool(controls)
    return Panel("stages", name, note, caption, partial(draw_stages, swap=swap), rows)


def draw_stages(axes: Axes, swap: Swap) -> None:
    """Draw the loss (or, without a loss, a distance) of the original model, each stage and each control."""
    lossy, controls = swap.judged_by == "loss", _drawn_controls(swap)
    losses = [stage.loss for stage in swap.stages if stage.loss is not None]
    original = (losses[0].before if losses else None) if lossy else 0.0
    outcomes, stages = [*swap.stages, *controls], len(swap.stages)
    dots = [Dot(original, colour=style.INK, size=5)]
    for number, outcome in enumerate(outcomes):
        dot = _dot(swap, outcome, OWN if number < stages else GREY, size=5)
        if lossy and outcome.loss is not None:  # shift the interval of the difference by the original loss
            before, ends = outcome.loss.before, outcome.loss.ci95
            dot = replace(dot, value=outcome.loss.after, ends=ends and (before + ends[0], before + ends[1]))
        dots.append(dot)
    values = [dot.value for dot in dots]
    dots = _move_to_edge(dots, original, stages)
    if original is not None:
        axes.axvline(original, color=style.MUTED, zorder=0, **DASHED)
    gap = " " if controls else "\n"  # few rows have room for a third line, which keeps the names narrow
    labels: list[str] = [stage.name for stage in swap.stages]
    labels += [style.shorten_label(clean(control.kernel or control.role), CONTROL_NAME) for control in controls]
    names = [f"{label}{_rise(outcome, '', gap) * lossy}" for label, outcome in zip(labels, outcomes, strict=True)]
    known = [stage.perplexity.before for stage in swap.stages if stage.perplexity is not None and lossy]
    first = f"original\nperplexity {format_number(known[0], decimals_for(known[:1]))}" if known else "original"
    charts.dot_plot(axes, [[dot] for dot in dots], [first, *names])
    for label in axes.get_yticklabels()[1 + stages :]:
        label.set_color(style.MUTED)
    decimals = min(3, loss_decimals(losses))
    above: style.Style = {"textcoords": "offset points", "ha": "center", "fontsize": 7, "color": style.INK}
    white = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    for row, (dot, value) in enumerate(zip(dots, values, strict=True)):
        if dot.value is not None and value is not None:
            axes.annotate(format_number(value, decimals), (dot.value, row), (0, 7), bbox=white, **above)
    axes.margins(x=0.16)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.set_xlabel(effect_name(swap))
    if all(dot.value is None for dot in dots):
        axes.set_xticks([])


def _move_to_edge(dots: Sequence[Dot], original: float | None, stages: int) -> list[Dot]:
    """Replace each dot far above those of the original and the stages with an arrow at the right edge."""
    known = [end for dot in dots[: 1 + stages] if dot.value is not None for end in (dot.value, *(dot.ends or ()))]
    if original is None or not (span := max(abs(value - original) for value in known)):
        return list(dots)
    edge = original + OUTLYING * span
    return [
        replace(dot, value=edge, ends=None, marker=">") if dot.value is not None and dot.value > edge else dot
        for dot in dots
    ]


def draw_sites(axes: Axes, swap: Swap, number: Names = str) -> None:
    """Draw the relative error of each site's output, the first layer at the top; hatch sites without a value."""
    sites = sorted(swap.sites, key=_order)
    errors, rows = as_array(site.output_error for site in sites), np.arange(len(sites))
    colours = [style.CATEGORIES[6] if site.part == "cross" else OWN for site in sites]
    height = 1.0 if len(rows) > CROWDED else 0.78
    axes.barh(rows, np.nan_to_num(errors), height=height, color=colours, linewidth=0, antialiased=len(rows) <= CROWDED)
    reach = max(float(np.nanmax(errors, initial=0.0)), 1e-9)
    for row in rows[np.isnan(errors)]:
        charts.hatch_box(axes, (0, row - 0.4), reach, 0.8)
    axes.set_xlim(0, 1.06 * reach)
    axes.set_xlabel("‖new − original‖ / ‖original‖ of the output")
    charts.label_layers(axes, [number(site.layer) for site in sites], [site.part for site in sites])


def draw_layer_lines(axes: Axes, lines: Sequence[tuple[str, LayerValues]], label: str, names: Names = str) -> None:
    """Draw one line per kernel over the layers, with gaps for missing values, and a line at 0."""
    places = sorted({place for _, values in lines for place in values})
    bare = [clean(PARAMETERS.sub("", name)) for name, _ in lines]
    kernels = bare if len(set(bare)) == len(bare) else [clean(name) for name, _ in lines]
    arrays = [as_array(values.get(place) for place in places) for _, values in lines]
    axes.axhline(0, color="#999999", linewidth=0.6, zorder=0)
    axes.set_prop_cycle(**LINES)
    for kernel, values in zip(kernels, arrays, strict=True):
        axes.plot(values, markersize=3, linewidth=1, label=style.shorten_label(kernel, LEGEND_NAME))
    scale_widely(axes, "y", [float(np.nanmax(np.abs(values), initial=0.0)) for values in arrays])
    axes.set_xlabel("layer")
    axes.set_ylabel(label)
    charts.label_indices(axes.xaxis, [names(layer) for _, layer in places])
    if len({part for part, _ in places}) > 1:  # the names of layers contain their part, so they are long
        axes.tick_params(axis="x", labelrotation=90)
    style.legend_above(axes, 75)


def _order(unit: Effect | SiteSwap) -> tuple[int, int]:
    """Return the sort key of a layer: position of its part, then its number."""
    return PARTS.index(unit.part), unit.layer


def _of_heads(swap: Swap) -> bool:
    return any(unit.head is not None for unit in swap.sweep)


def _is_quiet(unit: Effect) -> bool:
    """Return True if the effect was tested and is not significant; distances are not tested."""
    return unit.delta is not None and unit.p_value is not None and not unit.significant


def _sweep_panel(swap: Swap, stem: str, number: Names) -> Panel:
    heads = _of_heads(swap)
    noun, mark = ("head", "grey dot") if heads else ("layer", "hollow")
    note = f"{mark}: not significant at FDR 5 %" * any(map(_is_quiet, swap.sweep))
    caption = f"{clean(swap.kernel)}. Effect on the model if only that {noun} has the kernel."
    caption += " Bars: 95 % intervals." * any(not heads and unit.ci95 is not None for unit in swap.sweep)
    caption += f" {capitalise(note)}." * bool(note)
    caption += " Crossed: diverged." * (heads and any(unit.delta is None for unit in swap.sweep))
    caption += " Numbers: effects beyond the colour scale." * heads
    layers, columns = len({unit.layer for unit in swap.sweep}), len({unit.head for unit in swap.sweep})
    wide = float(np.clip(0.4 * columns, 3.4, 8)) if heads else 4.6
    draw = partial(draw_sweep, swap=swap, number=number)
    return Panel(stem, f"each {noun} alone", note, caption, draw, layers * (1 + heads), wide)


def draw_sweep(axes: Axes, swap: Swap, number: Names = str) -> None:
    """Draw the effects of single heads as a map, or the effects of layers as dots; the first layer is at the top."""
    if not _of_heads(swap):
        layers = sorted(swap.sweep, key=_order)
        axes.axvline(0, color=style.MUTED, linewidth=0.6, zorder=0)
        dots = []
        for unit in layers:
            quiet, size = _is_quiet(unit), 4.5 if len(layers) <= 16 else 3.2
            colour = style.MUTED if quiet else OWN
            dots.append([Dot(unit.delta, unit.ci95, colour, size=size, hollow=quiet, text="diverged")])
        charts.dot_plot(axes, dots)
        scale_around_median(axes, "x", as_array(unit.delta for unit in layers))
        axes.set_xlabel(f"Δ of the {effect_name(swap)}")
        charts.label_layers(axes, [number(unit.layer) for unit in layers], [unit.part for unit in layers])
        return
    units = [unit for unit in swap.sweep if unit.head is not None]
    places = [(unit.layer, unit.head or 0, unit.part) for unit in units]
    grid = charts.grid_of(places, (unit.delta for unit in units))
    half, extend = limit(grid.values)
    signed = any(unit.p_value is not None for unit in units)  # a distance has no sign, and no test
    colours, norm = (style.DIVERGING, CenteredNorm(0, half)) if signed else (style.SEQUENTIAL, Normalize(0, half))
    charts.heat_map(axes, grid, (colours, norm, extend), f"Δ of the {effect_name(swap)}", number)
    charts.hatch(axes, charts.grid_of(places, (unit.delta is None for unit in units)).values > 0, "xxxxx")
    charts.mark_cells(axes, charts.grid_of(places, map(_is_quiet, units)).values > 0, style.MUTED)
    above: style.Style = {"textcoords": "offset points", "ha": "center", "fontsize": 5, "zorder": 3}
    for row, column in np.argwhere(np.abs(grid.values) > half):
        delta = grid.values[row, column]
        text = format_number(delta, decimals_for([delta], 2))
        axes.annotate(text, (column, row), (0, 3), color="white" if signed else "black", **above)


def limit(values: Float[np.ndarray, "*cells"]) -> tuple[float, str]:
    """Return the absolute effect at which colours saturate, and the ends of the colour bar that get an arrow."""
    present = values[np.isfinite(values)]
    most = float(np.abs(present).max(initial=0.0))
    usual = float(np.percentile(np.abs(present), 98, method="lower")) if present.size else 0.0
    if not 0 < OUTLYING * usual < most:
        return most or 1.0, "neither"
    over, under = bool((present > usual).any()), bool((present < -usual).any())
    return usual, "both" if over and under else "max" if over else "min"


def _predictors_panel(swap: Swap, stem: str, name: Names) -> Panel:
    """Build the panel of several predictors: those in ALWAYS first, then those with the strongest correlations."""
    reasons = {} if swap.prediction is None else swap.prediction.left_out
    missing = "; ".join(f"{name}: {clean(reasons[name])}" for name in ALWAYS if name in reasons)
    caption = _predictor_caption(swap) + f" Not drawn: {missing}." * bool(missing)
    by_name = {predictor.measure: predictor for predictor in swap.predictors}
    first = [by_name.pop(name) for name in ALWAYS if name in by_name]
    others = sorted(by_name.values(), key=lambda predictor: -abs(predictor.rho))
    parts = [_scatter_panel(swap, predictor, name) for predictor in [*first, *others][:PICTURES]]
    return replace(parts[0], stem=stem, title=HARM, caption=caption, parts=parts)


def _predictor_caption(swap: Swap) -> str:
    return (
        f"{clean(swap.kernel)}. Δ of the {effect_name(swap)} if only one head has the kernel, against measures of that "
        "head on the same windows; one dot per head. ρ: Spearman correlation with a bootstrap 95 % interval over "
        "heads; a measure holds if p < 0.05 after correction for all measures and the interval over layers excludes 0."
    )


def _scatter_panel(swap: Swap, predictor: Predictor, name: Names) -> Panel:
    low, high = (format_number(end, 2) for end in predictor.heads_ci95 or (math.nan, math.nan))
    ends = "" if predictor.heads_ci95 is None else f" [{low}, {high}]"
    note = f"ρ {format_number(predictor.rho, 2)}{ends} over heads; {'holds' if predictor.holds else 'does not hold'}"
    layers = [name(layer) for layer in range(1 + max(unit.layer for unit in swap.sweep))]
    draw = partial(draw_predictor, swap=swap, predictor=predictor)
    return Panel(predictor.measure, clean(predictor.measure), note, "", draw, 9, width=2.1, layers=layers)


def draw_predictor(axes: Axes, swap: Swap, predictor: Predictor) -> None:
    """Plot each head's effect against its value of a measure, coloured by layer; omit heads that lack either."""
    x, y = as_array(predictor.values), as_array(unit.delta for unit in swap.sweep)
    layers = [unit.layer for unit in swap.sweep]
    axes.axhline(0, color=style.MUTED, linewidth=0.6, zorder=0)
    norm = charts.scale_depth(1 + max(layers))
    axes.scatter(x, y, c=layers, cmap=style.DEPTH, norm=norm, s=11, linewidth=0.3, edgecolor="white")
    axes.margins(0.06)
    axes.locator_params(axis="x", nbins=5)
    scale_around_median(axes, "y", y)
    axes.set_xlabel(clean(predictor.measure))
    axes.set_ylabel(f"Δ of the {effect_name(swap)}")


def scale_around_median(axes: Axes, which: Literal["x", "y"], effects: Float[np.ndarray, " units"]) -> None:
    """If the largest effect would hide the median effect, make an axis linear near 0 and logarithmic farther out."""
    usual = float(np.nanmedian(np.abs(effects))) if np.isfinite(effects).any() else 0.0
    if usual > 0 and float(np.nanmax(np.abs(effects))) > SQUASHED * usual:
        (axes.set_xscale if which == "x" else axes.set_yscale)("asinh", linear_width=2 * usual)
        style.label_powers(axes.xaxis if which == "x" else axes.yaxis, 2 * usual)


def _ranks_panel(plan: Plan, number: Names) -> Panel:
    caption = (
        f"Ranks chosen to raise the {BUDGETED[plan.unit]} by at most {100 * plan.budget:g} %: {plan.mean_rank:.1f} of "
        f"{plan.head_dim:g} on average. Query heads that share a key head share its rank; the "
        "rank of a latent of several heads is divided among them."
    )
    caption += " Predicted: on calibration text used neither to fit nor to choose ranks." * (plan.promised is not None)
    layers, heads = len({key.layer for key in plan.ranks}), len({head for key in plan.ranks for head in key.heads})
    wide = float(np.clip(0.4 * heads, 3.4, 8))
    caption += f" {budget_note(plan)}."
    title = f"rank by head, mean {plan.mean_rank:.1f} of {plan.head_dim:g}"
    return Panel(
        "ranks", title, budget_note(plan), caption, partial(draw_ranks, plan=plan, number=number), 2 * layers, wide
    )


def budget_note(plan: Plan) -> str:
    """Format the budget and the known rises: `loss ≤ +1 %: predicted +0.21 %, measured +0.87 %`."""
    rises = {"predicted": plan.promised, "measured": plan.measured, "healed": plan.healed}
    known = ", ".join(f"{name} {share(rise.share)}" for name, rise in rises.items() if rise is not None)
    return f"{plan.unit} ≤ +{100 * plan.budget:g} %" + (f": {known}" if known else "")


def draw_ranks(axes: Axes, plan: Plan, number: Names = str) -> None:
    """Draw each query head's rank, or its share of a latent's rank, as a colour and, if there is room, as a number."""
    cells = [((key.layer, head, key.part), key.rank / key.keys) for key in plan.ranks for head in key.heads]
    grid = charts.grid_of([place for place, _ in cells], (rank for _, rank in cells))
    colours = (style.SEQUENTIAL, Normalize(0, max(key.head_dim / key.keys for key in plan.ranks)), "neither")
    charts.heat_map(axes, grid, colours, "rank r of head_dim", number)
    if max(grid.values.shape) <= MOST_WRITTEN:
        texts = {at: f"{value:.2g}" if value < 10 else f"{value:.0f}" for at, value in np.ndenumerate(grid.values)}
        texts = {at: text for at, text in texts.items() if not np.isnan(grid.values[at])}
        charts.write_cells(axes, texts, grid, colours)


def _healing_panel(swap: Swap, healing: Healing) -> Panel:
    note = "dashed: original; " * (swap.judged_by == "loss") + "dotted: best; hollow: transfer"
    goal = "on the text" if healing.goal == "text" else "towards the original model"
    distance = "KL to the original model" if swap.task != "hidden" else "1 − cosine of the last hidden states"
    caption = f"{clean(swap.kernel)}. {healing.parameters:,} parameters of these heads trained {goal}."
    caption += " Perplexity: of the evaluation text." * (swap.judged_by == "loss")
    caption += f" {'Loss' if healing.goal == 'text' else distance}: on held-out calibration text."
    caption += " Dashed line: the original model." * (swap.judged_by == "loss")
    caption += f" Dotted line: best step, {healing.best}. Hollow: attention transfer."
    return Panel("healing", "healing", note, caption, partial(draw_healing, swap=swap, healing=healing), 14)


def draw_healing(axes: Axes, swap: Swap, healing: Healing) -> None:
    """Draw perplexity and validation distance, if known, against training tokens or, if these are unknown, steps.

    Dots during attention transfer are hollow.
    """
    by_tokens = all(step.tokens is not None for step in healing.curve)
    position = {step.step: int(step.tokens or 0) if by_tokens else step.step for step in healing.curve}
    transfer = {position[step.step] for step in healing.curve if step.stage == "transfer"}
    losses = [(position[step.step], math.exp(step.loss)) for step in healing.curve if step.loss is not None]
    distances = [(position[step.step], step.validation) for step in healing.curve if step.validation is not None]
    places = [axes]
    figure, spec = axes.get_figure(), axes.get_subplotspec()
    if losses and distances and figure is not None and spec is not None:
        halves = spec.subgridspec(2, 1)
        axes.set_subplotspec(halves[0])
        axes.tick_params(labelbottom=False)
        places = [axes, figure.add_subplot(halves[1], sharex=axes)]
        figure.align_ylabels(places)
    if losses:
        _plot(places[0], losses, "perplexity", style.CATEGORIES[0], transfer)
        original = next((stage.loss.before for stage in swap.stages if stage.loss is not None), None)
        if original is not None:
            places[0].axhline(math.exp(original), color=style.INK, **DASHED)
    if distances:
        name = "held-out loss" if healing.goal == "text" else "1 − cosine" if swap.task == "hidden" else "KL, nats"
        _plot(places[-1], distances, name, style.CATEGORIES[2], transfer)
    for place in places:
        place.axvline(position.get(healing.best, healing.best), color=style.MUTED, linewidth=0.8, linestyle=":")
    last = max(position.values(), default=healing.steps) or 1
    # the square root stretches the first steps, which have the largest effect
    axes.set_xscale("function", functions=(lambda x: np.sqrt(np.maximum(x, 0)), np.square))
    axes.set_xlim(0, last * 1.03)
    round_steps = [float(digit * 10**power) for power in range(len(str(last))) for digit in (1, 2, 5)]
    style.thin_ticks(axes.xaxis, [0, *(step for step in round_steps if step < last), last], STEP_GAP)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: big(int(step)) if last >= 20_000 else f"{step:g}"))
    places[-1].set_xlabel(f"{'tokens trained on' if by_tokens else 'optimiser step'}, √ scale")


def _plot(axes: Axes, points: Sequence[tuple[int, float]], name: str, colour: str, hollow: Collection[int]) -> None:
    look: style.Style = {"color": colour, "markersize": 3, "clip_on": False}
    axes.plot(*zip(*points, strict=True), "o-", linewidth=1.2, **look)
    inside = [point for point in points if point[0] in hollow]
    if inside:
        axes.plot(*zip(*inside, strict=True), "o", markerfacecolor="white", zorder=3, **look)
    axes.margins(y=0.12)
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    axes.set_ylabel(name)
