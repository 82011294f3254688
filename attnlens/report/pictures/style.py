"""Colours, fonts, captions and pages of pictures; the output is byte-identical in every run."""

from __future__ import annotations

import io
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import matplotlib.style
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.ticker import Formatter

from attnlens.analyzers.registry import MeasureInfo
from attnlens.choices import Part
from attnlens.records import Report
from attnlens.report.shapes import MeasureMap, Shapes, group_of
from attnlens.wording import SCIENTIFIC, big, clean, counted, decimals_for, listed, short, title_of, written

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from jaxtyping import Float
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Band:
    """Median and quartiles of one curve over the heads of one part; all steps use the same heads."""

    part: Part  # encoder, decoder or cross
    quartiles: Float[np.ndarray, "3 steps"]  # lower quartile, median, upper quartile
    counted: int  # number of heads with enough steps, over which quartiles are computed
    heads: int  # number of heads of the part that have the curve

    @property
    def steps(self) -> int:
        """Number of steps."""
        return int(self.quartiles.shape[1])


def bands(shapes: Shapes, name: str) -> list[Band]:
    """Compute one band per part that has the curve; parts see different inputs, so their heads are not pooled."""
    groups: dict[Part, list[Float[np.ndarray, " steps"]]] = {}
    for row, curve in sorted(shapes.curves[name], key=lambda found: found[0]):
        groups.setdefault(shapes.parts[row], []).append(curve)
    return [_band(part, curves) for part, curves in groups.items()]


def long_enough(curves: list[Float[np.ndarray, " steps"]]) -> Float[np.ndarray, "heads steps"]:
    """Stack the curves with at least the most common length (the longest of ties), cut to that length."""
    lengths = Counter(map(len, curves))
    steps = max(lengths, key=lambda length: (lengths[length], length))
    return np.stack([curve[:steps] for curve in curves if len(curve) >= steps])


def first_step(info: MeasureInfo) -> int:
    """Return a curve's first step: an index k starts at 1, as in the formulas, a distance at 0."""
    return 1 if info.steps == "index" else 0


def _band(part: Part, curves: list[Float[np.ndarray, " steps"]]) -> Band:
    counted = long_enough(curves)
    return Band(part, np.percentile(counted, [25, 50, 75], axis=0), len(counted), len(curves))


def full_caption(shapes: Shapes, reading: MeasureMap, width: int, mark: str = "") -> str:
    """Format the caption of a map: meaning, formula, null with its `mark`, error, missing values, model."""
    info = reading.info
    note = ", ".join(text for text in (short_caption(reading), mark) if text)
    lines = [_format_meaning(info), info.caution, _format_range(reading), _capitalise(note)]
    lines += [f"No value for {counted(count, 'head')}: {why}" for why, count in reading.reasons.items()]
    return wrapped([*lines, model_line(shapes), coverage_line(shapes)], width)


def curve_caption(shapes: Shapes, name: str, width: int) -> str:
    """Format the caption of a fan of curves."""
    parts = bands(shapes, name)
    alone = ", each part by itself" if len(parts) > 1 else ""
    lines = [_format_meaning(shapes.info(name)), shapes.info(name).caution]
    lines.append(f"{counted(len(shapes.curves[name]), 'head')}; black: median, dashed: quartiles{alone}.")
    lines += [
        f"{_capitalise(band.part)}: those of the {band.counted} of {band.heads} heads with {band.steps} steps or more."
        for band in parts
        if band.counted < band.heads
    ]
    return wrapped([*lines, model_line(shapes), coverage_line(shapes)], width)


def short_curve_caption(shapes: Shapes, name: str) -> str:
    """Format one line that explains a fan's black lines; empty if a legend names several parts' medians."""
    parts = bands(shapes, name)
    if len(parts) > 1:
        return ""
    if parts[0].counted < parts[0].heads:
        return f"black: median, quartiles of {parts[0].counted} of {parts[0].heads} heads, ≥ {parts[0].steps} steps"
    return "median black, quartiles dashed"


