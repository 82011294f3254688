"""Captions of pictures as text: what each panel shows, units, symbols, the null, and what errors cover."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import cycle
from string import ascii_lowercase
from typing import TYPE_CHECKING

from attnlens.analyzers.registry import find_measure, list_analyzers
from attnlens.report.sections.facts import population
from attnlens.report.sections.reference import null_words
from attnlens.wording import clean

if TYPE_CHECKING:
    from attnlens.records import Report
    from attnlens.report.pictures.charts import Panel


def caption_panels(
    report: Report, panels: Collection[Panel], title: str, facts: Iterable[str], notes: Iterable[str] = ()
) -> str:
    """Return the caption of a page: title and facts on the model, a paragraph for each panel, notes."""
    known = [*filter(None, facts)]
    paragraphs = [f"{title}: {', '.join(known)}" if known else title]
    for letter, panel in zip(cycle(ascii_lowercase), panels, strict=False):
        name = f" ({panel.stem})" if find_measure(panel.stem).meaning else ""
        lines = [line for line in panel.caption.splitlines() if line not in known] or [panel.note]
        letters = f"({letter}) " * (len(panels) > 1)
        paragraphs.append(" ".join([f"{letters}{panel.title}{name}:", *map(_end, lines)]))
    remarks = [*notes, f"input: {report.settings.fed}" * bool(report.settings.fed), population(report)]
    paragraphs += [f"{remark[:1].upper()}{remark[1:]}" for remark in remarks]
    paragraphs += _explain_measures(report, {panel.stem for panel in panels})
    return "".join(f"{_end(clean(paragraph))}\n" for paragraph in paragraphs if paragraph)


def _explain_measures(report: Report, names: Collection[str]) -> list[str]:
    """Explain the null of these measures, and the symbols of the analyzers that compute them."""
    nulls = {name for head in report.heads for name, measure in head.measures.items() if measure.null is not None}
    nulls |= {name for experiment in report.experiments for name in names if experiment.null(name) is not None}
    infos = [find_measure(name) for name in sorted(nulls.intersection(names))]
    entries = [entry for entry in list_analyzers() if any(info.name in names for info in entry.measures)]
    symbols = dict.fromkeys(entry.definitions for entry in entries if entry.definitions)
    return [f"Null: {null_words(infos)}, as mean ± sd"] * bool(infos) + [f"Symbols: {text}" for text in symbols]


def _end(sentence: str) -> str:
    """End a sentence with a full stop."""
    return sentence if sentence.endswith((".", "?", "!", ":")) or not sentence else f"{sentence}."
