"""How is a report read in a terminal, in markdown, in a spreadsheet?"""

from attnlens.tables.details import details
from attnlens.tables.heads import all_heads
from attnlens.tables.lists import analyzers_table, doctor_table, kernels_table, measures_table
from attnlens.tables.markdown import markdown
from attnlens.tables.selection import selections
from attnlens.tables.spreadsheet import csv, windows_csv
from attnlens.tables.summary import summary
from attnlens.tables.swaps import swap_sites
from attnlens.tables.terminal import console

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
