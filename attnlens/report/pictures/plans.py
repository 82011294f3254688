"""Pictures of a swap's plan and training: the ranks of key heads, and the healing of swapped ones."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import Normalize
from matplotlib.ticker import FuncFormatter, MaxNLocator

from attnlens.records import Healing, Plan, Swap
from attnlens.report.pictures.charts import grid_of, heat_map, write_cells
from attnlens.report.pictures.page import Panel
from attnlens.report.pictures.style import CATEGORIES, INK, MUTED, Style, thin_ticks
from attnlens.report.sentences.plans import UNITS as UNITS_OF
from attnlens.report.sentences.plans import share
from attnlens.report.sentences.swaps import UNITS
from attnlens.wording import big, clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_WRITTEN = 24  # number of layers or heads up to which a cell has room for its number


# --- ranks of a plan --------------------------------------------------------------------------------------------------


def ranks_panel(plan: Plan) -> Panel:
    """Build the map of the plan's ranks."""
    caption = (
        f"Ranks chosen for a rise of the {UNITS_OF[plan.unit]} by {100 * plan.budget:g} % at most: "
        f"{plan.mean_rank:.1f} of {plan.head_dim:g} in the mean. Query heads that share a key head share its rank."
        + " Promised: on calibration text that neither fitted nor chose them."
        * (plan.promised is not None)
    )
    layers, heads = len({key.layer for key in plan.ranks}), len({head for key in plan.ranks for head in key.heads})
    wide = float(np.clip(0.4 * heads, 3.4, 8))
    title = f"rank by head, mean {plan.mean_rank:.1f} of {plan.head_dim:g}"
    draw = partial(draw_ranks, plan=plan)
    return Panel("ranks", title, budget_note(plan), caption, draw, 2 * layers, wide)


def budget_note(plan: Plan) -> str:
    """Format `loss ≤ +1 %: promised +0.21 %, measured +0.87 %`, as far as known; `ppl` is short for perplexity."""
    rises = {"promised": plan.promised, "measured": plan.measured, "healed": plan.healed}
    known = ", ".join(f"{name} {share(rise.share)}" for name, rise in rises.items() if rise is not None)
    return f"{plan.unit} ≤ +{100 * plan.budget:g} %" + (f": {known}" if known else "")


def draw_ranks(axes: Axes, plan: Plan) -> None:
    """Draw every query head's rank as a colour from 0 to head_dim, with its number if there is room."""
    cells = [((key.layer, head, key.part), key.rank / key.keys) for key in plan.ranks for head in key.heads]
    grid = grid_of([place for place, _ in cells], (rank for _, rank in cells))
    top = max(key.head_dim / key.keys for key in plan.ranks)
    colours = (colormaps["viridis"], Normalize(0, top), "neither")
    heat_map(axes, grid, colours, "rank r of head_dim")
    if max(grid.values.shape) <= MOST_WRITTEN:
        texts = {at: f"{value:.0f}" for at, value in np.ndenumerate(grid.values) if not np.isnan(value)}
        write_cells(axes, texts, grid, colours)


# --- healing ----------------------------------------------------------------------------------------------------------

KEPT_BACK = "on calibration text kept back from training"
GAP = 0.17  # least distance between two labelled steps, as a share of the width


def healing_panel(swap: Swap, healing: Healing) -> Panel:
    """Build the picture of perplexity and distance while the swapped heads are trained."""
    transferred = any(stage.stage == "transfer" and stage.steps for stage in healing.stages)
    note = "hollow: transfer" if transferred else "dotted: step kept"
    note = f"dashed: the original; {note}" if swap.judged_by == "loss" else note
    goal = " on the text" if healing.goal == "text" else " towards the original model"
    quantity = f"KL: to the original, {KEPT_BACK}, in {UNITS[swap.task]}"
    if swap.task == "hidden":
        quantity = f"1 − cosine of the last hidden states and the original's, {KEPT_BACK}"
    elif healing.goal == "text":
        quantity = f"Loss: {KEPT_BACK}, in {UNITS[swap.task]}"
    has_perplexity = swap.task != "hidden" and swap.judged_by == "loss"
    caption = (
        f"{clean(swap.kernel)}. {healing.parameters:,} numbers of these heads trained{goal}. "
        f"{'Perplexity: of the evaluation text. ' * has_perplexity}{quantity}. "
        f"Step {healing.best} was kept (dotted line).{' Hollow: attention transfer.' * transferred}"
    )
    return Panel("healing", "healing", note, caption, partial(draw_healing, swap=swap, healing=healing), 14)


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
    figure, spec = axes.get_figure(), axes.get_subplotspec()
    if losses and distances and figure is not None and spec is not None:
        halves = spec.subgridspec(2, 1)
        axes.set_subplotspec(halves[0])
        axes.tick_params(labelbottom=False)
        places = [axes, figure.add_subplot(halves[1], sharex=axes)]
        figure.align_ylabels(places)
    if losses:
        _plot(places[0], losses, "perplexity", CATEGORIES[0], transfer)
        original = next((stage.loss.before for stage in swap.stages if stage.loss is not None), None)
        if original is not None:
            places[0].axhline(math.exp(original), color=INK, linewidth=0.9, linestyle=(0, (4, 2)))
    if distances:
        name = "loss, kept back" if healing.goal == "text" else "1 − cosine" if swap.task == "hidden" else "KL, nats"
        _plot(places[-1], distances, name, CATEGORIES[2], transfer)
    for place in places:
        place.axvline(position.get(healing.best, healing.best), color=MUTED, linewidth=0.8, linestyle=":")
    last = max(position.values(), default=healing.steps) or 1
    # the square root stretches the first steps, which have the largest effect
    axes.set_xscale("function", functions=(lambda x: np.sqrt(np.maximum(x, 0)), np.square))
    axes.set_xlim(0, last * 1.03)
    round_steps = [float(digit * 10**power) for power in range(len(str(last))) for digit in (1, 2, 5)]
    thin_ticks(axes.xaxis, [0, *(step for step in round_steps if step < last), last], GAP)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: big(int(step)) if last >= 20_000 else f"{step:g}"))
    places[-1].set_xlabel(f"{'tokens trained on' if by_tokens else 'optimiser step'}, √ scale")


def _plot(axes: Axes, points: Sequence[tuple[int, float]], name: str, colour: str, hollow: Collection[int]) -> None:
    axes.plot(*zip(*points, strict=True), "o-", color=colour, markersize=3, linewidth=1.2, clip_on=False)
    inside = [point for point in points if point[0] in hollow]
    if inside:
        look: Style = {"color": colour, "markerfacecolor": "white", "markersize": 3, "clip_on": False, "zorder": 3}
        axes.plot(*zip(*inside, strict=True), "o", **look)
    axes.margins(y=0.12)
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    axes.set_ylabel(name)
