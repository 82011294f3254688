"""Pictures of a report of `swap-kernel`."""

from attnlens.plots.swaps.panels import swap_overview, swap_panels

__all__ = ["swap_overview", "swap_panels"]
