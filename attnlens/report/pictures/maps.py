"""Pictures of heads: maps of layers × heads, fans of one curve per head, shares, margins, and the overview."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import BoundaryNorm, CenteredNorm, ListedColormap, Normalize, to_hex

from attnlens.analyzers.registry import MeasureInfo
from attnlens.choices import WHERE_POSED
from attnlens.errors import UsageError
from attnlens.report.findings.heads import CHANCE, LEVEL, HeadTests
from attnlens.report.pictures import charts, style
from attnlens.report.pictures.charts import Colours, HeadGrid, Panel
from attnlens.report.sections.facts import state_whole
from attnlens.report.sections.reference import bounds
from attnlens.report.shapes import SAME, MeasureMap, Shapes, group_of
from attnlens.wording import (
    capitalise,
    clean,
    decimals_for,
    format_count,
    format_number,
    group_pairs,
    join_items,
    short,
    source_of,
    title_of,
)

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from attnlens.records import Selection
    from attnlens.report.pictures.charts import Points

SIDE = 40  # number of characters of a formula that fit along the y axis
WIDE_RANGE = 20.0
"""Ratio of the largest value to the smallest final median above which the axis of curves is logarithmic."""
PART_LINES = ("-", "--", ":")  # line styles of the parts' medians on shared axes
CELL = 0.42  # side of a cell in inches, if the page has room
STEPS = 64  # number of colours that the script of a page gets from a colour map
THIRDS = 3
FURTHEST = 1e300  # Largest absolute value that can be drawn: drawing computes differences, and float64 ends at 1.8e308


def full_caption(shapes: Shapes, reading: MeasureMap) -> str:
    """Format the caption of a map, with lines on meaning, range, null or error, missing values and coverage."""
    present, lines = reading.present, []
    if not reading.labels:
        least, most = (format_number(float(end), decimals_for(present)) for end in (present.min(), present.max()))
        same = f"Here {least}" + " for every head" * (present.size > 1)
        shown = f"Here {least} to {most}" if present.min() < present.max() else same
        lines.append(f"{shown}; possible: {bounds(reading.info)}.")
    mark = ""
    if reading.null is not None:
        mark = "; black mark on the colour bar" if _shows_null(reading) else "; outside the range of the colour bar"
    lines.append(capitalise(f"{short_caption(reading)}{mark}"))
    if _is_tested(reading):
        lines.append(
            f"Dots: heads above (black) or below (white) chance; false-discovery rate {100 * LEVEL:g} % over heads "
            "and measures."
        )
    lines += [f"No value for {format_count(count, 'head')} (hatched): {why}" for why, count in reading.reasons.items()]
    return _caption(shapes, reading.info, lines)


def curve_caption(shapes: Shapes, name: str, groups: Sequence[CurveGroup]) -> str:
    """Format the caption of a fan of the groups' curves, with one line per statement."""
    alone = ", separately for each part" if len(groups) > 1 else ""
    count = sum(len(group.curves) for group in groups)
    lines = [format_count(count, "head") + f"; black: median, dashed: quartiles{alone}" * (count > 1) + "."]
    for group in groups:
        heads, steps = group.complete.shape
        if heads < len(group.curves):
            whose = f"{heads} of {len(group.curves)} heads with {steps} steps or more"
            lines.append(f"{capitalise(group.title)}: median and quartiles over {whose}.")
    return _caption(shapes, shapes.info(name), lines)


def _caption(shapes: Shapes, info: MeasureInfo, lines: Sequence[str]) -> str:
    """Format a caption: the measure's meaning and caveat, further lines, and the coverage."""
    meaning = capitalise(f"{info.meaning}: {info.formula}" if info.formula else info.meaning)
    return "\n".join(filter(None, [meaning, info.caution, *lines, layout_line(shapes)]))


def short_curve_caption(shapes: Shapes, name: str) -> str:
    """Describe the median and quartile lines.

    Return "" if there is only one curve, or if the model has several parts, which have a legend instead.
    """
    first, *others = groups_by_part(shapes, name)
    heads, steps = first.complete.shape
    some = f"black: median, quartiles of {heads} of {len(first.curves)} heads, ≥ {steps} steps"
    if others or len(first.curves) == 1:
        return ""
    return some if heads < len(first.curves) else "median black, quartiles dashed"


