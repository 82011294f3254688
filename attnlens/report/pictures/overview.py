"""Overview of a report: maps, shares, margins of selection and curves on one page."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from attnlens.choices import WHERE_POSED
from attnlens.errors import UsageError
from attnlens.report.pictures.maps import FORMULA, depths, draw_depth, draw_fan, draw_map
from attnlens.report.pictures.style import (
    CATEGORIES,
    INK,
    MISSING,
    MUTED,
    PART_COLOURS,
    coverage_line,
    fitted,
    head,
    heading,
    label_layers,
    layout_line,
    legend_above,
    model_line,
    new_figure,
    picture_title,
    settings_line,
    short_caption,
    short_curve_caption,
    source_heading,
    wrapped,
)
from attnlens.report.shapes import MeasureMap, Shapes, group_of
from attnlens.wording import big, clean, source_of, title_of

if TYPE_CHECKING:
    from jaxtyping import Float
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from attnlens.records import Report, Selection

CROWDED = 24  # number of layers above which they touch, since gaps between thinner ones would dominate


def draw_shares(axes: Axes, shapes: Shapes, whole: str, *, named: bool = True) -> None:
    """Draw one line per head of its parts, which sum to 1, sorted by the first part per layer; hatch missing values."""
    names = shapes.shares[whole]
    height = 1.0 if len(shapes.layers) > CROWDED else 0.86
    ends, parts, empty = _stack_shares(shapes, names, height)
    left = np.zeros(len(ends))
    for (label, colour), part in zip(named_parts(names), parts, strict=True):
        axes.fill_betweenx(ends, left, left + part, step="post", color=colour, label=label, linewidth=0)
        left = left + part
    for row in empty:
        place = ((0, row - height / 2), 1, height)
        axes.add_patch(Rectangle(*place, facecolor=MISSING, edgecolor=MUTED, hatch="/////", linewidth=0))
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 0.5, 1], ["0", "½", "1"])
    axes.set_xlabel("share; a line a head", labelpad=1.5)
    axes.spines[["top", "right"]].set_visible(False)
    label_layers(axes, shapes.layers, shapes.parts, named=named)
    legend_above(axes, min(4, len(names)))


def named_parts(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the label of each part, without the words shared by all, and its colour."""
    shared = os.path.commonprefix([title_of(name) for name in names])  # noqa: RUF071  # titles, not paths
    labels = [title_of(name)[shared.rfind(" ") + 1 :] for name in names]
    return [(label, PART_COLOURS.get(label, CATEGORIES[n % len(CATEGORIES)])) for n, label in enumerate(labels)]


def _stack_shares(
    shapes: Shapes, names: list[str], height: float
) -> tuple[Float[np.ndarray, " ends"], Float[np.ndarray, "parts ends"], list[int]]:
    """Return the vertical start of each head's line, its parts, and the layers with no head that has all parts.

    The last line of a layer is followed by its lower end and then NaN, which separates it from the next layer.
    """
    stack = np.stack([shapes.readings[name].values for name in names])
    ends: list[float] = []
    parts: list[Float[np.ndarray, " parts"]] = []
    empty = []
    for row in range(stack.shape[1]):
        heads = stack[:, row, ~np.isnan(stack[:, row].sum(axis=0))]
        heads = heads[:, np.argsort(-heads[0], kind="stable")]
        if not heads.shape[1]:
            empty.append(row)
            continue
        ends += [*np.linspace(row - height / 2, row + height / 2, heads.shape[1] + 1), np.nan]
        parts += [*heads.T, heads[:, -1], np.full(len(names), np.nan)]
    return np.array(ends), np.array(parts).T, empty


def has_all(shapes: Shapes, names: list[str]) -> bool:
    """Check whether every layer has a head with all of these parts."""
    return not _stack_shares(shapes, names, 1.0)[2]


MARGINS_WIDTH, MARGINS_HEIGHT = 6.2, 4.7
CAPTION = (
    "Least margin of each posed query, (logit_α − logit_t)/‖ΠM‖ over the best least margin 1/‖W_mm‖, ascending; "
    "a single query may exceed 1. "
    "Null: the head turned by random rotations on both sides, with its own selection and its own best. "
    "Posed {where}."
)


