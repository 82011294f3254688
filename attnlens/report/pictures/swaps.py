"""Panels of a swap and the pages that contain them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from attnlens.records import PARTS, Healing, Plan, Report, Swap
from attnlens.report.pictures.maps import heat_map
from attnlens.report.pictures.style import (
    CATEGORIES,
    INK,
    MUTED,
    Panel,
    PlainNumbers,
    figure_of,
    fitted,
    panels_overview,
    size_in_points,
    typeset,
)
from attnlens.report.pictures.swap_effects import (
    draw_kernels,
    draw_lines,
    draw_sites,
    draw_stages,
    draw_sweep,
    drawn_controls,
    effect_of,
    legend_lines,
    legend_of,
    limit,
    name_of,
    names_of,
    of_heads,
)
from attnlens.report.sentences.plans import UNITS as UNITS_OF
from attnlens.report.sentences.plans import share
from attnlens.report.sentences.swaps import EFFECTS, UNITS, cautions, effect_name, formula
from attnlens.wording import big, clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from attnlens.records import Predictor

LEGIBLE = 11.0  # least width and height of a cell, in points, for a legible number


def draw_ranks(axes: Axes, plan: Plan, *, named: bool = True) -> None:
    """Draw every query head's rank as a colour from 0 to head_dim, with its number if there is room."""
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
    bar.set_ticks([tick for tick in bar.get_ticks() if tick <= top])  # remove ticks beyond the scale
    wide, high = size_in_points(axes)
    if min(wide / len(heads), high / len(layers)) >= LEGIBLE:
        for row, column in np.argwhere(~np.isnan(values)):
            ink = "black" if values[row, column] > 0.6 * top else "white"
            axes.text(column, row, f"{values[row, column]:.0f}", ha="center", va="center", fontsize=6, color=ink)


GAP = 0.08  # share of the height between the two axes
LABEL = 36  # points between an axis and its label, so that both labels are aligned
THOUSANDS = 20_000  # numbers from here on are abbreviated as thousands or millions
APART = 0.17  # least distance between two labelled steps, as a share of the width


def draw_healing(axes: Axes, swap: Swap, healing: Healing) -> None:
    """Draw perplexity above and distance below, over tokens; a single measured one gets the whole height.

    Each has its own axis, which need not begin at 0: on a shared one the larger would flatten the smaller. Reports from
    versions that did not count tokens are drawn over optimiser steps. Hollow: during attention transfer.
    """
    by_tokens = all(step.tokens is not None for step in healing.curve)
    position = {step.step: int(step.tokens or 0) if by_tokens else step.step for step in healing.curve}
    transfer = {position[step.step] for step in healing.curve if step.stage == "transfer"}
    losses = [(position[step.step], math.exp(step.loss)) for step in healing.curve if step.loss is not None]
    distances = [(position[step.step], step.validation) for step in healing.curve if step.validation is not None]
    places = [axes]
    if losses and distances:
        axes.set(xticks=[], yticks=[], facecolor="none")
        axes.spines[:].set_visible(False)
        tall = (1 - GAP) / 2
        places = [axes.inset_axes((0, bottom, 1, tall)) for bottom in (1 - tall, 0)]
    if losses:
        _plot(places[0], losses, "perplexity", CATEGORIES[0], transfer)
        original = next((stage.loss.before for stage in swap.stages if stage.loss is not None), None)
        if original is not None:
            places[0].axhline(math.exp(original), color=INK, linewidth=0.9, linestyle=(0, (4, 2)))
    if distances:
        name = "loss, kept back" if healing.goal == "text" else "1 − cosine" if swap.task == "hidden" else "KL, nats"
        _plot(places[-1], distances, name, CATEGORIES[2], transfer)
    last = max(position.values(), default=healing.steps) or 1
    wide, _ = size_in_points(axes)
    for place in places:
        place.yaxis.set_label_coords(-LABEL / wide, 0.5)
        place.axvline(position.get(healing.best, healing.best), color=MUTED, linewidth=0.8, linestyle=":")
        # the square root stretches the first steps, which have the largest effect
        place.set_xscale("function", functions=(lambda x: np.sqrt(np.maximum(x, 0)), np.square))
        place.set_xlim(0, last * 1.03)
        place.xaxis.set_major_locator(FixedLocator(named_steps(last)))
        place.xaxis.set_minor_locator(NullLocator())
        place.xaxis.set_major_formatter(PlainNumbers() if last < THOUSANDS else FuncFormatter(_abbreviate))
    for place in places[:-1]:
        place.tick_params(labelbottom=False)
    places[-1].set_xlabel(f"{'tokens trained on' if by_tokens else 'optimiser step'}, √ scale", labelpad=1.5)


