"""How near does healing come, step by step? Loss and validation distance, with the original's loss as a line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import FixedLocator, NullLocator

from attnlens.plots.style import CATEGORIES, INK, MUTED, PlainNumbers, legend_above
from attnlens.tables.swaps.facts import UNITS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from attnlens.records import Healing, Swap

ROUND = (0, 50, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
"""Steps that may be named along the axis."""


def draw_healing(axes: Axes, swap: Swap, healing: Healing) -> None:
    """Both in nats, so that they share an axis; steps are spread as their square root, since the first ones do most."""
    losses = [(step.step, step.loss) for step in healing.curve if step.loss is not None]
    distances = [(step.step, step.validation) for step in healing.curve if step.validation is not None]
    own = next((stage.loss.before for stage in swap.stages if stage.loss is not None), None)
    if losses:
        axes.plot(
            *zip(*losses, strict=True),
            "o-",
            color=CATEGORIES[0],
            markersize=4,
            linewidth=1.2,
            label="loss",
            clip_on=False,
        )
    if distances:
        axes.plot(
            *zip(*distances, strict=True),
            "s-",
            color=CATEGORIES[2],
            markersize=2.6,
            linewidth=1,
            clip_on=False,
            label="1 − cosine" if swap.task == "hidden" else "KL, kept-back text",
        )
    if losses and own is not None:
        axes.axhline(own, color=INK, linewidth=0.9, linestyle=(0, (4, 2)), label="original's loss")
    axes.axvline(healing.best, color=MUTED, linewidth=0.6, linestyle=":", label="step kept")
    _label_steps(axes, healing)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PlainNumbers())
    axes.set_ylabel("1 − cosine" if swap.task == "hidden" else UNITS[swap.task], labelpad=2)
    axes.spines[["top", "right"]].set_visible(False)
    legend_above(axes, 2, handlelength=1.4)


def _label_steps(axes: Axes, healing: Healing) -> None:
    last = max([step.step for step in healing.curve], default=healing.steps) or 1
    axes.set_xscale("function", functions=(lambda x: np.sqrt(np.maximum(x, 0)), np.square))
    axes.set_xlim(0, last * 1.03)
    named = [step for step in ROUND if step <= 0.8 * last]
    axes.xaxis.set_major_locator(FixedLocator([*named, last]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(PlainNumbers())
    axes.set_xlabel("step", labelpad=1.5)