def short_caption(reading: MeasureMap) -> str:
    """Format the null as mean ± sd or, without a null, `not identified`, the number of inputs, and the median error."""
    if reading.null is not None:
        decimals = decimals_for(reading.null[1:] if reading.null[1] else reading.null, figures=2)
        mean, sd = (format_number(number, decimals) for number in reading.null)
        return f"chance {mean} ± {sd} (sd of one head)"
    texts = ["not identified"] if reading.info.identified == "nowhere" else []
    if reading.error is not None:
        counts = reading.counts
        inputs = join_items(counts) if len(counts) < 2 else f"{counts[0]} to {counts[-1]}"
        texts.append(f"{inputs} inputs; median standard error {short(reading.error)}")
    return "; ".join(texts)


def layout_line(shapes: Shapes) -> str:
    """Format the layers, the heads per layer, and the coverage: `4 layers × 8 heads · COMPLETE: 32 of 32 heads`."""
    layers, heads = format_count(len(shapes.layers), "layer"), format_count(len(shapes.heads), "head")
    return f"{layers} × {heads}{state_whole(shapes.report)} · {clean(shapes.report.coverage.sentence)}"


def heading(info: MeasureInfo) -> str:
    """Format a measure's name as a title: `effective rank`, `singular values of M`."""
    return style.shorten_label(title_of(info.name) + (f" of {info.matrix}" if info.matrix else ""), 60)


def heading_of_shares(shapes: Shapes, whole: str) -> str:
    """Format the name of a set of measures that sum to 1; add `(not identified)` if any of them is not identified."""
    unsure = any(shapes.info(name).identified == "nowhere" for name in shapes.shares[whole])
    return title_of(whole) + " (not identified)" * unsure


def shares_caption(shapes: Shapes, whole: str) -> str:
    """Format the caption of a set of measures that sum to 1, with the meaning of each measure."""
    names = shapes.shares[whole]
    labels = [label for label, _ in named_parts(names)]
    parts = [f"{label}: {shapes.info(name).meaning}" for label, name in zip(labels, names, strict=True)]
    return f"One bar per head, sorted within a layer; the parts sum to 1. {'; '.join(parts)}."


def source_heading(shapes: Shapes, name: str) -> str:
    """Format the source of a measure: `weights`, `tokens – 8 × 32 tokens of …`."""
    settings, group = shapes.report.settings, group_of(shapes.info(name))
    return f"{group} – {clean(settings.input_summary)}" if group == "tokens" and settings.input_summary else group


def head_panels(shapes: Shapes) -> list[Panel]:
    """Build the panels for separate files: maps of measures that differ between heads, curves, and selection margins.

    Raise UsageError if the report contains no measures or curves, or if a value is too large to draw.
    """
    if not shapes.readings and not shapes.curves:
        raise UsageError(
            "The report contains no measures to draw.", "Create one with: attnlens inspect MODEL --json FILE"
        )
    curves = {name: np.concatenate([curve for _, curve in parts]) for name, parts in shapes.curves.items()}
    for name, values in ({name: reading.present for name, reading in shapes.readings.items()} | curves).items():
        if np.any(np.abs(values) > FURTHEST):
            problem = f"{clean(name)} has values beyond {FURTHEST:g}, too large to draw."
            raise UsageError(problem, "Write the values to a file instead: --csv FILE.")
    varying = [name for name, reading in shapes.readings.items() if not reading.constant]
    panels = [map_panel(shapes, name, source_heading(shapes, name), numbers=True) for name in varying]
    panels += [fan_panel(shapes, name, source_heading(shapes, name), split=True) for name in shapes.curves]
    for selection in shapes.report.inspection.selections:
        name = shapes.report.model.layer_name(selection.layer)
        title = f"layer {name} head {selection.head}: margins of its selection"
        caption = f"{SELECTION_CAPTION.format(where=WHERE_POSED[selection.space])}\n{layout_line(shapes)}"
        draw, stem = partial(draw_margins, selection=selection), f"selection-{name}.{selection.head}"
        panels.append(Panel(stem, title, "", caption, draw, rows=14, width=5.4))
    return panels