def short_caption(reading: MeasureMap) -> str:
    """Format the null as mean ± sd, or the error with the number of sequences, in one line."""
    if reading.null is not None:
        decimals = decimals_for(reading.null[1:] if reading.null[1] else reading.null, figures=2)
        return f"null {typeset(reading.null[0], decimals)} ± {typeset(reading.null[1], decimals)} (mean ± sd)"
    texts = ["not identified"] if reading.info.identified == "nowhere" else []
    if reading.error is not None:
        counts = reading.counts
        rests_on = listed(counts) if len(counts) < 2 else f"{counts[0]} to {counts[-1]}"
        texts.append(f"{rests_on} sequences; heads' median se {short(reading.error)}")
    return "; ".join(texts)


def model_line(shapes: Shapes) -> str:
    """Format the model's name, architecture and size."""
    model = shapes.report.model
    size = f"{big(model.parameters)} parameters"
    return f"{model.title} ({clean(model.architecture)}, {size}, {layout_line(shapes)})"


def layout_line(shapes: Shapes) -> str:
    """Format the numbers of layers and heads."""
    return f"{counted(len(shapes.layers), 'layer')} × {counted(len(shapes.heads), 'head')}"


def coverage_line(shapes: Shapes) -> str:
    """Format the coverage: `COMPLETE: 72 of 72 heads`, or what is missing and why."""
    return clean(shapes.report.coverage.sentence)


def settings_line(shapes: Shapes) -> str:
    """Format the input and the version of attnlens."""
    settings, tool = shapes.report.settings, shapes.report.tool
    fed = f"input: {clean(settings.fed)} · " if settings.fed else ""
    return f"{fed}{clean(tool.name)} {clean(tool.version)}"


def heading(info: MeasureInfo) -> str:
    """Format a measure's name as a title: `effective rank`, `singular values of M`."""
    return fitted(title_of(info.name) + (f" of {info.matrix}" if info.matrix else ""), 60)


def source_heading(shapes: Shapes, name: str) -> str:
    """Format the source of a row of pictures."""
    settings = shapes.report.settings
    group = group_of(shapes.info(name))
    return f"{group} – {clean(settings.fed)}" if group == "tokens" and settings.fed else group


def typeset(number: float, decimals: int) -> str:
    """Format a number with a true minus sign."""
    return written(number, decimals).replace("-", "−")


def fitted(text: str, width: int) -> str:
    """Cut a text that has more than `width` characters, ending it with …."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def wrapped(lines: list[str], width: int) -> str:
    """Wrap lines at `width` characters and drop empty ones."""
    return "\n".join(textwrap.fill(clean(line), width) for line in lines if line)


def _format_meaning(info: MeasureInfo) -> str:
    return _capitalise(f"{info.meaning}: {info.formula}" if info.formula else info.meaning)


def _capitalise(text: str) -> str:
    return text[:1].upper() + text[1:]


def _format_range(reading: MeasureMap) -> str:
    info, present = reading.info, reading.present
    if reading.labels:
        return ""
    decimals = decimals_for(present)
    least, most = (typeset(float(bound), decimals) for bound in (present.min(), present.max()))
    shown = f"Here {least} to {most}" if present.min() < present.max() else f"Here {least} for every head"
    low, high = ("" if bound is None else f"{bound:g}".replace("-", "−") for bound in (info.low, info.high))
    if low and high:
        return f"{shown}; possible: {low} to {high}."
    return (
        f"{shown}; possible: at least {low}." if low else f"{shown}; possible: at most {high}." if high else f"{shown}."
    )


HEAD, FOOT = 0.62, 0.3
"""Inches above and below all pictures."""
LINE = 0.13
"""Inches per additional legend line."""
TITLE, FACTS, FOOTNOTE = 80, 155, 170
"""Characters that fit in the page's title, a line of facts and the footer, on ten inches."""


