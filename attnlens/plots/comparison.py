"""Pictures of a comparison: where the heads differ, and how large and how certain each change is."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import LogNorm

from attnlens.plots.maps import heat_map
from attnlens.plots.page import Panel, panels_overview
from attnlens.plots.style import CATEGORIES, INK, MUTED, PlainNumbers, Powers, legend_above, size_in_points
from attnlens.records import PARTS
from attnlens.sentences.comparisons import LOCAL, effect_sizes, worth
from attnlens.wording import clean, source_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from attnlens.records import Comparison, Report

LEAST_Q = 1e-20
"""What is surer stands at the top of the picture."""
WHOLE_RANGE = 1e6
"""From the largest distance down: what is smaller has the last colour."""


def comparison_overview(report: Report) -> Figure:
    """Both panels on a page."""
    found = _comparison(report)
    facts = (f"against {found.base.title}", clean(report.coverage.sentence))
    made = (clean(report.settings.fed), f"{clean(report.tool.name)} {clean(report.tool.version)}")
    return panels_overview(comparison_panels(report), report.model.title, facts, made)


def comparison_panels(report: Report) -> list[Panel]:
    """A map of the distance that tells most of where heads differ, and a volcano of all measures."""
    found = _comparison(report)
    if not found.rows:
        return []
    panels = []
    for name in worth(found)[:1]:
        title = f"where heads differ: {LOCAL[name]}"
        note = "dots: named; hatched: no change at all"
        caption = "Logarithmic colours; of a KL each head's mean over queries and windows, in nats."
        rows = len({row.layer for row in found.rows})
        draw = partial(_draw_map, found=found, name=name)
        panels.append(Panel("differences", title, note, caption, draw, rows, bar=True))
    caption = "One dot a head and measure; size in interquartile ranges of the measure over the first model's heads."
    panels.append(Panel("volcano", "size against certainty", "", caption, partial(_draw_volcano, found=found)))
    return panels


def _comparison(report: Report) -> Comparison:
    found = report.comparison
    assert found is not None  # noqa: S101
    return found


def _draw_map(axes: Axes, found: Comparison, name: str) -> None:
    parts = {head.layer: head.part for head in found.heads}
    layers = sorted(parts, key=lambda layer: (PARTS.index(parts[layer]), layer))
    heads = sorted({head.head for head in found.heads})
    values = np.full((len(layers), len(heads)), np.nan)
    marked = []
    for row in found.rows:
        if row.measure == name and row.delta is not None and row.delta > 0:
            place = layers.index(row.layer), heads.index(row.head)
            values[place] = row.delta
            marked += [place] * row.named
    most = float(np.nanmax(values)) if np.isfinite(values).any() else 1.0
    least = max(float(np.nanmin(values)) if np.isfinite(values).any() else 0.0, most / WHOLE_RANGE)
    scale = (colormaps["viridis"], LogNorm(min(least, most / 10), most), "min")
    bar = heat_map(axes, values, layers, heads, [parts[layer] for layer in layers], scale, named=True)
    bar.formatter = Powers()
    bar.minorticks_off()
    bar.update_ticks()
    wide, high = size_in_points(axes)
    size = min(wide / len(heads), high / len(layers)) / 3
    if marked:
        rows, columns = np.array(marked).T
        axes.scatter(columns, rows, s=min(size, 5.0) ** 2, color="white", edgecolor=INK, linewidth=0.4, zorder=2)


def _draw_volcano(axes: Axes, found: Comparison) -> None:
    sizes = effect_sizes(found)
    sources = dict.fromkeys(source_of(name) for name in sizes)
    for source, colour in zip(sources, (CATEGORIES[0], CATEGORIES[2], *CATEGORIES[4:]), strict=False):
        rows = [row for row in found.rows if source_of(row.measure) == source and row.measure in sizes]
        points = [
            (row.delta / sizes[row.measure], row.q) for row in rows if row.delta is not None and row.q is not None
        ]
        if points:
            x, q = np.array(points, dtype=float).T
            sure = -np.log10(np.clip(q, LEAST_Q, None))
            axes.scatter(x, sure, s=6, color=colour, alpha=0.6, linewidth=0, label=f"{source}.*", rasterized=True)
    level = f"named above q = {found.fdr:g}"
    axes.axhline(-np.log10(found.fdr), color=MUTED, linewidth=0.6, linestyle="--", label=level)
    axes.axvline(0, color=MUTED, linewidth=0.4)
    axes.set_xscale("symlog", linthresh=0.1)
    axes.xaxis.set_major_formatter(PlainNumbers())
    axes.set_xlabel("second − first, in interquartile ranges over heads", labelpad=1.5)
    axes.set_ylabel("−log₁₀ q")
    axes.set_ylim(-0.02 * -np.log10(LEAST_Q), 1.04 * -np.log10(LEAST_Q))
    legend_above(axes, 4)