def margins_figure(report: Report, found: Selection) -> Figure:
    """Draw the sorted margins of one head (blue) and its null heads (grey), and the best least margin (dashed)."""
    figure = new_figure(MARGINS_WIDTH, MARGINS_HEIGHT)
    axes = figure.add_axes((0.1, 0.28, 0.86, 0.59))
    # x: share of queries with at most that margin
    for number, margins in enumerate(found.null_margins):
        axes.plot(*_sort_margins(margins), color="#aaaaaa", linewidth=0.8, label="_" * bool(number) + "null heads")
    head_margins = [pick.margin for pick in found.picks]
    axes.plot(*_sort_margins(head_margins), color=CATEGORIES[0], linewidth=1.8, label="the head")
    axes.axhline(1, color=INK, linewidth=0.8, linestyle="--", label="best least margin, 1/‖W_mm‖")
    all_margins = [margin for line in [head_margins, *found.null_margins] for margin in line]
    if min(all_margins) > 0 and max(all_margins) > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of the posed queries with no larger margin")
    axes.set_ylabel("margin over the best least margin")
    axes.grid(visible=True, color="#eeeeee", linewidth=0.5)
    legend_above(axes, 3, handlelength=1.6)
    shapes = Shapes(report)
    title = f"layer {found.layer} head {found.head}: margins of its selection"
    figure.text(0.1, 0.955, title, fontsize=11, weight="bold", va="center", color=INK)
    lines = [CAPTION.format(where=WHERE_POSED[found.space]), fitted(model_line(shapes), 200), settings_line(shapes)]
    caption = wrapped(lines, int(MARGINS_WIDTH * 17))
    figure.text(0.1, 0.175, caption, fontsize=6.8, va="top", color=MUTED, linespacing=1.35)
    return figure


def _sort_margins(margins: list[float]) -> tuple[np.ndarray, np.ndarray]:
    values = np.sort(np.asarray(margins, dtype=float))
    return np.arange(1, len(values) + 1) / len(values), values


ACROSS = 3
NOTE = 54  # characters that fit under a panel's title
WIDTH, HEIGHT = 10.0, 7.2
RIGHT = 0.968  # right end of the last column's colour bar including its numbers


@dataclass(frozen=True)
class MeasurePanel:
    """Panel of the overview: one measure, curve or whole."""

    name: str  # measure, curve or whole that is drawn
    note: str  # line under its title: null or error
    draw: Callable[..., None]  # draws into axes; `named`: whether to label the layers' axis
    hatched: bool = False  # whether some cells have no value
    title: str = ""  # title above it; empty: its name
    section: str = ""  # heading above its row; empty: the source of its numbers


def overview_figure(shapes: Shapes) -> Figure:
    """Draw a page of up to six pictures: one row per source, or two rows for a single source."""
    rows = page_rows(shapes)
    if not rows:
        raise UsageError("No measure differs between heads: there is nothing to draw.", "Use --json or --csv.")
    height = HEIGHT if len(rows) > 1 else 0.57 * HEIGHT
    figure = new_figure(WIDTH, height, dpi=300)
    model = shapes.report.model
    size = f"{big(model.parameters)} parameters"
    facts = (clean(model.architecture), size, layout_line(shapes), coverage_line(shapes))
    head(figure, model.title, facts, [settings_line(shapes)], left=0.055 * WIDTH, right=RIGHT * WIDTH)
    if any(panel.hatched for row in rows for panel in row):
        figure.text(0.055, 0.13 / height, "hatched: no value", fontsize=6.5, color=MUTED, va="center")
    block = (height - 0.75 - 0.25) / len(rows)
    letters = iter("abcdef")
    for number, row in enumerate(rows):
        ceiling = height - 0.75 - number * block
        before = "" if number == 0 else group_of(shapes.info(rows[number - 1][0].name))
        if group_of(shapes.info(row[0].name)) != before:
            # the source of the row below, above a thin line
            rests_on = fitted(row[0].section or source_heading(shapes, row[0].name), 120)
            place = 0.055, (ceiling - 0.13) / height
            figure.text(*place, rests_on, fontsize=8.5, color=MUTED, style="italic", va="center")
            figure.add_artist(Line2D([0.055, RIGHT], [ceiling / height] * 2, color=MUTED, linewidth=0.4))
        for column, panel in enumerate(row):
            bottom, tall = ceiling - block + 0.45, block - 0.45 - 0.66
            axes = figure.add_axes((0.055 + column * 0.325, bottom / height, 0.232, tall / height))
            title = fitted(panel.title or heading(shapes.info(panel.name)), 32)
            picture_title(axes, f"{next(letters)}  {title}", panel.note)
            panel.draw(axes, named=column == 0)
    return figure