@dataclass(frozen=True)
class Panel:
    """One picture, with its texts and sizes."""

    stem: str  # file name without suffix
    title: str  # content of the picture
    note: str  # line under the title; empty if a legend takes its place
    caption: str  # explanation for readers, shown if the picture has its own file
    draw: Callable[[Axes], None]
    rows: int = 12  # approximate number of rows
    left: float = 0.42  # inches for the names on its left
    wide: float = 4.6  # inches of its width on its own page
    bar: bool = False  # whether it has a colour bar
    legend: int = 1  # lines of legend or note between the title and the axes


def head(
    figure: Figure, title: str, facts: Iterable[str], footnote: Iterable[str], *, left: float, right: float
) -> None:
    """Write the title above a line of facts, and the footnote at the bottom; left and right in inches."""
    width, height = figure.get_size_inches()
    start, end = left / width, right / width
    figure.text(start, 1 - 0.27 / height, fitted(title, TITLE), fontsize=14, weight="bold", color=INK, va="center")
    figure.text(start, 1 - 0.52 / height, fitted(_join(facts), FACTS), fontsize=8, color=INK, va="center")
    foot = fitted(_join(footnote), FOOTNOTE)
    figure.text(end, 0.13 / height, foot, fontsize=6.5, color=MUTED, ha="right", va="center")


def picture_title(axes: Axes, title: str, note: str, legend: int = 1) -> None:
    """Write the title above a note on how to read the picture, or above the lines of a legend in its place."""
    axes.set_title(title, weight="bold", pad=15 + 72 * LINE * (legend - 1), color=INK)
    axes.annotate(note, (0, 1), (0, 5), xycoords="axes fraction", textcoords="offset points", fontsize=6.5, color=MUTED)


def _join(facts: Iterable[str]) -> str:
    return " · ".join(filter(None, facts))


WIDTH = 10.0
"""Width of the page in inches."""
LEFT, RIGHT = 0.35, 9.68
"""Left edge of the first column of panels and right edge of the last, in inches."""
OVER, UNDER, BAR = 0.56, 0.42, 0.62
"""Inches above a panel for its title, below it for its axis, and right of it for a colour bar."""
HIGHEST = 30  # number of rows in a panel above which a page does not grow


def panels_overview(
    panels: list[Panel], title: str, facts: Iterable[str], footnote: Iterable[str], *, crowned: bool = False
) -> Figure:
    """Draw all panels on a page: up to three in one row, else two per row; `crowned`: the first above the others."""
    across = len(panels) if len(panels) <= 3 else 2
    grid = [panels[start : start + across] for start in range(0, len(panels), across)]
    if crowned:
        grid = [row for row in (panels[:1], panels[1:]) if row]
    blocks = [_row_height(row, alone=len(grid) == 1) for row in grid]
    height = HEAD + sum(blocks) + FOOT
    figure = new_figure(WIDTH, height, dpi=300)
    head(figure, title, facts, footnote, left=LEFT, right=RIGHT)
    letters = iter("abcdef")
    for number, row in enumerate(grid):
        bottom = height - HEAD - sum(blocks[: number + 1]) + UNDER
        # rows with equally many panels share their columns, so that panels are aligned vertically
        rows = [other for other in grid if len(other) == len(row)]
        taken = [max(panel.left for panel in column) + BAR for column in zip(*rows, strict=True)]
        right = RIGHT if any(row[-1].bar for row in rows) else RIGHT + BAR - 0.1
        free = (right - LEFT - sum(taken)) / len(taken)
        edges = [LEFT + sum(taken[:column]) + column * free for column in range(len(taken) + 1)]
        for column, panel in enumerate(row):
            begin, end = edges[column] + panel.left, edges[column + 1] - BAR
            tall = blocks[number] - UNDER - OVER - LINE * (panel.legend - 1)
            axes = figure.add_axes((begin / WIDTH, bottom / height, (end - begin) / WIDTH, tall / height))
            picture_title(axes, f"{next(letters)}  {panel.title}", panel.note, panel.legend)
            panel.draw(axes)
    return figure


