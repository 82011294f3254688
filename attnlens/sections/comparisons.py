"""What `compare` found: the heads that changed, worst first; how the models differ as wholes; what an adapter did."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from attnlens.records import Comparison, Head, HeadChange, MeasureChange, Outcome, Report, Shift, Spread
from attnlens.registry import OWN_ROWS, comparing, info_of
from attnlens.sections.section import Cell, Column, Row, Section, Table
from attnlens.sentences.comparisons import LOCAL, discoveries, effect_sizes, least_changes, worth
from attnlens.sentences.reports import adapter
from attnlens.shapes import Shapes
from attnlens.wording import NO_VALUE, clean, counted, decimals_for, short, title_of, written

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
        pairs = [(getattr(head.measures.get(name), "base", None), _value(head, name)) for head in heads]
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


EXPLAINED = (
    "own KL: each block of the second model takes the hidden states that the first one's took: what differs is of that "
    "block. KL as run holds what the blocks before it changed, too."
)
SHOWN_HEADS = 16
"""Heads that a page of a terminal has room for."""


@dataclass(frozen=True)
class Compared:
    """A head with all that is said of it."""

    head: HeadChange
    rows: dict[str, MeasureChange]

    @property
    def named(self) -> list[MeasureChange]:
        """Its changes that are named."""
        return [row for row in self.rows.values() if row.named]

    def delta(self, name: str) -> float | None:
        """The change of a measure."""
        return self.rows[name].delta if name in self.rows else None


def compared_models(report: Report) -> str:
    """`base → model`."""
    found = report.comparison
    return report.model.title if found is None else f"{found.base.title} → {report.model.title}"


def comparison_opening(shapes: Shapes) -> Iterator[Section]:
    """How the models differ as wholes, and how many heads changed."""
    found = shapes.report.comparison
    assert found is not None  # noqa: S101
    yield Section("What changed", items=tuple(map(clean, (*_of_heads(found), *found.notes))))


def comparison_sections(report: Report, *, all_heads: bool, opened: bool = False) -> Iterator[Section]:
    """How the models differ as wholes, unless that is said already; the heads that changed, worst first."""
    found = report.comparison
    assert found is not None  # noqa: S101
    if not opened:
        yield Section(lines=tuple(map(clean, (*found.notes, *_of_heads(found)))))
    if found.shifts:
        yield _shift_section(found.shifts)
        return
    ranked = [one for one in worst_first(found) if one.named]
    changed = ranked if all_heads else ranked[:SHOWN_HEADS]
    if changed:
        yield _head_section(changed, found, len(ranked))
    least = tuple(least_changes(found))
    if least:
        yield Section("Smallest changes that would have been named (median over heads)", items=least)


def _of_heads(found: Comparison) -> list[str]:
    return [] if found.shifts else [*discoveries(found), *_predictions(found.outcome)]


def worst_first(found: Comparison) -> list[Compared]:
    """Heads by what differs within their own block, then by how far their form and their rows moved."""
    rows: dict[tuple[int, int], dict[str, MeasureChange]] = defaultdict(dict)
    for row in found.rows:
        rows[row.layer, row.head][row.measure] = row
    every = [Compared(head, rows[head.layer, head.head]) for head in found.heads]
    return sorted(every, key=lambda one: [-(one.delta(name) or 0.0) if one.named else 1.0 for name in worth(found)])


def _head_section(changed: Sequence[Compared], found: Comparison, total: int) -> Section:
    sizes = effect_sizes(found)
    names = (
        Column("", "layer", tuple(str(one.head.layer) for one in changed)),
        Column("", "head", tuple(_place(one.head) for one in changed), words=True),
    )
    distances = {name: title for name, title in LOCAL.items() if any(name in one.rows for one in changed)}
    columns = []
    for name, title in distances.items():
        hints = tuple(_hint(one, name) for one in changed)
        columns.append(Column("", title, tuple(_distance(one, name) for one in changed), hints=hints))
    columns[3:3] = [  # after the first three distances
        Column("", "named", tuple(str(len(one.named)) for one in changed)),
        Column("", "largest change of a measure", tuple(_largest(one, sizes) for one in changed), words=True),
    ]
    columns.insert(0, Column("", "form M", tuple(one.head.relation or NO_VALUE for one in changed), words=True))
    more = total - len(changed)
    notes = ["* is named."]
    if OWN_ROWS in distances:
        notes.insert(0, EXPLAINED)
    if more > 0:
        notes.append(f"{counted(more, 'more head')} with named changes: --all-heads, --csv or --json.")
    table = Table(names, tuple(columns), fit="first")
    return Section("Heads that changed, worst first", table=table, notes=tuple(notes))


def _place(head: HeadChange) -> str:
    return str(head.head) if head.partner == head.head else f"{head.head} → {head.partner}"


def _distance(one: Compared, name: str) -> str:
    row = one.rows.get(name)
    if row is None or row.delta is None:
        return NO_VALUE
    if row.named or row.delta > (row.rounding or 0.0):
        return f"{short(row.delta)}{'*' * row.named}"
    return "0" if row.delta == 0 else "rounding"


def _hint(one: Compared, name: str) -> str:
    row = one.rows.get(name)
    if row is None or row.q is None:
        return "" if row is None else clean(row.reason or "")
    return f"q {row.q:.2g}; rounding alone {short(row.rounding or 0.0)}"


def _largest(one: Compared, sizes: dict[str, float]) -> str:
    """The named measure that moved furthest, in units of its spread over the first model's heads."""
    found = [row for row in one.named if row.measure in sizes and row.delta is not None and row.before is not None]
    if not found:
        return NO_VALUE
    row = max(found, key=lambda row: abs(row.delta or 0.0) / sizes[row.measure])
    return f"{row.measure} {short(row.before or 0.0)} → {short(row.after or 0.0)}"


