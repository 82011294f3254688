"""Pictures with matplotlib: maps of layers × heads, fans of curves, overviews."""

from attnlens.plots.comparison import comparison_overview, comparison_panels
from attnlens.plots.experiments import experiment_overview, experiment_panels
from attnlens.plots.fans import falls_far, fan_figure
from attnlens.plots.maps import map_figure, palette
from attnlens.plots.overview import margins_figure, named_parts, overview_figure
from attnlens.plots.page import panel_figure
from attnlens.plots.studies import study_overview, study_panels
from attnlens.plots.swaps import swap_overview, swap_panels

__all__ = [
    "comparison_overview",
    "comparison_panels",
    "experiment_overview",
    "experiment_panels",
    "falls_far",
    "fan_figure",
    "map_figure",
    "margins_figure",
    "named_parts",
    "overview_figure",
    "palette",
    "panel_figure",
    "study_overview",
    "study_panels",
    "swap_overview",
    "swap_panels",
]
