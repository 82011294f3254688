"""The panels of a swap: stages, sites, sweep, healing, several kernels."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from attnlens.plots.captions import typeset
from attnlens.plots.page import Panel
from attnlens.plots.panel_pages import panels_overview
from attnlens.plots.swaps.healing import draw_healing
from attnlens.plots.swaps.kernels import draw_kernels, effect_of, legend_of, name_of
from attnlens.plots.swaps.predictors import draw_predictors, draw_strongest, missing, strongest
from attnlens.plots.swaps.ranks import draw_ranks
from attnlens.plots.swaps.sites import draw_lines, draw_sites, legend_lines
from attnlens.plots.swaps.stages import draw_stages, drawn_controls, names_of
from attnlens.plots.swaps.sweeps import draw_sweep, limit, of_heads
from attnlens.records import Healing, Plan, Report, Swap
from attnlens.sentences.swaps.controls import EFFECTS, UNITS, effect_name
from attnlens.sentences.swaps.effects import cautions, formula
from attnlens.sentences.swaps.plans import UNITS as UNITS_OF
from attnlens.sentences.swaps.plans import share
from attnlens.wording import big, clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RISES = {"loss": "rise of the loss", "kl": "KL to the original", "hidden": "distance of the last hidden states"}
"""What a comparison of kernels shows."""
ERROR = "‖new − own‖ / ‖own‖ of the site's output on the original model's queries, keys and values"


def panels(report: Report) -> list[Panel]:
    """The panels of the overview, in order."""
    return list(_several(report) if report.more_swaps else _one(report.swaps[0], report.plan))


def swap_overview(report: Report) -> Figure:
    """All panels on a page, a comparison of kernels over the others."""
    model, swap = report.model, report.swaps[0]
    what, how = ("several kernels", "") if report.more_swaps else (clean(swap.kernel), formula(swap))
    # the formula last: where they are too long for a line, it is what is cut, never whether all heads were reached
    size = f"{big(model.parameters)} parameters"
    facts = (clean(model.architecture), size, what, clean(report.coverage.sentence), how)
    made = (clean(report.settings.fed), f"{clean(report.tool.name)} {clean(report.tool.version)}")
    return panels_overview(panels(report), model.title, facts, made, crowned=bool(report.more_swaps))


def swap_panels(report: Report) -> list[Panel]:
    """The panels that get files of their own; where several kernels were swept, each has its own sweep."""
    found = [panel for panel in panels(report) if panel.stem not in ("stages", "sweep", "predictor")]
    swept = [swap for swap in report.swaps if swap.sweep]
    names = [f"sweep-{clean(swap.kernel)}" if report.more_swaps else "sweep" for swap in swept]
    found += [_sweep(swap, name) for swap, name in zip(swept, names, strict=True)]
    return found + [_predictors(swap, several=bool(report.more_swaps)) for swap in swept if swap.predictors]


def _one(swap: Swap, plan: Plan | None) -> Iterator[Panel]:
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
        yield _ranks(plan)
    if swap.sweep:
        yield _sweep(swap, "sweep")
    if swap.predictors:
        yield _predictor(swap)
    if swap.healing is not None:
        yield _healing(swap, swap.healing)


def _several(report: Report) -> Iterator[Panel]:
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
    yield Panel("sites", "output error by layer", "", f"{ERROR}.", partial(_site_lines, swaps=swaps), 12, legend=lines)
    swept = [swap for swap in report.swaps if swap.sweep]
    if swept and not any(map(of_heads, swept)):
        yield Panel("sweep", "each layer alone", "", "", partial(_sweep_lines, swaps=swaps), 12, legend=lines)


def _sweep(swap: Swap, stem: str) -> Panel:
    heads = of_heads(swap)
    quiet = "grey dot" if heads else "hollow"
    tested = swap.judged_by == "loss"
    note = f"Δ of the {EFFECTS[swap.judged_by]}"
    note += f"; {quiet}: not significant at FDR 5 %" * tested
    lost = " Crossed: diverged." if heads and any(effect.delta is None for effect in swap.sweep) else ""
    beyond = heads and limit(np.array([np.nan if e.delta is None else e.delta for e in swap.sweep]))[1] != "neither"
    lost += " A number: an effect beyond the last colour." * beyond
    if swap.prediction is not None and swap.prediction.order is not None and swap.prediction.order.not_swept:
        note, lost = f"{note}; hatched: not swept", f"{lost} Hatched: not swept."
    unit = "head" if heads else "layer"
    caption = (
        f"{clean(swap.kernel)}. Δ of the {effect_name(swap)}, where that {unit} alone has the kernel. "
        + f"{quiet[0].upper()}{quiet[1:]}: not significant at a false discovery rate of 5 %." * tested
        + lost
    )
    layers = len({effect.layer for effect in swap.sweep})
    columns = len({effect.head for effect in swap.sweep})
    wide = float(np.clip(0.36 * columns, 3.4, 8)) if heads else 4.6
    return Panel(
        stem, f"each {unit} alone", note, caption, partial(draw_sweep, swap=swap), layers, wide=wide, bar=heads
    )


def _predictor(swap: Swap) -> Panel:
    one = strongest(swap)
    verdict = "holds" if one.holds else "does not hold"
    note = f"ρ {typeset(one.rho, 2)} over {one.heads} heads; {verdict}"
    return Panel("predictor", "what predicts harm", note, "", partial(draw_strongest, swap=swap), left=0.62, bar=True)


def _predictors(swap: Swap, *, several: bool) -> Panel:
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


def _ranks(plan: Plan) -> Panel:
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
    """`loss ≤ +1 %: promised +0.21 %, measured +0.87 %`, as much of it as is known; `ppl` for perplexity, for room."""
    rises = {"promised": plan.promised, "measured": plan.measured, "healed": plan.healed}
    found = ", ".join(f"{name} {share(rise.share)}" for name, rise in rises.items() if rise is not None)
    return f"{plan.unit} ≤ +{100 * plan.budget:g} %" + (f": {found}" if found else "")


def _healing(swap: Swap, healing: Healing) -> Panel:
    hollow = _hollow(healing)
    note = "hollow: transfer" if hollow else "dotted: step kept"
    note = f"dashed: the original; {note}" if swap.judged_by == "loss" else note
    caption = (
        f"{clean(swap.kernel)}. {healing.parameters:,} numbers of these heads trained{_goal(healing)}. "
        f"{_healed_by(swap)}. Step {healing.best} was kept.{hollow}"
    )
    draw = partial(draw_healing, swap=swap, healing=healing)
    return Panel("healing", "healing", note, caption, draw, 14, left=0.62)


def _hollow(healing: Healing) -> str:
    return (
        " Hollow: attention transfer." if any(one.stage == "transfer" and one.steps for one in healing.stages) else ""
    )


def _goal(healing: Healing) -> str:
    return " on the text" if healing.goal == "text" else " towards the original model"


def _healed_by(swap: Swap) -> str:
    """What the curves of a healing are, in which unit and on which text."""
    if swap.task == "hidden":
        return "1 − cosine of the last hidden states and the original's, on calibration text kept back from training"
    loss = "Perplexity: of the evaluation text. " if swap.judged_by == "loss" else ""
    if swap.healing is not None and swap.healing.goal == "text":
        return f"{loss}Loss: on calibration text kept back from training, in {UNITS[swap.task]}"
    return f"{loss}KL: to the original, on calibration text kept back from training, in {UNITS[swap.task]}"


def _site_lines(axes: Axes, *, swaps: list[Swap]) -> None:
    lines = []
    for swap in swaps:
        values = [np.nan if site.output_error is None else site.output_error for site in swap.sites]
        lines.append((swap.kernel, np.array(values)))
    draw_lines(axes, lines, "‖new − own‖ / ‖own‖")


def _sweep_lines(axes: Axes, *, swaps: list[Swap]) -> None:
    lines = []
    for swap in swaps:
        effects = sorted(swap.sweep, key=lambda effect: effect.layer)
        values = [np.nan if effect.delta is None else effect.delta for effect in effects]
        lines.append((swap.kernel, np.array(values)))
    axes.axhline(0, color="#999999", linewidth=0.6, zorder=0)
    draw_lines(axes, lines, f"Δ of the {effect_name(swaps[0])}")