def _plot(axes: Axes, points: Sequence[tuple[int, float]], name: str, colour: str, hollow: Collection[int]) -> None:
    axes.plot(*zip(*points, strict=True), "o-", color=colour, markersize=3, linewidth=1.2, clip_on=False)
    inside = [point for point in points if point[0] in hollow]
    if inside:
        (marks,) = axes.plot(*zip(*inside, strict=True), "o", color=colour, markersize=3, clip_on=False, zorder=3)
        marks.set_markerfacecolor("white")
    axes.margins(y=0.12)
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(PlainNumbers())
    axes.set_ylabel(name, labelpad=2)
    axes.spines[["top", "right"]].set_visible(False)


def _abbreviate(number: float, _place: int | None = None) -> str:
    """Format thousands or millions with three digits: 196 k, 2 M."""
    unit, name = (1e6, " M") if number >= 1e6 else (1e3, " k")
    return f"{number / unit:.3g}{name}" if number else "0"


def named_steps(last: int) -> list[int]:
    """Return 0, the last step and as many of 1, 2, 5, 10, … between them as keep a distance on the √ scale."""
    named = [last]
    round_steps = [digit * 10**power for power in range(len(str(last))) for digit in (1, 2, 5)]
    for step in sorted(round_steps, reverse=True):
        if step < last and min(np.sqrt(named[-1]) - np.sqrt(step), np.sqrt(step)) >= APART * np.sqrt(last):
            named.append(step)
    return [0, *reversed(named)]


ASKED = ("tokens.share_positive", "tokens.share_skew", "tokens.share_key", "ksvd.rank90", "tokens.entropy")
"""Measures that are always drawn if the model has them."""
PICTURES, ACROSS = 6, 3  # number of drawn measures, filled up with the strongest others, and how many per row
LAYERS = "viridis"
SQUASHED = 30.0
"""Ratio of the largest to the median effect above which the axis of effects is asinh."""


def missing(swap: Swap) -> str:
    """Explain why measures in ASKED are not drawn; empty if all are."""
    reasons = {} if swap.prediction is None else swap.prediction.left_out
    why = [f"{name}: {clean(reasons[name])}" for name in ASKED if name in reasons]
    return f" Not drawn: {'; '.join(why)}." if why else ""


def strongest(swap: Swap) -> Predictor:
    """Return the measure with the largest |ρ| among those that hold, or among all if none holds."""
    holding = [predictor for predictor in swap.predictors if predictor.holds]
    return max(holding or swap.predictors, key=lambda predictor: abs(predictor.rho))


def draw_strongest(axes: Axes, swap: Swap) -> None:
    """Draw the harm against the measure most strongly associated with it."""
    _scatter(axes, swap, strongest(swap), size=13)
    axes.set_xlabel(clean(strongest(swap).measure), labelpad=1.5, color=INK)
    axes.set_ylabel(f"Δ of the {EFFECTS[swap.judged_by]}", color=INK)
    _layer_bar(axes, swap)


