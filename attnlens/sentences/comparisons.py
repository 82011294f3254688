"""What there is to say of a comparison of two models: how much was named, and what could have been."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from attnlens.records import Comparison
from attnlens.registry import FORMS, KEY_ANGLE, OWN_ROWS, QUERY_ANGLE, ROWS
from attnlens.wording import counted, listed, short, source_of

LOCAL = {
    OWN_ROWS: "own KL",
    ROWS: "KL as run",
    FORMS: "‖ΔM‖/‖M‖",
    QUERY_ANGLE: "angle W_Q°",
    KEY_ANGLE: "angle W_K°",
}
"""Distances between corresponding heads, and how a column of them is headed."""
ENOUGH_HEADS = 4
"""Heads from which a measure's spread over heads says how large a change is."""


def worth(found: Comparison) -> list[str]:
    """The distances by which heads are ranked, the first the most telling that the comparison has."""
    there = {row.measure for row in found.rows}
    return [name for name in (OWN_ROWS, FORMS, ROWS) if name in there]


def discoveries(found: Comparison) -> Iterator[str]:
    """How many changes are named of how many looked at, and in which heads the weights or the rows are what changed."""
    heads = {(row.layer, row.head) for row in found.rows if row.named}
    yield (
        f"{found.named:,} of {found.tests:,} changes (heads × measures) are named at a false-discovery rate of "
        f"{found.fdr:g}, in {len(heads)} of {counted(len(found.heads), 'head')}."
    )
    blocks = [block for block in found.blocks if block.named]
    if blocks:
        largest = max(blocks, key=lambda block: block.change or 0.0)
        yield (
            f"{len(blocks)} of {counted(len(found.blocks), 'block')} make something else of the same hidden states: "
            f"{listed([block.path for block in blocks])}, at most by {largest.change or 0.0:.2g} of their size"
            f"{f' ({largest.path})' if len(blocks) > 1 else ''}."
        )
    named = {name: _named(found, name) for name in (OWN_ROWS, FORMS, ROWS)}
    own = {(row.layer, row.head) for row in found.rows if row.measure == OWN_ROWS and row.beyond_rounding}
    own |= named[OWN_ROWS]
    named[FORMS] |= own & {(head.layer, head.head) for head in found.heads if head.relation == "changed"}
    if named[FORMS]:
        yield f"The form M of {counted(len(named[FORMS]), 'head')} is another one: {_places(named[FORMS])}."
    local = own - named[FORMS]
    if local:
        unsure = len(local - named[OWN_ROWS])
        yield (
            f"{counted(len(local), 'head')} attend otherwise to the same hidden states, their form being the same: "
            f"{_places(local)}{f' ({unsure} of them not significantly over these windows)' if unsure else ''}."
        )
    lone = [row for row in found.rows if (row.before is None) != (row.after is None) and row.measure not in LOCAL]
    if lone:
        which = listed([f"{row.measure} of {row.layer}.{row.head}" for row in lone])
        yield f"{counted(len(lone), 'measure')} of a head with a value in one model alone: {which}."
    alike = {(row.layer, row.head) for row in found.rows if row.measure == OWN_ROWS and row.beyond_rounding is False}
    inherited = (named[ROWS] & alike) - own - named[FORMS]
    if inherited:
        attend = "attends" if len(inherited) == 1 else "attend"
        yield f"{counted(len(inherited), 'head')} {attend} otherwise only because of what changed before them."


def _named(found: Comparison, measure: str) -> set[tuple[int, int]]:
    return {(row.layer, row.head) for row in found.rows if row.measure == measure and row.named}


def _places(heads: set[tuple[int, int]]) -> str:
    return listed([f"{layer}.{head}" for layer, head in sorted(heads)])


def effect_sizes(found: Comparison) -> dict[str, float]:
    """The interquartile range of each measure over the first model's heads, as the unit of a large change."""
    values: dict[str, list[float]] = defaultdict(list)
    for row in found.rows:
        if row.before is not None:
            values[row.measure].append(row.before)
    ranges = {name: float(np.subtract(*np.quantile(each, (0.75, 0.25)))) for name, each in values.items()}
    return {name: size for name, size in ranges.items() if size > 0 and len(values[name]) >= ENOUGH_HEADS}


def least_changes(found: Comparison) -> Iterator[tuple[str, str]]:
    """Of each measure of a text the smallest change that would have been named, beside its spread over heads."""
    sizes = effect_sizes(found)
    each: dict[str, list[float]] = defaultdict(list)
    for row in found.rows:
        if row.least is not None and row.se is not None and source_of(row.measure) == "tokens":
            each[row.measure].append(row.least)
    for name, values in each.items():
        if name in sizes:
            middle = float(np.median(values))
            yield name, f"{short(middle)}, {middle / sizes[name]:.1%} of the heads' interquartile range"
