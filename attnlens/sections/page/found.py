"""What was found, how sure that is, and the layers' medians, as a page opens with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from attnlens.records import Report
from attnlens.sections.layers import layer_sections
from attnlens.sections.reference.typical import typical_list
from attnlens.sections.section import Section
from attnlens.sentences import reports
from attnlens.sentences.findings import findings, no_errors, null_words, population
from attnlens.shapes import Shapes


def found_sections(shapes: Shapes) -> Iterator[Section]:
    """The headline measures in words, with what their errors and nulls are, and the most extreme heads."""
    if shapes.readings:
        yield Section("What was found", items=tuple(findings(shapes)), notes=tuple(_how_sure(shapes)))
    yield from typical_list(shapes)
    yield from extreme_heads(shapes.report)


def _how_sure(shapes: Shapes) -> Iterator[str]:
    """What the errors are over, or why there are none; what chance is; which numbers have neither."""
    about = population(shapes.report)
    if shapes.report.summary.median_errors:
        yield f"± is the standard error of the median{f' ({about})' if about else ''}."
    elif no_errors(shapes.report):
        yield f"{no_errors(shapes.report).capitalize()}."
    nulls = [reading.info for reading in shapes.readings.values() if reading.null]
    if nulls:
        yield f"Chance is {null_words(nulls)}."


def extreme_heads(report: Report) -> Iterator[Section]:
    """The heads at the ends of the measures."""
    found = tuple(map(reports.extreme, report.summary.extremes))
    if found:
        yield Section("Most extreme heads (ranks, not tests)", items=found)


def layer_tables(shapes: Shapes) -> Iterator[Section]:
    """The terminal's table of the layers' medians."""
    yield from (replace(section, title="By layer") for section in layer_sections(shapes, whole=False) if section.table)
