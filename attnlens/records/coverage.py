"""Coverage: how much of what was asked for a report holds, and why the rest is missing."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from attnlens.records.measures import Count, Record

OPENERS = ("A", "An", "Its", "No", "None", "The", "There", "This")
"""Words that begin a sentence; any other capital belongs to a name."""


def _clause(sentence: str) -> str:
    """The sentence as it stands behind «because»: without its capital and its period."""
    first, blank, rest = sentence.strip().rstrip(".").partition(" ")
    return (first.lower() if first in OPENERS else first) + blank + rest


class Skipped(Record):
    """What was not analysed, and why."""

    site: str
    """The site's name, or a module's path."""
    heads: list[Count] = []
    """Which heads; empty means all."""
    measure: str | None = None
    """Which measure or source; None means all."""
    reason: Annotated[str, AfterValidator(_clause)]
    """Why, as it stands behind «because»."""


class Coverage(Record):
    """What was analysed and what was not."""

    sites: Count
    """Sites asked for."""
    heads: Count
    """Heads asked for."""
    analysed: Count
    """Heads of which at least one value was measured."""
    without: dict[str, Count] = {}
    """How many of the analysed heads have no value from a source that was asked for, by source."""
    skipped: list[Skipped] = []
    """What is missing, with reasons."""

    @property
    def complete(self) -> bool:
        """Whether all that was asked for was measured."""
        return self.analysed == self.heads and not self.without and not self.skipped

    @property
    def sentence(self) -> str:
        """`COMPLETE: 72 of 72 heads`, or `PARTIAL: 60 of 72 heads, without tokens.*, because …`."""
        count = f"{self.analysed} of {self.heads} heads"
        if self.complete:
            return f"COMPLETE: {count}"
        lacking = sorted(self.skipped, key=lambda skip: skip.measure not in self.without)  # what heads lack comes first
        reasons = list(dict.fromkeys(skip.reason for skip in lacking)) or ["this input does not reach them"]
        more = len(reasons) - 1
        others = f" (and {more} more reason{'s' if more > 1 else ''})" if more else ""
        return f"PARTIAL: {count}{self._lacking}, because {reasons[0]}{others}"

    @property
    def _lacking(self) -> str:
        """What the analysed heads lack; where they lack nothing, the first place that was left out."""
        lacking = [
            f"{'' if count == self.analysed else f'{count} of them '}without {source}.*"
            for source, count in self.without.items()
        ]
        if not lacking and self.analysed == self.heads and self.skipped:
            more = len({skip.site for skip in self.skipped}) - 1
            lacking = [f"without {self.skipped[0].site}" + (f" and {more} more" if more else "")]
        return "".join(f", {words}" for words in lacking)
