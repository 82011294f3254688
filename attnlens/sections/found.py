"""What was found, how sure that is, and the layers' medians, as a page opens with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from attnlens.records import Report
from attnlens.sections.layers import layer_rows, layer_sections, reading_help
from attnlens.sections.section import Section
from attnlens.sentences import reports
from attnlens.sentences.findings import findings
from attnlens.shapes import Shapes


def found_sections(shapes: Shapes) -> Iterator[Section]:
    """The headline measures in words, with what their errors and nulls are, and the most extreme heads."""
    if shapes.readings:
        how_sure = reading_help(layer_rows(shapes), shapes)
        yield Section("What was found", items=tuple(findings(shapes)), notes=(how_sure,) if how_sure else ())
    yield from extreme_heads(shapes.report)


def extreme_heads(report: Report) -> Iterator[Section]:
    """The heads at the ends of the measures."""
    found = tuple(map(reports.extreme, report.summary.extremes))
    if found:
        yield Section("Most extreme heads (ranks, not tests)", items=found)


def layer_tables(shapes: Shapes) -> Iterator[Section]:
    """The terminal's table of the layers' medians."""
    yield from (replace(section, title="By layer") for section in layer_sections(shapes, whole=False) if section.table)