def panel_figure(report: Report, panel: Panel) -> Figure:
    """Draw one panel with its caption."""
    tall = float(np.clip(0.2 * panel.rows, 2.0, 8.0))
    page = panel.left + 0.2 + panel.wide + BAR
    facts = [report.model.title, clean(report.model.architecture), clean(report.settings.fed)]
    caption = wrapped([panel.caption, " · ".join(fact for fact in facts if fact)], int(page * 16))
    below = 0.62 + 0.14 * (caption.count("\n") + 1)
    height = tall + below + OVER + LINE * (panel.legend - 1)
    figure = new_figure(page, height)
    begin = panel.left + 0.2
    axes = figure.add_axes((begin / page, below / height, panel.wide / page, tall / height))
    picture_title(axes, panel.title, panel.note, panel.legend)
    panel.draw(axes)
    figure.text(0.2 / page, (below - 0.46) / height, caption, fontsize=6.8, va="top", color=MUTED, linespacing=1.35)
    return figure


def _row_height(row: list[Panel], *, alone: bool) -> float:
    """Return the height of a row of panels in inches: more for many layers, less for few kernels."""
    rows = min(HIGHEST, max(panel.rows for panel in row))
    least = OVER + UNDER + (2.6 if alone else 2.3)
    return least + 0.06 * (rows - 12) if rows > 12 else least if len(row) > 1 else OVER + UNDER + 0.19 * rows


SETTINGS = {
    "font.family": "DejaVu Sans",
    "font.size": 7.5,
    "axes.titlesize": 8.5,
    "axes.titlelocation": "left",
    "axes.linewidth": 0.6,
    "axes.edgecolor": "#555555",
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "hatch.linewidth": 0.5,
    "text.parse_math": False,  # a model's name can contain a dollar sign
    "svg.hashsalt": "attnlens",
    "pdf.fonttype": 42,
}
"""Settings over matplotlib's defaults; the user's matplotlibrc is ignored."""

