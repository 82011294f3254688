"""How the heads of an inspected model stand beside those of other trained models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attnlens import atlas
from attnlens.atlas import Reference, Subject, Third
from attnlens.records import Head, Report
from attnlens.sections.section import Section
from attnlens.shapes import MeasureMap, Shapes, middle
from attnlens.wording import clean, decimals_for, listed, source_of, title_of, written

SUFFIXES = {1: "st", 2: "nd", 3: "rd"}


@dataclass(frozen=True)
class MedianHead:
    """The median over one part's heads, and the heads of other models that it is compared with."""

    reading: MeasureMap
    median: float
    reference: Reference
    part: str
    several: bool
    """Whether the model has other parts."""

    def told(self, name: str = "") -> str:
        """`median symmetry 0.07 at the 63rd percentile of 80 heads of 2 trained encoders`; `name` is the measure's."""
        part = self.part if self.several else ""
        words = (part, "median", name, _numbers([self.median])[0], place(self.reference, self.median))
        return " ".join(filter(None, words))

    @property
    def medians(self) -> str:
        """`MiniLM 0.07, rxnmapper 0.12`: what the median heads of those models read."""
        numbers = _numbers([spread.median for spread in self.reference.spreads])
        return listed((f"{m.name} {n}" for m, n in zip(self.reference.models, numbers, strict=True)), len(numbers))


def median_heads(shapes: Shapes) -> Iterator[MedianHead]:
    """Each headline measure that varies, part by part, where the atlas has heads to compare its median with.

    None where some heads were left out: the median of those that were read is not the model's.
    """
    if shapes.report.settings.layers is not None or shapes.report.settings.heads is not None:
        return
    parts = list(dict.fromkeys(shapes.parts))
    subjects = {part: atlas.subject_of(shapes.report, part) for part in parts}
    for reading in shapes.readings.values():
        for part in parts if reading.info.headline and not reading.constant else ():
            rows = [row for row, of in enumerate(shapes.parts) if of == part]
            reference = atlas.reference(reading.name, "all", subjects[part])
            median = middle(reading.values[rows])
            if reference.models and median == median:  # NaN where no head of the part has a value
                yield MedianHead(reading, median, reference, part, len(parts) > 1)


def beside(shapes: Shapes) -> str:
    """One line: a headline of the weights and one of the tokens beside other trained models; empty where none is."""
    first: dict[str, MedianHead] = {}
    for one in median_heads(shapes):
        first.setdefault(source_of(one.reading.name), one)
    chosen = [first[source] for source in ("weights", "tokens") if source in first]
    told = "; ".join(one.told(title_of(one.reading.name)) for one in chosen)
    return f"Beside trained models (a description, no test): {told}." if told else ""


def place(reference: Reference, value: float) -> str:
    """`at the 63rd percentile of 80 heads of 2 trained encoders`, or `above all …`."""
    models = reference.models
    named = f"of {len(models)} trained {models[0].part}s" if len(models) > 1 else f"of {models[0].name}"
    heads = f"{reference.heads} heads {named}"
    percentage = reference.percentile(value) or 0.0
    if percentage in (0.0, 100.0):
        return f"{'below' if percentage == 0 else 'above'} all {heads}"
    return f"at the {ordinal(min(99, max(1, round(percentage))))} percentile of {heads}"


def ordinal(number: int) -> str:
    """`1st`, `22nd`, `13th`."""
    return f"{number}{'th' if number % 100 in (11, 12, 13) else SUFFIXES.get(number % 10, 'th')}"


def _numbers(values: list[float]) -> list[str]:
    decimals = decimals_for(values, 2)
    return [written(value, decimals).replace("-", "−") for value in values]


READ_AS = (
    "A percentile describes, and tests nothing: it is among the heads of a few models, of which each lineage (a model "
    "and its fine-tunings) counts once, and never the model's own. Models are compared within one part (encoder, "
    "decoder); weights.* within one kind of form, tokens.* at one length of windows, each model on its own text."
)


def typical_line(shapes: Shapes) -> Iterator[Section]:
    """One line of the terminal's summary."""
    if _compared(shapes.report) and (line := beside(shapes)):
        yield Section(notes=(line,))


def typical_list(shapes: Shapes) -> Iterator[Section]:
    """The medians of the headline measures beside those of each model, and how to read that."""
    found = tuple(median_heads(shapes)) if _compared(shapes.report) else ()
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