def _predictions(outcome: Outcome | None) -> Iterator[str]:
    """How the predictions differ, in a sentence each."""
    if outcome is None:
        return
    loss = outcome.loss
    if loss is not None:
        ends = "" if loss.ci95 is None else f" (95 % interval {loss.ci95[0]:+.4f} to {loss.ci95[1]:+.4f})"
        yield f"Loss {loss.before:.4f} → {loss.after:.4f} nats a token: {loss.delta:+.4f}{ends}."
    if outcome.kl is not None and outcome.top1_agreement is not None:
        same = f"the same first choice for {outcome.top1_agreement:.1%}"
        yield f"KL of the predictions {short(outcome.kl)} nats a token; {same}."
    elif outcome.hidden_cosine is not None:
        yield f"Cosine of the last hidden states {outcome.hidden_cosine:.6f}."


def _shift_section(shifts: Sequence[Shift]) -> Section:
    names = (Column("", "measure", tuple(one.measure for one in shifts), words=True),)
    columns = (
        Column("", "first model", tuple(_quartiles(one.before) for one in shifts)),
        Column("", "second model", tuple(_quartiles(one.after) for one in shifts)),
    )
    notes = ("Medians over heads, with the quartiles. They are of other heads, so that nothing is tested.",)
    return Section("Distributions over heads", table=Table(names, columns), notes=notes)


def _quartiles(part: Spread) -> str:
    low, middle, high = map(short, part.quartiles)
    return f"{middle} ({low} to {high})"


def comparison_rows(report: Report) -> list[Row]:
    """One row a head and measure; without corresponding heads one a measure."""
    found = report.comparison
    if found is None:
        return []
    if found.shifts:
        return [_shift_row(one) for one in found.shifts]
    partners = {(head.layer, head.head): head for head in found.heads}
    rows: list[Row] = []
    for row in found.rows:
        head = partners[row.layer, row.head]
        where: dict[str, Cell] = {"site": head.site, "layer": row.layer, "head": row.head, "partner": head.partner}
        read = {name: getattr(row, name) for name in MeasureChange.model_fields if name not in where}
        rows.append(where | {"relation": head.relation} | read)
    return rows


def _shift_row(one: Shift) -> dict[str, Cell]:
    found: dict[str, Cell] = {"measure": one.measure}
    for which, part in (("before", one.before), ("after", one.after)):
        found[f"{which}.heads"] = part.heads
        found |= dict(zip((f"{which}.q25", f"{which}.median", f"{which}.q75"), part.quartiles, strict=True))
        found[f"{which}.median.se"] = part.median_se
    return found
