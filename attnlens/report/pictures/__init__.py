"""Pictures drawn with matplotlib: maps of layers × heads, fans of curves, overviews.

Contents: `style` (settings, colours and colour maps, formats, ticks), `charts` (the charts of all pictures, and pages
of panels), and the pictures of one subject: `maps` (heads, with their overview), `experiments`, `studies` (and
comparisons), `swaps`.
Inputs: a `Report`, its `Shapes`, or records of it. Outputs: matplotlib figures. Importers: `report.sections`, which
names the pictures, and `report.render` and `report.export`, which encode them.
"""

from attnlens.report.pictures.charts import panel_figure
from attnlens.report.pictures.experiments import experiment_overview, experiment_panels
from attnlens.report.pictures.maps import (
    falls_far,
    fan_figure,
    first_step,
    groups_by_part,
    map_figure,
    margins_figure,
    named_parts,
    overview_figure,
    palette,
)
from attnlens.report.pictures.studies import comparison_overview, comparison_panels, study_overview, study_panels
from attnlens.report.pictures.swaps import swap_overview, swap_panels
