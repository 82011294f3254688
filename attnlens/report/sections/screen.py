"""Sections of the first screen of a report: its findings, a map of its heads, and the commands to run next."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from attnlens.report.findings import advise_saving, find, next_commands
from attnlens.report.findings.heads import SHARES
from attnlens.report.sections.section import HeatMap, Section, View, section
from attnlens.report.shapes import MeasureMap, Shapes, middle
from attnlens.wording import capitalise, clean, decimals_for, format_number, title_of

MOST_ROWS = 24  # Maximum number of rows of a map; with more layers, each row is a median over neighbouring layers
MOST_COLUMNS = 64


@section(0, views=("screen", "markdown", "opening"))
def finding_section(shapes: Shapes, view: View) -> Iterator[Section]:
    """Yield a section with the findings."""
    yield Section("" if view == "screen" else "Findings", findings=find(shapes))


@section(2, ("inspection", "experiments"), ("screen", "markdown"))
def map_section(shapes: Shapes, _view: View) -> Iterator[Section]:
    """Yield a map of layers × heads for a numerical measure in the findings that differs between heads, if any.

    If a single analyzer ran, choose the first such measure; otherwise, the one that varies most within its bounds.
    """
    answered = [name for finding in find(shapes) for name in finding.measures if name in shapes.readings]
    shown = [shapes.readings[name] for name in dict.fromkeys(answered) if not shapes.readings[name].labels]
    shown = [reading for reading in shown if reading.present.size > 1 and not reading.constant]
    if not shown:
        return
    chosen_by_variation = len(shapes.report.settings.analyzers) != 1 and len(shown) > 1
    reading = max(shown, key=_variation) if chosen_by_variation else shown[0]
    chosen_by_variation &= _variation(reading) > 0
    low, high = (float(end(reading.present)) for end in (np.min, np.max))
    decimals = decimals_for([low, high], 2)
    rows, columns, values = _fold(shapes, reading)
    ends = f"blank {format_number(low, decimals)}, full block {format_number(high, decimals)}"
    folded = len(rows) < len(shapes.layers) or len(values[0]) < len(shapes.heads)
    share = SHARES[reading.name][0].removesuffix(" alone") if reading.name in SHARES else None
    subject = title_of(reading.name) if share is None else f"share of {share}"
    title = f"Varies most: {subject}" if chosen_by_variation else capitalise(subject)
    legend = f"layers × heads; {ends}{'; medians of neighbours' * folded}"
    yield Section(f"{title} ({legend})", heat_map=HeatMap(rows, columns, values))


def _variation(reading: MeasureMap) -> float:
    """Compute a measure's interquartile range relative to its possible range; return 0 if the range is unbounded."""
    least, most = reading.info.low, reading.info.high
    if least is None or most is None:
        return 0.0
    low, high = np.quantile(reading.present, (0.25, 0.75)).tolist()
    return float(high - low) / (most - least)


def _fold(shapes: Shapes, reading: MeasureMap) -> tuple[list[str], list[str], list[list[float | None]]]:
    """Reduce a map to at most MOST_ROWS × MOST_COLUMNS medians; return row labels, column labels and medians."""
    (layers, heads), labels, values = reading.values.shape, [], []
    height, width = -(-layers // MOST_ROWS), -(-heads // MOST_COLUMNS)
    for start in range(0, layers, height):
        numbers = shapes.layer_names[start : start + height]
        labels.append("–".join(dict.fromkeys((numbers[0], numbers[-1]))))
        block = reading.values[start : start + height]
        medians = (middle(block[:, column : column + width]) for column in range(0, heads, width))
        values.append([None if value != value else value for value in medians])
    return labels, [str(shapes.heads[column]) for column in range(0, heads, width)], values


@section(99, views=("screen", "markdown", "opening"))
def next_section(shapes: Shapes, _view: View) -> Iterator[Section]:
    """Yield the commands to run next, if any, and the advice to save the result."""
    if commands := next_commands(shapes):
        advice = advise_saving(shapes)
        yield Section("Next", commands=[*map(clean, commands)], lines=[clean(advice)] if advice else [])