FORMATS: dict[str, dict[str, Any]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
"""Suffix → metadata to leave out, so that the bytes depend only on the report."""

INK = "#222222"
MUTED = "#666666"
MISSING = "#dddddd"
CATEGORIES = ("#0072B2", "#56B4E9", "#D55E00", "#BBBBBB", "#009E73", "#CC79A7", "#E69F00", "#F0E442")
"""Okabe and Ito's colour-blind-safe colours, ordered so that neighbours differ clearly."""

PARTS_OF_SCORES = ("positive", "negative", "skew", "key", "distance", "interaction")
PART_COLOURS = dict(zip(PARTS_OF_SCORES, CATEGORIES, strict=False))
"""Colour of each part of the scores, the same in every picture; other parts take CATEGORIES in turn."""

DPI = 200
"""Dots per inch of a map or fan; the overview, meant for print, has 300."""

RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")  # digits as superscripts
CROWD = 400
"""Number of lines above which a vector picture rasterizes them, to keep the file small."""


@contextmanager
def house_style() -> Iterator[None]:
    """Apply attnlens' matplotlib settings inside the context; restore the caller's afterwards.

    A character missing from the font, for example in a folder's name, is drawn as an empty box without a warning.
    """
    with matplotlib.style.context(["default", SETTINGS]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def new_figure(width: float, height: float, dpi: int = DPI) -> Figure:
    """Create an empty figure of a size in inches, not registered with pyplot."""
    figure = Figure(figsize=(width, height), dpi=dpi)
    FigureCanvasAgg(figure)
    return figure


def encoded(figure: Figure, suffix: str, dpi: float | Literal["figure"] = "figure") -> bytes:
    """Encode the figure as .png, .svg or .pdf bytes without dates; `dpi` defaults to the figure's own."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=suffix[1:], metadata=FORMATS[suffix], dpi=dpi)
    return buffer.getvalue()


def crowded(figure: Figure) -> bool:
    """Check whether the figure has too many lines and rasterizes them."""
    return any(lines.get_rasterized() for lines in figure.findobj(LineCollection))


def tick_positions(count: int, most: int) -> list[int]:
    """Return at most `most` of 0 … count−1, evenly spaced from 0 in round steps."""
    steps = (1, 2, 4, 5, 8, 10, 16, 20, 25, 40, 50, 100, 200, 500, 1000)
    step = next((step for step in steps if count <= step * most), count)
    return list(range(0, count, step))


class PlainNumbers(Formatter):
    """Formatter of ticks in full, with as many decimals as distinguish them: never `+9.99e−1` or an offset `1e−3`."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        """Format one tick."""
        return self.format_ticks([x])[0]

    def format_ticks(self, values: Sequence[float]) -> list[str]:
        """Format all ticks with the same decimals; extreme ones as 1.2e−07."""
        ticks = np.asarray(values, dtype=float)
        apart = float(np.min(np.diff(np.unique(ticks)), initial=max(1.0, float(np.max(np.abs(ticks), initial=0.0)))))
        extreme = apart < 1e-7 or float(np.max(np.abs(ticks), initial=0.0)) >= 1e6
        near = (n for n in range(8) if np.all(np.abs(np.round(ticks, n) - ticks) <= 1e-3 * apart))
        decimals = SCIENTIFIC if extreme else next(near, 8)
        return [written(float(tick), decimals).replace("-", "−") for tick in ticks]


class Powers(Formatter):
    """Formatter of ticks on a logarithmic axis, `10⁻³`."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        """Format one tick."""
        return f"10{str(round(np.log10(x))).translate(RAISED)}" if x > 0 else "0"


def legend_above(axes: Axes, columns: int, handlelength: float = 0.8) -> None:
    """Draw the legend of colours or lines above the axes, under their title."""
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(-0.02, 0.985),
        ncols=columns,
        frameon=False,
        fontsize=6.5,
        handlelength=handlelength,
        handletextpad=0.4,
        columnspacing=0.9,
        borderpad=0.2,
    )


def figure_of(axes: Axes) -> Figure:
    """Return the figure that contains the axes."""
    figure = axes.get_figure(root=True)
    if figure is None:
        raise ValueError("these axes stand in no figure")
    return figure


def size_in_points(axes: Axes) -> tuple[float, float]:
    """Return width and height of the axes in points."""
    box = axes.get_position()
    width, height = figure_of(axes).get_size_inches()
    return box.width * width * 72, box.height * height * 72


def label_layers(axes: Axes, layers: Sequence[int], parts: Sequence[str], *, named: bool = True) -> None:
    """Label the layers on the side, layer 0 at the top; with several parts, label each part's rows with its name."""
    _, height = size_in_points(axes)
    rows = tick_positions(len(layers), max(2, int(height / 10)))
    axes.set_yticks(rows, [str(layers[row]) for row in rows])
    axes.set_ylim(len(layers) - 0.5, -0.5)
    groups = [(part, [row for row, of in enumerate(parts) if of == part]) for part in dict.fromkeys(parts)]
    for _, members in groups[1:]:
        axes.axhline(members[0] - 0.5, color="white", linewidth=2.5)
        axes.axhline(members[0] - 0.5, color=INK, linewidth=0.6)
    if not named:
        return
    if len(groups) == 1:
        axes.set_ylabel("layer")
        return
    # "layer" goes above the numbers, because the parts' names take its usual place
    axes.annotate("layer", (0, 1), (-4, 3), "axes fraction", textcoords="offset points", fontsize=6.5, ha="right")
    for part, members in groups:
        at, place = (0, (members[0] + members[-1]) / 2), ("axes fraction", "data")
        axes.annotate(part, at, (-24, 0), place, "offset points", rotation=90, ha="center", va="center")