def draw_predictors(axes: Axes, swap: Swap) -> None:
    """Draw one scatter plot per measure, in rows."""
    axes.set_axis_off()
    figure, box = figure_of(axes), axes.get_position()
    # measures in ASKED first, then the strongest others
    by_name = {each.measure: each for each in swap.predictors}
    first = [by_name[name] for name in ASKED if name in by_name]
    others = sorted((each for each in swap.predictors if each not in first), key=lambda each: -abs(each.rho))
    shown = [*first, *others][:PICTURES]
    rows = -(-len(shown) // ACROSS)
    tall, wide = box.height / rows, box.width / ACROSS
    for number, each in enumerate(shown):
        row, column = divmod(number, ACROSS)
        bottom = box.y1 - (row + 1) * tall
        inner = figure.add_axes((box.x0 + column * wide + 0.12 * wide, bottom + 0.2 * tall, 0.8 * wide, 0.6 * tall))
        _scatter(inner, swap, each, size=9)
        inner.set_title(fitted(clean(each.measure), 34), fontsize=7.5, pad=13, color=INK, weight="bold")
        inner.annotate(_note(each), (0, 1), (0, 4), xycoords="axes fraction", textcoords="offset points", fontsize=6.5)
        if column == 0:
            inner.set_ylabel(f"Δ of the {EFFECTS[swap.judged_by]}", color=INK, fontsize=7)
        inner.tick_params(labelsize=6.5)
    _layer_bar(axes, swap)


def _note(predictor: Predictor) -> str:
    """Format a predictor as `ρ 0.87 [0.71, 0.93] over heads; holds`."""
    low, high = (typeset(end, 2) for end in predictor.heads_ci95 or (float("nan"),) * 2)
    ends = "" if predictor.heads_ci95 is None else f" [{low}, {high}]"
    verdict = "holds" if predictor.holds else "does not hold"
    return f"ρ {typeset(predictor.rho, 2)}{ends} over heads; {verdict}"


def _scatter(axes: Axes, swap: Swap, predictor: Predictor, size: float) -> None:
    """Draw one dot per head; heads that lack the measure or diverged are left out."""
    x, y = _numbers(predictor.values), _numbers(effect.delta for effect in swap.sweep)
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
    """Draw the colour bar of the layers next to the axes."""
    figure, box = figure_of(axes), axes.get_position()
    width = float(figure.get_size_inches()[0])
    beside = figure.add_axes((box.x1 + 0.12 / width, box.y0, 0.09 / width, box.height))
    bar = figure.colorbar(ScalarMappable(_norm(swap), colormaps[LAYERS]), cax=beside, ticks=MaxNLocator(integer=True))
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=6)
    bar.ax.set_title("layer", fontsize=6.5, pad=3)


RISES = {"loss": "rise of the loss", "kl": "KL to the original", "hidden": "distance of the last hidden states"}
"""Quantity shown in a comparison of kernels."""
ERROR = "‖new − own‖ / ‖own‖ of the site's output on the original model's queries, keys and values"


def panels(report: Report) -> list[Panel]:
    """Build the panels of the overview, in order."""
    return list(_comparison_panels(report) if len(report.swaps) > 1 else _swap_panels(report.swaps[0], report.plan))


def swap_overview(report: Report) -> Figure:
    """Draw all panels on a page; a comparison of kernels is placed above the others."""
    model, swap = report.model, report.swaps[0]
    what, how = ("several kernels", "") if len(report.swaps) > 1 else (clean(swap.kernel), formula(swap))
    # the formula comes last: if the line is too long, it is cut, but never the coverage of heads
    size = f"{big(model.parameters)} parameters"
    facts = (clean(model.architecture), size, what, clean(report.coverage.sentence), how)
    made = (clean(report.settings.fed), f"{clean(report.tool.name)} {clean(report.tool.version)}")
    return panels_overview(panels(report), model.title, facts, made, crowned=len(report.swaps) > 1)


def swap_panels(report: Report) -> list[Panel]:
    """Build the panels that get their own files; if several kernels were swept, each has its own sweep."""
    chosen = [panel for panel in panels(report) if panel.stem not in ("stages", "sweep", "predictor")]
    swept = [swap for swap in report.swaps if swap.sweep]
    names = [f"sweep-{clean(swap.kernel)}" if len(report.swaps) > 1 else "sweep" for swap in swept]
    chosen += [_sweep_panel(swap, name) for swap, name in zip(swept, names, strict=True)]
    return chosen + [_predictors_panel(swap, several=len(report.swaps) > 1) for swap in swept if swap.predictors]


