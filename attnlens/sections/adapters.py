"""What an adapter did to the model: which heads it moved furthest, and what they read before and after."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from attnlens.records import Head, Report
from attnlens.registry import comparing, info_of
from attnlens.sections.section import Column, Section, Table
from attnlens.sentences.reports import adapter
from attnlens.wording import counted, decimals_for, short, title_of, written

MOST_HEADS = 12
"""Heads that are shown, those moved furthest first."""


def adapter_sections(report: Report) -> Iterator[Section]:
    """The adapter in a sentence, how far it moved the heads, and those that it moved furthest; nothing without one."""
    if report.model.adapter is None:
        return
    first, *others = (info.name for found in comparing("weights") for info in found.measures)
    known = [head for head in report.heads if _value(head, first) is not None]
    ranked = sorted(known, key=lambda head: -(_value(head, first) or 0.0))
    lines = [adapter(report)]
    if ranked:
        sizes = [_value(head, first) or 0.0 for head in ranked]
        moved, median = sum(size > 0 for size in sizes), float(np.median(sizes))
        lines.append(
            f"It moved M in {moved} of {counted(len(ranked), 'head')}; ‖M' − M‖/‖M‖: median {short(median)}, "
            f"largest {short(sizes[0])}."
        )
    top = [head for head in ranked[:MOST_HEADS] if _value(head, first)]
    yield Section("Adapter", lines=tuple(lines), table=_table(top, (first, *others)) if top else None)


def _table(heads: Sequence[Head], names: Sequence[str]) -> Table:
    """A row a head: how far it was moved; each headline measure without the adapter, with it, and the difference."""
    places = [Column("", name, tuple(str(getattr(head, name)) for head in heads)) for name in ("layer", "head")]
    if len({head.part for head in heads}) > 1:
        places.append(Column("", "part", tuple(head.part for head in heads), words=True))
    columns = [Column("", title_of(name), _cells([_value(head, name) for head in heads])) for name in names]
    for name in dict.fromkeys(name for head in heads for name in head.measures):
        pairs = [(_base(head, name), _value(head, name)) for head in heads]
        if not info_of(name).headline or all(base is None for base, _ in pairs):
            continue
        differences = [None if base is None or value is None else value - base for base, value in pairs]
        for title, values in (("base", [base for base, _ in pairs]), ("adapted", [value for _, value in pairs])):
            columns.append(Column(title_of(name), title, _cells(values)))
        columns.append(Column(title_of(name), "difference", _cells(differences)))
    return Table(tuple(places), tuple(columns))


def _cells(values: Sequence[float | None]) -> tuple[str, ...]:
    decimals = decimals_for([value for value in values if value is not None])
    return tuple(written(value, decimals) for value in values)


def _value(head: Head, name: str) -> float | None:
    return head.measures[name].value if name in head.measures else None


def _base(head: Head, name: str) -> float | None:
    return head.measures[name].base if name in head.measures else None
