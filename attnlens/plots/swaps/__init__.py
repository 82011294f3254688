"""Pictures of a report of `swap-kernel`."""

from attnlens.plots.swaps.pages import panel_figure, swap_overview
from attnlens.plots.swaps.panels import swap_panels

__all__ = ["panel_figure", "swap_overview", "swap_panels"]