def map_panel(shapes: Shapes, name: str, note: str, *, numbers: bool = False) -> Panel:
    """Build the panel of a measure's map; with `numbers`, its cells show the values if all of them fit."""
    reading = shapes.readings[name]
    width = float(np.clip(CELL * len(shapes.heads), 3.4, 8))
    draw = partial(draw_map, shapes=shapes, reading=reading, numbers=numbers)
    return Panel(name, heading(reading.info), note, full_caption(shapes, reading), draw, 2 * len(shapes.layers), width)


def draw_map(axes: Axes, shapes: Shapes, reading: MeasureMap, *, numbers: bool) -> None:
    """Draw the map of a measure; if `numbers`, write the values into the cells if all of them fit."""
    colours = scale(reading)
    grid = HeadGrid(reading.values, shapes.layers, shapes.heads, shapes.parts)
    bar = charts.heat_map(axes, grid, colours)
    if reading.labels:
        names = reading.labels | dict(enumerate(reading.info.labels))
        bar.set_ticks(sorted(names), labels=[clean(names[number]).replace(" ", "\n") for number in sorted(names)])
        bar.ax.tick_params(length=0, pad=3, which="both")
        return
    if reading.null is not None:
        # mean as a horizontal line, ± sd as a vertical line, with a white border
        (low, high), (mean, sd) = bar.ax.get_ylim(), reading.null
        ends = [max(low, mean - sd), min(high, mean + sd)]
        for colour, width in (("white", 2.2), ("black", 1.0)) if _shows_null(reading) else ():
            bar.ax.plot([0.5, 0.5], ends, color=colour, linewidth=width, scalex=False, scaley=False)
            bar.ax.plot([0, 1], [mean, mean], color=colour, linewidth=width, scalex=False, scaley=False)
    texts = _fit_numbers(reading) if numbers and max(grid.values.shape) * CELL <= 8 else {}  # inches of a page
    charts.write_cells(axes, texts, grid, colours)
    if _is_tested(reading):
        signs, below = compare_with_chance(shapes, reading.name), 0.33 * bool(texts)
        for sign, colour, edge in ((1, style.INK, "white"), (-1, "white", style.INK)):
            charts.mark_cells(axes, signs == sign, colour, edge, below=below)


def _is_tested(reading: MeasureMap) -> bool:
    return reading.name in CHANCE and reading.null is not None


def compare_with_chance(shapes: Shapes, name: str) -> Int[np.ndarray, "layers heads"]:
    """Return 1 or −1 for the heads whose value of a measure is significantly above or below chance, otherwise 0."""
    signs = np.zeros((len(shapes.layers), len(shapes.heads)), dtype=int)
    signs[shapes.cells] = HeadTests(shapes).signs.get(name, 0)
    return signs


def _shows_null(reading: MeasureMap) -> bool:
    """Return True if the mean of the null lies within the range of the map's colour bar."""
    norm = scale(reading)[1]
    return reading.null is not None and bool(0 <= norm(reading.null[0]) <= 1)


def _fit_numbers(reading: MeasureMap) -> dict[tuple[int, int], str]:
    """Format the known values, keyed by (row, column), with as many decimals as fit; return {} if none fit."""
    full, most = decimals_for(reading.present), 5 + (reading.values.shape[1] * CELL < 3.4)
    known = [(at, value) for at, value in np.ndenumerate(reading.values) if not np.isnan(value)]
    # fewer decimals than in the table are better than no numbers
    for decimals in range(full, min(2, full) - 1, -1):
        texts = {at: format_number(value, decimals) for at, value in known}
        if max(map(len, texts.values())) <= most:
            return texts
    return {}


