"""A report in a terminal, in markdown, in a spreadsheet; each file is imported when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnlens.tables.details_table import details as details
    from attnlens.tables.heads import all_heads as all_heads
    from attnlens.tables.lists import (
        analyzers_table as analyzers_table,
    )
    from attnlens.tables.lists import (
        doctor_table as doctor_table,
    )
    from attnlens.tables.lists import (
        kernels_table as kernels_table,
    )
    from attnlens.tables.lists import (
        measures_table as measures_table,
    )
    from attnlens.tables.markdown_page import markdown as markdown
    from attnlens.tables.selection import selections as selections
    from attnlens.tables.spreadsheet import csv as csv
    from attnlens.tables.spreadsheet import windows_csv as windows_csv
    from attnlens.tables.summary_table import summary as summary
    from attnlens.tables.swaps import swap_sites as swap_sites
    from attnlens.tables.terminal import console as console

_HOMES = {
    "all_heads": "attnlens.tables.heads",
    "analyzers_table": "attnlens.tables.lists",
    "console": "attnlens.tables.terminal",
    "csv": "attnlens.tables.spreadsheet",
    "details": "attnlens.tables.details_table",
    "doctor_table": "attnlens.tables.lists",
    "kernels_table": "attnlens.tables.lists",
    "markdown": "attnlens.tables.markdown_page",
    "measures_table": "attnlens.tables.lists",
    "selections": "attnlens.tables.selection",
    "summary": "attnlens.tables.summary_table",
    "swap_sites": "attnlens.tables.swaps",
    "windows_csv": "attnlens.tables.spreadsheet",
}

__all__ = [
    "all_heads",
    "analyzers_table",
    "console",
    "csv",
    "details",
    "doctor_table",
    "kernels_table",
    "markdown",
    "measures_table",
    "selections",
    "summary",
    "swap_sites",
    "windows_csv",
]


def __getattr__(name: str) -> Any:
    """What prints a list needs none of what prints a report."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'attnlens.tables' has no attribute {name!r}")
