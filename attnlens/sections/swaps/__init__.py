"""What `swap-kernel` found, as sections and as rows of a sheet."""

from attnlens.sections.swaps.csv_rows import swap_rows
from attnlens.sections.swaps.summary import site_sections, swap_sections

__all__ = ["site_sections", "swap_rows", "swap_sections"]