def scale(reading: MeasureMap) -> Colours:
    """Choose a map's colours (diverging from 0 if values can be negative), norm, and colour-bar arrows."""
    if reading.labels:
        highest = max(max(reading.labels), len(reading.info.labels) - 1)
        colours = [style.CATEGORIES[number % len(style.CATEGORIES)] for number in range(highest + 1)]
        return ListedColormap(colours), BoundaryNorm(np.arange(highest + 2) - 0.5, highest + 1), "neither"
    # outliers get the last colour, so that a single head does not give all others the same shade: values whose distance
    # from the range between the 1st and 99th percentile exceeds the width of this range
    least, low, high, most = map(float, np.percentile(reading.present, [0, 1, 99, 100]))
    cut_low, cut_high = low - least > high - low > 0, most - high > high - low > 0
    extend = ("neither", "min", "max", "both")[cut_low + 2 * cut_high]
    low, high = low if cut_low else least, high if cut_high else most
    if reading.present.size == 1:  # the colour of a single value shows its place in the possible range
        low = low if reading.info.low is None else reading.info.low
        high = high if reading.info.high is None else reading.info.high
    if (reading.info.low or 0.0) < 0 or reading.present.min() < 0:
        half = max(abs(low), abs(high)) or 1.0
        return style.DIVERGING, CenteredNorm(0, half), extend
    # reports have nine digits; a relative spread this small is only rounding and must not span all colours
    if high - low <= SAME * abs(high):
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    return style.SEQUENTIAL, Normalize(low, high), extend


def palette(reading: MeasureMap) -> dict[str, object]:
    """Return a map's colours and their limits for the HTML page's script."""
    colours, norm, extend = scale(reading)
    steps = colours.N if isinstance(norm, BoundaryNorm) else STEPS
    samples = [to_hex(colour) for colour in colours(np.linspace(0, 1, steps))]
    ends = {"low": float(norm.vmin or 0), "high": float(norm.vmax or 0)}
    return {"colours": samples, **ends, "cut": extend}


@dataclass(frozen=True)
class CurveGroup:
    """Curves of the heads in one part of the model, or in neighbouring layers."""

    title: str  # name of the part, or `layers 0–3`
    rows: Sequence[int]  # rows of the layers in `Shapes.layers`
    curves: Sequence[tuple[int, Float[np.ndarray, " steps"]]]  # (row of the layer, curve) of each head

    @cached_property
    def complete(self) -> Float[np.ndarray, "heads steps"]:
        """Curves that are at least as long as the most common length, cut to this length."""
        lengths = Counter(len(curve) for _, curve in self.curves)
        steps = max(lengths, key=lambda length: (lengths[length], length))
        return np.stack([curve[:steps] for _, curve in self.curves if len(curve) >= steps])

    @cached_property
    def quartiles(self) -> Float[np.ndarray, "3 steps"]:
        """Lower quartile, median and upper quartile of the complete curves at each step."""
        quartiles: Float[np.ndarray, "3 steps"] = np.percentile(self.complete, [25, 50, 75], axis=0)
        return quartiles

    @property
    def note(self) -> str:
        """Median and quartiles of the curves' first values, and the number of heads, as text."""
        low, middle, high = (format_number(float(value), 2) for value in self.quartiles[:, 0])
        return f"starts at {middle} (quartiles {low} to {high}), {format_count(len(self.curves), 'head')}"


def groups_by_part(shapes: Shapes, name: str) -> list[CurveGroup]:
    """Group a curve's heads by part of the model."""
    rows = sorted({row for row, _ in shapes.curves[name]})
    return _groups(shapes, name, group_pairs((shapes.parts[row], row) for row in rows))


def groups_by_depth(shapes: Shapes, name: str) -> list[CurveGroup]:
    """Group a curve's heads by thirds of the layers, or by part if the model has several parts."""
    parts = groups_by_part(shapes, name)
    if len(parts) > 1:
        return parts
    thirds: dict[str, list[int]] = {}
    for rows in np.array_split(parts[0].rows, min(THIRDS, len(parts[0].rows))):
        first, last = shapes.layer_names[rows[0]], shapes.layer_names[rows[-1]]
        thirds[f"layer {first}" if first == last else f"layers {first}–{last}"] = rows.tolist()
    return _groups(shapes, name, thirds)


def _groups(shapes: Shapes, name: str, members: Mapping[str, Sequence[int]]) -> list[CurveGroup]:
    curves = shapes.curves[name]
    return [CurveGroup(title, rows, [pair for pair in curves if pair[0] in rows]) for title, rows in members.items()]


def first_step(info: MeasureInfo) -> int:
    """Return the number of a curve's first step: 1 if its steps are an index k, otherwise 0."""
    return int(info.steps == "index")


