"""Pictures drawn with matplotlib: maps of layers × heads, fans of curves, overviews.

Contents: `style` (settings, colours and colour maps, formats, ticks), `charts` (charts and pages of panels), and three
modules that draw overviews and build panels: `maps` (heads), `experiments` (also studies and comparisons), `swaps`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from attnlens.errors import UsageError
from attnlens.records import Kind, Report
from attnlens.report.pictures import experiments as series
from attnlens.report.pictures import maps, swaps
from attnlens.report.pictures.charts import Panel, panel_figure
from attnlens.report.sections.section import Picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from attnlens.report.shapes import Shapes

KINDS: dict[Kind, tuple[Callable[..., Figure], Callable[[Report], list[Panel]], str]] = {
    "swap": (swaps.swap_overview, swaps.swap_panels, "effects of the kernel"),
    "comparison": (series.comparison_overview, series.comparison_panels, "changed heads and their significance"),
    "experiments": (series.experiment_overview, series.experiment_panels, "curves of the experiments"),
    "studies": (series.study_overview, series.study_panels, "results and learning curves"),
}
"""Kind of report → function that draws the overview, function that builds the other panels, and alternative text."""


def list_pictures(shapes: Shapes) -> list[Picture]:
    """List all pictures of a report, the overview first.

    Raise UsageError if there are no measures or curves to draw, or if a value is too large to draw.
    """
    report = shapes.report
    if report.kind in KINDS:
        draw, build_panels, shows = KINDS[report.kind]
        overview, panels = Picture("overview", partial(draw, report), shows), build_panels(report)
    else:
        shows = "maps of layers by heads, shares and curves"
        overview, panels = Picture("overview", partial(maps.overview_figure, shapes), shows), maps.head_panels(shapes)
    if not panels and report.kind == "experiments":
        raise UsageError("The experiments have no curves to draw.", "Omit --figure and --html.")
    return [overview, *(Picture(panel.stem, partial(panel_figure, report, panel), panel.title) for panel in panels)]