def _swap_panels(swap: Swap, plan: Plan | None) -> Iterator[Panel]:
    lossy = swap.judged_by == "loss"
    name = "loss by stage" if lossy else "distance by stage"
    controls = drawn_controls(swap)
    note = f"{'in %: perplexity, ' if lossy else 'bars: '}95 % interval; dashed: the original"
    note = "in %: perplexity, 95 % interval; grey: controls" if controls else note
    left = 0.2 + 0.062 * max(len(line) for name in names_of(swap) for line in name.splitlines())
    rows = 2 * (1 + len(swap.stages) + len(controls)) if controls else 1
    yield Panel("stages", name, note, "", partial(draw_stages, swap=swap), rows, left=max(0.62, left))
    note = "on the original's queries, keys and values"
    yield Panel("sites", "output error by layer", note, f"{ERROR}.", partial(draw_sites, swap=swap), len(swap.sites))
    if plan is not None:
        yield _ranks_panel(plan)
    if swap.sweep:
        yield _sweep_panel(swap, "sweep")
    if swap.predictors:
        yield _predictor_panel(swap)
    if swap.healing is not None:
        yield _healing_panel(swap, swap.healing)


def _comparison_panels(report: Report) -> Iterator[Panel]:
    swaps, lossy = report.swaps, report.swaps[0].judged_by == "loss"
    what = RISES[swaps[0].judged_by]
    caption = f"{what[0].upper()}{what[1:]} with each kernel in every chosen head."
    caption += (
        f" Bars: {'paired ' if lossy else ''}bootstrap 95 % intervals over {report.settings.intervals or 'inputs'}."
    )
    caption = " ".join([caption, *cautions(swaps)])
    lines = legend_lines([swap.kernel for swap in swaps])
    left = 0.25 + 0.062 * max(len(line) for swap in swaps for line in name_of(swap).splitlines())
    note = legend_of(swaps) if any(effect_of(swap) is not None for swap in swaps) else "no kernel has a value"
    yield Panel("kernels", what, note, caption, partial(draw_kernels, swaps=swaps), 2 * len(swaps) + 2, left)
    errors = [(swap.kernel, _numbers(site.output_error for site in swap.sites)) for swap in swaps]
    draw = partial(draw_lines, lines=errors, label="‖new − own‖ / ‖own‖")
    yield Panel("sites", "output error by layer", "", f"{ERROR}.", draw, 12, legend=lines)
    swept = [swap for swap in report.swaps if swap.sweep]
    if swept and not any(map(of_heads, swept)):
        by_layer = [(swap.kernel, sorted(swap.sweep, key=lambda effect: effect.layer)) for swap in swaps]
        harms = [(kernel, _numbers(effect.delta for effect in effects)) for kernel, effects in by_layer]
        draw = partial(draw_lines, lines=harms, label=f"Δ of the {effect_name(swaps[0])}", zero=True)
        yield Panel("sweep", "each layer alone", "", "", draw, 12, legend=lines)


def _numbers(values: Iterable[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values])


def _sweep_panel(swap: Swap, stem: str) -> Panel:
    heads = of_heads(swap)
    quiet = "grey dot" if heads else "hollow"
    tested = swap.judged_by == "loss"
    note = f"Δ of the {EFFECTS[swap.judged_by]}"
    note += f"; {quiet}: not significant at FDR 5 %" * tested
    remarks = " Crossed: diverged." if heads and any(effect.delta is None for effect in swap.sweep) else ""
    beyond = heads and limit(_numbers(effect.delta for effect in swap.sweep))[1] != "neither"
    remarks += " A number: an effect beyond the last colour." * beyond
    unit = "head" if heads else "layer"
    caption = (
        f"{clean(swap.kernel)}. Δ of the {effect_name(swap)}, where that {unit} alone has the kernel. "
        + f"{quiet[0].upper()}{quiet[1:]}: not significant at a false discovery rate of 5 %." * tested
        + remarks
    )
    layers = len({effect.layer for effect in swap.sweep})
    columns = len({effect.head for effect in swap.sweep})
    wide = float(np.clip(0.36 * columns, 3.4, 8)) if heads else 4.6
    return Panel(
        stem, f"each {unit} alone", note, caption, partial(draw_sweep, swap=swap), layers, wide=wide, bar=heads
    )