def fan_panel(shapes: Shapes, name: str, note: str, *, split: bool = False) -> Panel:
    """Build the panel of a curve, with one line per head and, if `split`, separate axes for each part of the model."""
    groups, draw = groups_by_part(shapes, name), partial(draw_fan, shapes=shapes, name=name)
    title, caption = heading(shapes.info(name)), curve_caption(shapes, name, groups)
    whole = partial(draw, groups=groups)
    panel = Panel(name, title, note, caption, whole, rows=18, width=4.9, layers=shapes.layer_names)
    if not split or len(groups) < 2:
        return panel
    parts = [replace(panel, title=f"{title}: {g.title}", draw=partial(draw, groups=[g]), width=2.9) for g in groups]
    return replace(panel, parts=parts)


def draw_fan(axes: Axes, shapes: Shapes, name: str, groups: Sequence[CurveGroup]) -> None:
    """Draw the curves of the groups' heads, the median of each group and, for a single group, the quartiles."""
    info = shapes.info(name)
    lines = [(row, _points(info, curve)) for group in groups for row, curve in group.curves]
    charts.fan_chart(axes, lines, len(shapes.layers))
    values = np.concatenate([curve for _, curve in shapes.curves[name]])
    logarithmic = falls_far(values, [group.quartiles[1] for group in groups_by_part(shapes, name)])
    # on a logarithmic axis, values below a millionth of the largest are rounding and would squeeze the visible range
    least = max(values[values > 0].min(), 1e-6 * values.max()) if logarithmic else values.min()
    style.scale_values(axes, float(least), float(values.max()), logarithmic=logarithmic)
    first, steps = first_step(info), max(len(curve) for _, curve in shapes.curves[name])
    axes.set_xlim(first, first + max(1, steps - 1))
    axes.xaxis.set_major_locator(style.IndexTicks(steps, first))
    axes.set_xlabel("index k" if info.steps == "index" else info.steps)
    formula = clean(info.formula)
    axes.set_ylabel(formula if 0 < len(formula) <= SIDE else title_of(name))
    if len(groups) == 1:
        low, middle, high = (_points(info, line) for line in groups[0].quartiles)
        charts.draw_over(axes, low, "--", 1.1, label="quartiles")
        charts.draw_over(axes, middle, "-", 1.6, label="median")
        charts.draw_over(axes, high, "--", 1.1)
        return
    for group, dash in zip(groups, PART_LINES, strict=False):
        label = f"{'' if group is not groups[0] else 'median: '}{group.title}"
        charts.draw_over(axes, _points(info, group.quartiles[1]), dash, 1.4, label=label)
    style.legend_above(axes, 60, handlelength=2.2)


def _points(info: MeasureInfo, curve: Float[np.ndarray, " steps"]) -> Points:
    return first_step(info) + np.arange(len(curve)), curve


def falls_far(values: Float[np.ndarray, " all"], medians: list[Float[np.ndarray, " steps"]]) -> bool:
    """Return True if all median curves fall, and the values span so wide a range that the axis must be logarithmic."""
    falling = values.min() >= 0 and all(median[0] > median[-1] > 0 for median in medians)
    return bool(falling and values.max() > WIDE_RANGE * min(median[-1] for median in medians))


def draw_depth(axes: Axes, shapes: Shapes, name: str, groups: Sequence[CurveGroup], group: CurveGroup) -> None:
    """Draw one group's curves with median and quartiles, and the medians of the other groups as dotted lines."""
    draw_fan(axes, shapes, name, [group])
    for number, other in enumerate(other for other in groups if other is not group):
        colour = style.DEPTH(charts.scale_depth(len(shapes.layers))(float(np.mean(other.rows))))
        line = _points(shapes.info(name), other.quartiles[1])
        charts.draw_over(axes, line, ":", 1.5, colour=colour, label="other groups' medians" * (number == 0))
    if group is groups[0]:
        axes.legend(loc="lower right", handlelength=2.6)


CROWDED = 24  # number of layers above which layers are drawn without gaps
FEW = 4  # number of layers and of heads per layer up to which the overview's maps show their values
ACROSS = 3
NOTE = 54  # number of characters that fit under a panel's title
HEIGHT = 2.0  # inches of a panel's axes
SELECTION_CAPTION = (
    "Margin of each posed query, (logit_α − logit_t)/‖ΠM‖, divided by the best possible margin, that of the SVM, "
    "in ascending order; a single query can exceed 1. Null heads: the head randomly rotated on both sides, with the "
    "selection and best possible margin of the rotated head. Posed {where}."
)


