"""How is a swap read: in a terminal, in markdown, in a spreadsheet?"""

from attnlens.tables.swaps.pairs import Compared, compared
from attnlens.tables.swaps.rows import Rows
from attnlens.tables.swaps.sections import Section, sections, site_sections
from attnlens.tables.swaps.terminal import swap_sites, swap_summary
from attnlens.tables.swaps.text import swap_csv, swap_markdown

__all__ = [
    "Compared",
    "Rows",
    "Section",
    "compared",
    "sections",
    "site_sections",
    "swap_csv",
    "swap_markdown",
    "swap_sites",
    "swap_summary",
]
