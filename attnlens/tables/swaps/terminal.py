"""How is a swap read in a terminal?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from attnlens.records import Report
from attnlens.tables.swaps.sections import Section, sections, site_sections
from attnlens.tables.terminal import FittedTable
from attnlens.wording import clean


def swap_summary(report: Report) -> Group:
    """What the swap did, what vouches for it, the sweep and the healing, notes, and what has no value."""
    return Group(*_printed(sections(report)))


def swap_sites(report: Report) -> Group:
    """Every exchanged site, a row each."""
    return Group(*_printed(site_sections(report)))


def _printed(told: Iterable[Section]) -> Iterator[RenderableType]:
    for section in told:
        if section.title:
            yield ""
            yield Text(clean(section.title), style="bold")
        for line in section.lines:
            text = Text(clean(line), overflow="fold")
            yield Padding(text, (0, 0, 0, 2)) if section.items else text
        if section.rows is not None:
            yield FittedTable(section.rows.names, section.rows.columns, paged=True)
        for line in section.below:
            yield Text(clean(line), style="dim")