def overview_figure(shapes: Shapes, *, bare: bool = False) -> Figure:
    """Draw a page of up to six panels. Raise UsageError if no measure differs between heads."""
    rows = page_rows(shapes)
    if not rows:
        raise UsageError("No measure differs between heads, so there is nothing to draw.", "Use --json or --csv.")
    names = [panel.stem for row in rows for panel in row]
    hatched = any(np.isnan(shapes.readings[name].values).any() for name in names if name in shapes.readings)
    hatched |= not all(has_all(shapes, shapes.shares[name]) for name in names if name in shapes.shares)
    headings = []
    for row in rows:
        name = row[0].stem
        by_depth = len({panel.stem for panel in row}) < len(row)  # then the heading is the curve's meaning
        meaning = f"{source_of(name)} – {clean(shapes.info(name).meaning)}"
        headings.append(meaning if by_depth else source_heading(shapes, name))
    page = [
        replace(charts.arrange(row, ACROSS, HEIGHT)[0], heading=style.shorten_label(text, 120) * (text != before))
        for row, text, before in zip(rows, headings, ["", *headings], strict=False)
    ]
    facts = [*charts.model_facts(shapes.report), layout_line(shapes)]
    return charts.overview(shapes.report, page, facts, hint="hatched: no value" * hatched, bare=bare)


def page_rows(shapes: Shapes) -> list[list[Panel]]:
    """Arrange the overview's panels in up to two rows: by source or, if all share a source, by depth or space."""
    by_source = group_pairs((source_of(name), name) for name in (*shapes.readings, *shapes.curves))
    groups = []  # for each source, its names by space; names without a space join the first space
    for names in by_source.values():
        spaces = list(dict.fromkeys(space for name in names if (space := shapes.info(name).space))) or [""]
        groups.append([*group_pairs((shapes.info(name).space or spaces[0], name) for name in names).values()])
    if len(groups) > 1:
        rows = [_choose_panels(shapes, spaces[0], ACROSS) for spaces in groups[:2]]
    elif deep := [name for name in shapes.curves if shapes.info(name).by_depth]:
        parts = {name for names in shapes.shares.values() for name in names}
        maps = [name for name, reading in shapes.readings.items() if name not in parts and not reading.constant]
        name, depths = deep[0], groups_by_depth(shapes, deep[0])
        draw = partial(draw_depth, shapes=shapes, name=name, groups=depths)
        others = "\nDotted: medians of the other groups." * (len(depths) > 1)
        captions = [curve_caption(shapes, name, [group]) + others for group in depths]
        fans = [
            Panel(name, group.title, group.note, caption, partial(draw, group=group), layers=shapes.layer_names)
            for group, caption in zip(depths, captions, strict=True)
        ]
        rows = [fans, [_noted_map(shapes, name) for name in maps[:ACROSS]]]
    elif len(groups[0]) > 1:
        rows = [_choose_panels(shapes, space, ACROSS) for space in groups[0][:2]]
    else:
        panels = _choose_panels(shapes, groups[0][0], 2 * ACROSS)
        rows = [panels[:ACROSS], panels[ACROSS:]]
    return [row for row in rows if row]