def _predictor_panel(swap: Swap) -> Panel:
    predictor = strongest(swap)
    verdict = "holds" if predictor.holds else "does not hold"
    note = f"ρ {typeset(predictor.rho, 2)} over {predictor.heads} heads; {verdict}"
    return Panel("predictor", "what predicts harm", note, "", partial(draw_strongest, swap=swap), left=0.62, bar=True)


def _predictors_panel(swap: Swap, *, several: bool) -> Panel:
    caption = (
        f"{clean(swap.kernel)}. Δ of the {effect_name(swap)} where one head alone has the kernel, against measures of "
        "that head on the same windows; a dot a head. ρ: Spearman's, with a bootstrap 95 % interval over heads; it "
        "holds where p < 0.05 after correction for all measures and the interval over layers lies on one side of 0."
        + missing(swap)
    )
    title = f"what predicts the harm of {clean(swap.kernel)}"
    draw = partial(draw_predictors, swap=swap)
    stem = f"predictors-{clean(swap.kernel)}" if several else "predictors"
    return Panel(stem, title, "", caption, draw, 24, wide=7.6, bar=True)


def _ranks_panel(plan: Plan) -> Panel:
    caption = (
        f"Ranks chosen for a rise of the {UNITS_OF[plan.unit]} by {100 * plan.budget:g} % at most: "
        f"{plan.mean_rank:.1f} of {plan.head_dim:g} in the mean. Query heads that share a key head share its rank."
        + " Promised: on calibration text that neither fitted nor chose them."
        * (plan.promised is not None)
    )
    layers, heads = len({key.layer for key in plan.ranks}), len({head for key in plan.ranks for head in key.heads})
    wide = float(np.clip(0.36 * heads, 3.4, 8))
    title = f"rank by head, mean {plan.mean_rank:.1f} of {plan.head_dim:g}"
    return Panel("ranks", title, _kept(plan), caption, partial(draw_ranks, plan=plan), layers, wide=wide, bar=True)


def _kept(plan: Plan) -> str:
    """Format `loss ≤ +1 %: promised +0.21 %, measured +0.87 %`, as far as known; `ppl` is short for perplexity."""
    rises = {"promised": plan.promised, "measured": plan.measured, "healed": plan.healed}
    found = ", ".join(f"{name} {share(rise.share)}" for name, rise in rises.items() if rise is not None)
    return f"{plan.unit} ≤ +{100 * plan.budget:g} %" + (f": {found}" if found else "")


def _healing_panel(swap: Swap, healing: Healing) -> Panel:
    hollow = (
        " Hollow: attention transfer." if any(one.stage == "transfer" and one.steps for one in healing.stages) else ""
    )
    goal = " on the text" if healing.goal == "text" else " towards the original model"
    note = "hollow: transfer" if hollow else "dotted: step kept"
    note = f"dashed: the original; {note}" if swap.judged_by == "loss" else note
    caption = (
        f"{clean(swap.kernel)}. {healing.parameters:,} numbers of these heads trained{goal}. "
        f"{_describe_healing(swap)}. Step {healing.best} was kept.{hollow}"
    )
    draw = partial(draw_healing, swap=swap, healing=healing)
    return Panel("healing", "healing", note, caption, draw, 14, left=0.62)


def _describe_healing(swap: Swap) -> str:
    """Describe the curves of a healing: quantity, text and unit."""
    if swap.task == "hidden":
        return "1 − cosine of the last hidden states and the original's, on calibration text kept back from training"
    loss = "Perplexity: of the evaluation text. " if swap.judged_by == "loss" else ""
    if swap.healing is not None and swap.healing.goal == "text":
        return f"{loss}Loss: on calibration text kept back from training, in {UNITS[swap.task]}"
    return f"{loss}KL: to the original, on calibration text kept back from training, in {UNITS[swap.task]}"
