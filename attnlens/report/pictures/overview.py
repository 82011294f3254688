"""Overview of a report: maps, shares, margins of selection and curves on one page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from attnlens.choices import WHERE_POSED
from attnlens.errors import UsageError
from attnlens.report.pictures.charts import hatch_box, label_layers
from attnlens.report.pictures.maps import (
    depth_panels,
    fan_panel,
    heading,
    layout_line,
    map_panel,
    short_caption,
    short_curve_caption,
    source_heading,
)
from attnlens.report.pictures.page import Panel, arrange, model_facts, overview, panel_figure
from attnlens.report.pictures.style import (
    CATEGORIES,
    INK,
    PART_COLOURS,
    legend_above,
    scale_logarithmically,
    shorten_label,
)
from attnlens.report.shapes import Shapes
from attnlens.wording import clean, source_of, title_of

if TYPE_CHECKING:
    from jaxtyping import Float
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from attnlens.records import Report, Selection
    from attnlens.report.pictures.charts import Points

CROWDED = 24  # number of layers above which they touch, since gaps between thinner ones would dominate
ACROSS = 3
NOTE = 54  # characters that fit under a panel's title
HEIGHT = 2.0  # inches of a panel's axes
SELECTION_CAPTION = (
    "Least margin of each posed query, (logit_α − logit_t)/‖ΠM‖ over the best least margin 1/‖W_mm‖, ascending; "
    "a single query may exceed 1. "
    "Null: the head turned by random rotations on both sides, with its own selection and its own best. "
    "Posed {where}."
)


def overview_figure(shapes: Shapes) -> Figure:
    """Draw a page of up to six pictures: one row per source, or two rows for a single source."""
    rows = page_rows(shapes)
    if not rows:
        raise UsageError("No measure differs between heads: there is nothing to draw.", "Use --json or --csv.")
    names = [panel.stem for row in rows for panel in row]
    hatched = not all(shapes.readings[name].full for name in names if name in shapes.readings)
    hatched |= not all(has_all(shapes, shapes.shares[name]) for name in names if name in shapes.shares)
    headings = [_row_heading(shapes, row) for row in rows]
    page = [
        replace(arrange(row, ACROSS, HEIGHT)[0], heading=shorten_label(text, 120) * (text != before))
        for row, text, before in zip(rows, headings, ["", *headings], strict=False)
    ]
    facts = [*model_facts(shapes.report), layout_line(shapes)]
    return overview(shapes.report, page, facts, hint="hatched: no value" * hatched)


def _row_heading(shapes: Shapes, row: Sequence[Panel]) -> str:
    """Format the source of a row; for a curve that is shown by depth, its meaning."""
    name = row[0].stem
    if len({panel.stem for panel in row}) < len(row):
        return f"{source_of(name)} – {clean(shapes.info(name).meaning)}"
    return source_heading(shapes, name)


def page_rows(shapes: Shapes) -> list[list[Panel]]:
    """Arrange the panels in rows: one row per source, or two rows for a single source if it has enough to show.

    If the single source has a curve to be shown by depth, its thirds form the first row and maps the second. If it has
    measures of two spaces, each space forms a row.
    """
    names = [*shapes.readings, *shapes.curves]
    sources = list(dict.fromkeys(source_of(name) for name in names))
    groups = [_split_by_space(shapes, [name for name in names if source_of(name) == source]) for source in sources]
    if len(sources) > 1:
        rows = [_choose_panels(shapes, spaces[0], ACROSS) for spaces in groups[:2]]
    elif deep := [name for name in shapes.curves if shapes.info(name).by_depth]:
        parts = {name for names in shapes.shares.values() for name in names}
        maps = [name for name, reading in shapes.readings.items() if name not in parts and not reading.constant]
        rows = [depth_panels(shapes, deep[0]), [_noted_map(shapes, name) for name in maps[:ACROSS]]]
    elif len(groups[0]) > 1:
        rows = [_choose_panels(shapes, space, ACROSS) for space in groups[0][:2]]
    else:
        panels = _choose_panels(shapes, groups[0][0], 2 * ACROSS)
        rows = [panels[:ACROSS], panels[ACROSS:]]
    return [row for row in rows if row]


def _split_by_space(shapes: Shapes, names: list[str]) -> list[list[str]]:
    """Split one source's measures and curves by space; those without a space join the first."""
    spaces = list(dict.fromkeys(space for name in names if (space := shapes.info(name).space))) or [""]
    return [[name for name in names if (shapes.info(name).space or spaces[0]) == space] for space in spaces]


