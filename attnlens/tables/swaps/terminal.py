"""A swap in a terminal."""

from __future__ import annotations

from rich.console import Group

from attnlens.records import Report
from attnlens.tables.sections import printed
from attnlens.tables.swaps.sections import sections, site_sections


def swap_summary(report: Report) -> Group:
    """What the swap did, its checks and cost, the sweep and the healing, notes, and what has no value."""
    return Group(*printed(sections(report)))


def swap_sites(report: Report) -> Group:
    """Every exchanged site, a row each."""
    return Group(*printed(site_sections(report)))
