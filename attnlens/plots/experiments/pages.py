"""Pages of the experiments' pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnlens.plots.captions import fitted
from attnlens.plots.experiments.curves import experiment_panels
from attnlens.plots.page import FOOT, HEAD, LINE, Panel, head, picture_title
from attnlens.plots.style import new_figure
from attnlens.records import Report
from attnlens.sentences.reports import ran_on, title
from attnlens.sentences.verdicts import outcome
from attnlens.wording import big, clean, counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 10.0
"""Inches of the page."""
LEFT, RIGHT = 0.2, 9.8
"""Where the first column's numbers begin and the last panel ends, in inches."""
OVER, UNDER, NUMBERS, GAP = 0.5, 0.42, 0.42, 0.22
"""Inches over a panel for its title, under and beside it for its axes, and between two."""
ACROSS, TALL = 3, 1.9
"""Panels in a row, and how tall one is, in inches."""
MANY, FLAT = 4, 1.35
"""The same where heads are followed."""
NAMED = 0.16
"""Inches of the quantity beside an axis' numbers."""
ROW_WIDE, BAR = 4.6, 0.45
"""Inches of the picture that has a row for itself, and of the layers' colours."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"
MOST = 12
"""Measures that are followed on one page."""
SHORTEST = 8
"""Characters of an experiment's name that still tell which it is."""
NOTE = 42
"""Characters that fit over a panel."""


def experiment_overview(report: Report) -> Figure:
    """All panels on a page, three in a row; where heads are followed, four in a row and the layers' colours beside."""
    grid = _grid(report)
    talls = [grid.tall(row) for row in grid.rows]
    blocks = [tall + OVER + UNDER + LINE * (_legend(row) - 1) for row, tall in zip(grid.rows, talls, strict=True)]
    height = HEAD + sum(blocks) + FOOT
    figure = new_figure(WIDTH, height, dpi=300)
    _head(figure, report)
    count = 0
    for number, row in enumerate(grid.rows):
        bottom = height - HEAD - sum(blocks[: number + 1]) + UNDER
        for (left, wide), panel in zip(grid.places(row), row, strict=True):
            axes = figure.add_axes((left / WIDTH, bottom / height, wide / WIDTH, talls[number] / height))
            letter, name = LETTERS[count % len(LETTERS)], _shortened(panel.title, int(wide * 14))
            picture_title(axes, f"{letter}  {name}", fitted(panel.note, NOTE), panel.legend)
            count += 1
            last = number == 0 and panel is row[-1]
            panel.draw(axes, **({"bar": last} if panel.bar else {}))
    return figure


@dataclass(frozen=True)
class Grid:
    """Which panels stand in which row."""

    rows: list[list[Panel]]
    across: int
    """Columns."""
    followed: bool
    """Whether they are trajectories, whose layers' colours take room at the right, and whose titles are quantities."""

    def places(self, row: list[Panel]) -> list[tuple[float, float]]:
        """Where each panel's axes begin and how wide they are, in inches."""
        if _alone(row[0]):
            return [(LEFT + row[0].left, ROW_WIDE)]
        cell = (RIGHT - BAR * self.followed - LEFT) / self.across
        beside = NUMBERS if self.followed else NUMBERS + NAMED
        return [(LEFT + column * cell + beside, cell - beside - GAP) for column in range(len(row))]

    def tall(self, row: list[Panel]) -> float:
        """Inches of a row's axes: as many as its names need where it has names."""
        if _alone(row[0]):
            return max(0.5, 0.15 * row[0].rows)
        return FLAT if self.followed else TALL


def _grid(report: Report) -> Grid:
    found = experiment_panels(report)
    followed = any(experiment.trajectories for experiment in report.experiments)
    across = MANY if followed else ACROSS
    plain = [panel for panel in found if not _alone(panel)][: MOST if followed else None]
    across = max(1, min(across, len(plain)))
    rows = [plain[start : start + across] for start in range(0, len(plain), across)]
    return Grid(rows + [[panel] for panel in found if _alone(panel)], across, followed)


def _alone(panel: Panel) -> bool:
    """Whether it needs a row for itself: its rows have long names."""
    return panel.left > 2 * (NUMBERS + NAMED)


def _shortened(title: str, width: int) -> str:
    """The title, or where it is too long less of the experiment's name before the colon, as far as that suffices."""
    name, _, quantity = title.rpartition(": ")
    room = width - len(quantity) - 2
    return (
        f"{fitted(name, room)}: {quantity}"
        if len(title) > width and name and room >= SHORTEST
        else fitted(title, width)
    )


def _legend(row: list[Panel]) -> int:
    return max(panel.legend for panel in row)


def _head(figure: Figure, report: Report) -> None:
    model = report.model
    facts = [clean(model.architecture), f"{big(model.parameters)} parameters", outcome(report)[0]]
    steps = [len(curve.steps) for e in report.experiments if e.trajectories for curve in e.curves.values()]
    facts += [counted(max(steps), "checkpoint")] if steps else []
    made = f"{clean(report.tool.name)} {clean(report.tool.version)} · seed {report.settings.seed}"
    head(figure, title(report), facts, (ran_on(report), clean(report.settings.fed), made), left=LEFT, right=RIGHT)
