"""Pictures with matplotlib: maps of layers × heads, fans of curves, overviews."""

from attnlens.plots.experiments import experiment_overview, experiment_panels
from attnlens.plots.maps import falls_far, fan_figure, map_figure, palette
from attnlens.plots.overview import margins_figure, named_parts, overview_figure
from attnlens.plots.studies import comparison_overview, comparison_panels, study_overview, study_panels
from attnlens.plots.style import panel_figure
from attnlens.plots.swaps import swap_overview, swap_panels
