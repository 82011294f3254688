"""How the heads of an inspected model stand beside those of other trained models."""

from __future__ import annotations

from collections.abc import Iterator

from attnlens import atlas
from attnlens.atlas import Subject, Third
from attnlens.records import Head, Report
from attnlens.sections.section import Section
from attnlens.sentences import typical
from attnlens.shapes import Shapes
from attnlens.wording import clean, source_of

READ_AS = (
    "A percentile describes, and tests nothing: it is among the heads of a few models, of which each lineage (a model "
    "and its fine-tunings) counts once, and never the model's own. Models are compared within one part (encoder, "
    "decoder); weights.* within one kind of form, tokens.* at one length of windows, each model on its own text."
)


def typical_line(shapes: Shapes) -> Iterator[Section]:
    """One line of the terminal's summary."""
    if _compared(shapes.report) and (line := typical.beside(shapes)):
        yield Section(notes=(line,))


def typical_list(shapes: Shapes) -> Iterator[Section]:
    """The medians of the headline measures beside those of each model, and how to read that."""
    found = tuple(typical.median_heads(shapes)) if _compared(shapes.report) else ()
    items = tuple((clean(one.reading.name), f"{one.told()}; medians there: {one.medians}") for one in found)
    if items:
        yield Section("Beside other trained models", items=items, notes=(READ_AS,))


def typical_places(report: Report, measure: str) -> list[float | None]:
    """For each head the percentage of heads of its part and depth below it; none where nothing can be compared."""
    if not _compared(report):
        return []
    depths, parts = atlas.depths(report), {head.part for head in report.heads}
    subjects = {part: atlas.subject_of(report, part) for part in parts}
    found = [_place(head, measure, depths[head.layer], subjects[head.part]) for head in report.heads]
    return found if any(place is not None for place in found) else []


def _place(head: Head, measure: str, depth: Third, subject: Subject) -> float | None:
    one = head.measures.get(measure)
    if one is None or one.value is None:
        return None
    if source_of(measure) == "weights" and atlas.shares_weights(head):
        depth = "all"
    place = atlas.reference(measure, depth, subject).percentile(one.value)
    return None if place is None else round(place)


def _compared(report: Report) -> bool:
    """Whether its heads are a model's own; elsewhere they are trained anew, or changes."""
    return report.command == "inspect"
