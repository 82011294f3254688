"""A Check: how one rule came out on one report, with the heads that break it."""

from __future__ import annotations

from attnlens.choices import Part
from attnlens.records.measures import Count, Number, Record


class Breach(Record):
    """One head that breaks a rule."""

    site: str
    """The site's name."""
    layer: Count
    """The site's running number."""
    head: Count
    """The query head's number."""
    part: Part
    """encoder, decoder, cross or a tower's name."""
    value: Number | None
    """What it reads; None where it has no value any more."""
    base: Number | None = None
    """What the baseline says, or a second computation read."""
    p: Number | None = None
    """Two-sided p of a difference as large by chance; None where the value has no standard error."""


class Check(Record):
    """How one rule came out."""

    id: str
    """What stays the same when the rule's numbers are changed: subject, aggregate, operator, filters."""
    rule: str
    """The rule as it is written: `tokens.entropy: min > 0.05 @layers 0-3`."""
    subject: str
    """What is looked at: a measure, one of its columns, or a field of the report."""
    wanted: str
    """What must hold: `min > 0.05`."""
    passed: bool
    """Whether it holds."""
    value: Number | None = None
    """What was compared; None where heads are compared one by one, and not together."""
    heads: Count | None = None
    """Over how many heads; None for a field of the report."""
    without: Count = 0
    """How many heads that the rule names have no value, and are left out."""
    breaches: list[Breach] = []
    """The heads that break it, the worst first; empty where it holds or is about all heads together."""
    file: str | None = None
    """The file in which the rule stands; None for one that was given in the call."""
    line: Count | None = None
    """Its line there, from 1 on."""
