"""Findings: answers to the questions that a report is read for, each with its evidence."""

from __future__ import annotations

from typing import Literal

from attnlens.records.measures import Record

Severity = Literal["none", "notable", "problem"]
"""`none`: nothing differs from chance or from the original; `notable`: something does; `problem`: act on it."""


class Finding(Record):
    """Answer to one question about a report."""

    question: str  # Question in plain words: `Symmetric?`
    answer: str  # Answer in one sentence
    evidence: str = ""  # Numbers that support the answer: values with their errors, nulls or intervals
    severity: Severity = "notable"
    measures: list[str] = []  # Measures that the answer is derived from