def page_rows(shapes: Shapes) -> list[list[MeasurePanel]]:
    """Arrange the panels in rows: one row per source, or two rows for a single source if it has enough to show.

    If the single source has a curve to be shown by depth, its thirds form the first row and maps the second. If it has
    measures of two spaces, each space forms a row.
    """
    names = [*shapes.readings, *shapes.curves]
    sources = list(dict.fromkeys(source_of(name) for name in names))
    groups = [_split_by_space(shapes, [name for name in names if source_of(name) == source]) for source in sources]
    if len(sources) > 1:
        return [row for spaces in groups[:2] if (row := _choose_panels(shapes, spaces[0], ACROSS))]
    if deep := [name for name in shapes.curves if shapes.info(name).by_depth]:
        return [row for row in (_depth_panels(shapes, deep[0]), _map_panels(shapes)) if row]
    if len(groups[0]) > 1:
        return [row for space in groups[0][:2] if (row := _choose_panels(shapes, space, ACROSS))]
    panels = _choose_panels(shapes, groups[0][0], 2 * ACROSS)
    return [row for row in (panels[:ACROSS], panels[ACROSS:]) if row]


def _split_by_space(shapes: Shapes, names: list[str]) -> list[list[str]]:
    """Split one source's measures and curves by space; those without a space join the first."""
    spaces = list(dict.fromkeys(space for name in names if (space := shapes.info(name).space))) or [""]
    return [[name for name in names if (shapes.info(name).space or spaces[0]) == space] for space in spaces]


def _choose_panels(shapes: Shapes, names: list[str], room: int) -> list[MeasurePanel]:
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
        *(_map_panel(shapes, of_source[name]) for name in maps),
        *(
            MeasurePanel(
                name, short_curve_caption(shapes, name), partial(_draw_curves, draw=draw_fan, shapes=shapes, name=name)
            )
            for name in curves
        ),
    ]


def _depth_panels(shapes: Shapes, name: str) -> list[MeasurePanel]:
    groups = depths(shapes, name)
    section = f"{source_of(name)} – {clean(shapes.info(name).meaning)}"
    return [
        MeasurePanel(
            name,
            group.note,
            partial(
                _draw_curves, draw=partial(draw_depth, number=number, bar=group is groups[-1]), shapes=shapes, name=name
            ),
            title=group.title,
            section=section,
        )
        for number, group in enumerate(groups)
    ]


def _map_panels(shapes: Shapes) -> list[MeasurePanel]:
    parts = {name for names in shapes.shares.values() for name in names}
    shown = [reading for name, reading in shapes.readings.items() if name not in parts and not reading.constant]
    return [_map_panel(shapes, reading) for reading in shown[:ACROSS]]


def _shares_panel(shapes: Shapes, whole: str) -> MeasurePanel:
    names = shapes.shares[whole]
    open_ = any(shapes.info(name).identified == "nowhere" for name in names)
    title = f"{heading(shapes.info(whole))} (not identified)" if open_ else ""
    return MeasurePanel(whole, "", partial(draw_shares, shapes=shapes, whole=whole), not has_all(shapes, names), title)


def _map_panel(shapes: Shapes, reading: MeasureMap) -> MeasurePanel:
    note = short_caption(reading) or fitted(reading.info.meaning, NOTE)
    return MeasurePanel(reading.name, note, partial(draw_map, shapes=shapes, reading=reading), not reading.full)


def _draw_curves(axes: Axes, *, draw: Callable[..., None], shapes: Shapes, name: str, named: bool) -> None:
    """Draw curves and name their value on the x axis, because the previous picture's colour bar occupies the side."""
    draw(axes, shapes=shapes, name=name)
    info = shapes.info(name)
    formula = clean(info.formula)
    value = formula if 0 < len(formula) <= FORMULA else heading(info).removeprefix(f"{info.space} ")
    axes.set_xlabel(f"{value} over {axes.get_xlabel()}", labelpad=1.5)