def _choose_panels(shapes: Shapes, names: list[str], room: int) -> list[Panel]:
    """Choose up to `room` panels for these measures: at most one set of shares, then maps, then curves."""
    of_source = {name: shapes.readings[name] for name in names if name in shapes.readings}
    wholes = [whole for whole, parts in shapes.shares.items() if parts[0] in of_source][:1]
    parts = {name for whole in wholes for name in shapes.shares[whole]}
    curves = [name for name in names if name in shapes.curves][: max(1, room // ACROSS)]
    shown = [name for name, reading in of_source.items() if name not in parts and not reading.constant]
    # except for headlines, measures that cannot be distinguished from chance come last
    maps = sorted(shown, key=lambda name: not of_source[name].info.headline and of_source[name].chance)
    maps += [name for name, reading in of_source.items() if name in parts and not reading.constant]
    maps = maps[: room - len(wholes) - len(curves)]
    draw = partial(draw_shares, shapes=shapes)
    shares = [
        Panel(whole, heading_of_shares(shapes, whole), "", shares_caption(shapes, whole), partial(draw, whole=whole))
        for whole in wholes
    ]
    fans = [fan_panel(shapes, name, short_curve_caption(shapes, name)) for name in curves]
    return [*shares, *(_noted_map(shapes, name) for name in maps), *fans]


def _noted_map(shapes: Shapes, name: str) -> Panel:
    reading = shapes.readings[name]
    note = short_caption(reading) or style.shorten_label(reading.info.meaning, NOTE)
    if _is_tested(reading):
        note = f"{note.removesuffix(' (sd of one head)')}; ● above, ○ below"
    return map_panel(shapes, name, note, numbers=max(reading.values.shape) <= FEW)


def draw_shares(axes: Axes, shapes: Shapes, whole: str) -> None:
    """Draw each head's shares as a stacked bar, sorted within each layer by the first share; hatch empty layers."""
    names = shapes.shares[whole]
    height = 1.0 if len(shapes.layers) > CROWDED else 0.86
    # Each layer ends with the lower edge of its last bar and a NaN, which separates the layer from the next.
    ends, heads = [], []
    for row, shares in enumerate(_complete_heads(shapes, names)):
        count = shares.shape[1]
        if count:
            order = [*np.argsort(-shares[0], kind="stable")]
            ends += [*np.linspace(row - height / 2, row + height / 2, count + 1), np.nan]
            heads.append(np.pad(shares[:, [*order, order[-1]]], ((0, 0), (0, 1)), constant_values=np.nan))
        else:
            charts.hatch_box(axes, (0, row - height / 2), 1, height)
    rights = np.cumsum(np.concatenate(heads, axis=1), axis=0)
    for (label, colour), left, right in zip(named_parts(names), [0 * rights[0], *rights], rights, strict=False):
        axes.fill_betweenx(ends, left, right, step="post", color=colour, label=label, linewidth=0)
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 0.5, 1], ["0", "½", "1"])
    axes.set_xlabel("share (heads sorted within layers)")
    charts.label_layers(axes, shapes.layer_numbers, shapes.parts)
    style.legend_above(axes, 56, handlelength=0.8)


def named_parts(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return (label, colour) of each measure; labels omit leading words that all measures share."""
    shared = os.path.commonprefix([title_of(name) for name in names])  # noqa: RUF071  # titles, not paths
    labels = [title_of(name)[shared.rfind(" ") + 1 :] for name in names]
    colours = zip(labels, cycle(style.CATEGORIES), strict=False)
    return [(label, style.PART_COLOURS.get(label, colour)) for label, colour in colours]


def _complete_heads(shapes: Shapes, names: Sequence[str]) -> list[Float[np.ndarray, "parts heads"]]:
    """Return, for each layer, the values of the heads that have all of these measures."""
    stack = np.stack([shapes.readings[name].values for name in names], axis=1)
    return [layer[:, ~np.isnan(layer).any(axis=0)] for layer in stack]


def has_all(shapes: Shapes, names: Sequence[str]) -> bool:
    """Return True if every layer has a head that has all of these measures."""
    return all(layer.size for layer in _complete_heads(shapes, names))


def draw_margins(axes: Axes, selection: Selection) -> None:
    """Draw the sorted margins of a head (blue) and of its random rotations (grey), and the SVM's margin (dashed)."""
    head_margins = [pick.margin for pick in selection.picks]
    for number, margins in enumerate(selection.null_margins):
        axes.plot(*_sort_margins(margins), color="#aaaaaa", linewidth=0.8, label="null heads" * (number == 0))
    axes.plot(*_sort_margins(head_margins), color=style.CATEGORIES[0], linewidth=1.8, label="the head")
    axes.axhline(1, color=style.INK, linewidth=0.8, linestyle="--", label="best possible margin (the SVM)")
    if min(map(min, [head_margins, *selection.null_margins])) > 0:
        style.scale_logarithmically(axes, "y")
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of posed queries with at most this margin")
    axes.set_ylabel("margin / best possible margin")
    axes.grid(visible=True, color="#eeeeee", linewidth=0.5)
    style.legend_above(axes, 100)


def _sort_margins(margins: list[float]) -> Points:
    return np.arange(1, len(margins) + 1) / len(margins), np.sort(margins)
