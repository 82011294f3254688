"""What `swap-kernel` found, as sections and as rows of a sheet."""

from attnlens.sections.swaps.summary import site_sections, swap_sections
from attnlens.sections.swaps.tables import swap_rows

__all__ = ["site_sections", "swap_rows", "swap_sections"]
