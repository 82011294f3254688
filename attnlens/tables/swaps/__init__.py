"""A swap in a terminal, in markdown, in a spreadsheet."""

from attnlens.tables.sections import Rows, Section
from attnlens.tables.swaps.sections import sections, site_sections
from attnlens.tables.swaps.terminal import swap_sites, swap_summary
from attnlens.tables.swaps.text import swap_csv, swap_markdown

__all__ = [
    "Rows",
    "Section",
    "sections",
    "site_sections",
    "swap_csv",
    "swap_markdown",
    "swap_sites",
    "swap_summary",
]