def _choose_panels(shapes: Shapes, names: list[str], room: int) -> list[Panel]:
    """Choose panels: the first shares, then maps, then the first curves, up to `room`; each kind gets a place.

    If there is room for more maps than measures, the parts of the shares fill it.
    """
    of_source = {name: shapes.readings[name] for name in names if name in shapes.readings}
    wholes = [whole for whole, parts in shapes.shares.items() if parts[0] in of_source][:1]
    parts = {name for whole in wholes for name in shapes.shares[whole]}
    curves = [name for name in names if name in shapes.curves][: max(1, room // ACROSS)]
    shown = [name for name, reading in of_source.items() if name not in parts and not reading.constant]
    # except for headlines, measures that cannot be distinguished from chance come last
    maps = sorted(shown, key=lambda name: not of_source[name].info.headline and of_source[name].chance)
    maps = [*maps, *(name for name in of_source if name in parts)][: room - len(wholes) - len(curves)]
    return [
        *(_shares_panel(shapes, whole) for whole in wholes),
        *(_noted_map(shapes, name) for name in maps),
        *(fan_panel(shapes, name, short_curve_caption(shapes, name)) for name in curves),
    ]


def _noted_map(shapes: Shapes, name: str) -> Panel:
    reading = shapes.readings[name]
    return map_panel(shapes, name, short_caption(reading) or shorten_label(reading.info.meaning, NOTE))


def _shares_panel(shapes: Shapes, whole: str) -> Panel:
    unidentified = any(shapes.info(name).identified == "nowhere" for name in shapes.shares[whole])
    title = heading(shapes.info(whole)) + " (not identified)" * unidentified
    return Panel(whole, title, "", "", partial(draw_shares, shapes=shapes, whole=whole))


def draw_shares(axes: Axes, shapes: Shapes, whole: str) -> None:
    """Draw one line per head of its parts, which sum to 1, sorted by the first part per layer; hatch missing values."""
    names = shapes.shares[whole]
    height = 1.0 if len(shapes.layers) > CROWDED else 0.86
    # The last line of a layer is followed by its lower end and then NaN, which separates it from the next layer.
    ends, heads = [], []
    for row, shares in enumerate(_complete_heads(shapes, names)):
        count = shares.shape[1]
        if count:
            order = [*np.argsort(-shares[0], kind="stable")]
            ends += [*np.linspace(row - height / 2, row + height / 2, count + 1), np.nan]
            heads.append(np.pad(shares[:, [*order, order[-1]]], ((0, 0), (0, 1)), constant_values=np.nan))
        else:
            hatch_box(axes, (0, row - height / 2), 1, height)
    rights = np.cumsum(np.concatenate(heads, axis=1), axis=0)
    for (label, colour), left, right in zip(named_parts(names), [0 * rights[0], *rights], rights, strict=False):
        axes.fill_betweenx(ends, left, right, step="post", color=colour, label=label, linewidth=0)
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 0.5, 1], ["0", "½", "1"])
    axes.set_xlabel("share, one line per head")
    label_layers(axes, shapes.layers, shapes.parts)
    legend_above(axes, 56, handlelength=0.8)


def named_parts(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the label of each part, without the words shared by all, and its colour."""
    shared = os.path.commonprefix([title_of(name) for name in names])  # noqa: RUF071  # titles, not paths
    labels = [title_of(name)[shared.rfind(" ") + 1 :] for name in names]
    return [(label, PART_COLOURS.get(label, CATEGORIES[n % len(CATEGORIES)])) for n, label in enumerate(labels)]


def _complete_heads(shapes: Shapes, names: Sequence[str]) -> list[Float[np.ndarray, "parts heads"]]:
    """Return for each layer the parts of the heads that have all of them."""
    stack = np.stack([shapes.readings[name].values for name in names], axis=1)
    return [layer[:, ~np.isnan(layer).any(axis=0)] for layer in stack]


def has_all(shapes: Shapes, names: Sequence[str]) -> bool:
    """Check whether every layer has a head with all of these parts."""
    return all(layer.size for layer in _complete_heads(shapes, names))


# --- margins of selection ---------------------------------------------------------------------------------------------


def margins_figure(report: Report, selection: Selection) -> Figure:
    """Draw the sorted margins of one head (blue) and its null heads (grey), and the best least margin (dashed)."""
    title = f"layer {selection.layer} head {selection.head}: margins of its selection"
    caption = f"{SELECTION_CAPTION.format(where=WHERE_POSED[selection.space])}\n{layout_line(Shapes(report))}"
    draw = partial(draw_margins, selection=selection)
    return panel_figure(report, Panel("margins", title, "", caption, draw, rows=14, width=5.4))


def draw_margins(axes: Axes, selection: Selection) -> None:
    """Draw one line per head: its margins, sorted, over the share of queries with at most that margin."""
    head_margins = [pick.margin for pick in selection.picks]
    labels = iter(["null heads"])
    for margins in selection.null_margins:
        axes.plot(*_sort_margins(margins), color="#aaaaaa", linewidth=0.8, label=next(labels, ""))
    axes.plot(*_sort_margins(head_margins), color=CATEGORIES[0], linewidth=1.8, label="the head")
    axes.axhline(1, color=INK, linewidth=0.8, linestyle="--", label="best least margin, 1/‖W_mm‖")
    if min(map(min, [head_margins, *selection.null_margins])) > 0:
        scale_logarithmically(axes, "y")
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of the posed queries with no larger margin")
    axes.set_ylabel("margin over the best least margin")
    axes.grid(visible=True, color="#eeeeee", linewidth=0.5)
    legend_above(axes, 100)


def _sort_margins(margins: list[float]) -> Points:
    return np.arange(1, len(margins) + 1) / len(margins), np.sort(margins)
