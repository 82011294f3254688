"""Colours, fonts, captions and pages of pictures, the same bytes in every run."""

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

from attnlens.choices import Part
from attnlens.records import Report
from attnlens.registry import MeasureInfo
from attnlens.report.shapes import MeasureMap, Shapes, group_of
from attnlens.wording import SCIENTIFIC, big, clean, counted, decimals_for, listed, short, title_of, written

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from jaxtyping import Float
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Band:
    """Median and quartiles of one curve over the heads of one part; every step rests on the same heads."""

    part: Part  # encoder, decoder or cross
    quartiles: Float[np.ndarray, "3 steps"]  # lower quartile, median, upper quartile
    counted: int  # the heads whose lines are long enough, and which it rests on
    heads: int  # all heads of the part that have the curve

    @property
    def steps(self) -> int:
        """How many steps it has."""
        return int(self.quartiles.shape[1])


def bands(shapes: Shapes, name: str) -> list[Band]:
    """A band for every part that has the curve: parts see different inputs, so their quartiles are not mixed."""
    groups: dict[Part, list[Float[np.ndarray, " steps"]]] = {}
    for row, curve in sorted(shapes.curves[name], key=lambda found: found[0]):
        groups.setdefault(shapes.parts[row], []).append(curve)
    return [_band(part, curves) for part, curves in groups.items()]


def long_enough(curves: list[Float[np.ndarray, " steps"]]) -> Float[np.ndarray, "heads steps"]:
    """The curves that are at least as long as most are (the longer ones of two that tie), cut to that length."""
    lengths = Counter(map(len, curves))
    steps = max(lengths, key=lambda length: (lengths[length], length))
    return np.stack([curve[:steps] for curve in curves if len(curve) >= steps])


def first_step(info: MeasureInfo) -> int:
    """The number of a curve's first step: an index k counts from 1, as in the formulas, a distance from 0."""
    return 1 if info.steps == "index" else 0


def _band(part: Part, curves: list[Float[np.ndarray, " steps"]]) -> Band:
    counted = long_enough(curves)
    return Band(part, np.percentile(counted, [25, 50, 75], axis=0), len(counted), len(curves))


def full_caption(shapes: Shapes, reading: MeasureMap, width: int, mark: str = "") -> str:
    """The lines under a map: meaning, formula, null and where its `mark` is, error, what is missing, which model."""
    info = reading.info
    note = ", ".join(text for text in (short_caption(reading), mark) if text)
    lines = [_meaning(info), info.caution, _range(reading), _sentence(note)]
    lines += [f"No value for {counted(count, 'head')}: {why}" for why, count in reading.reasons.items()]
    return wrapped([*lines, model_line(shapes), coverage_line(shapes)], width)


def curve_caption(shapes: Shapes, name: str, width: int) -> str:
    """The lines under a fan of curves."""
    found = bands(shapes, name)
    alone = ", each part by itself" if len(found) > 1 else ""
    lines = [_meaning(shapes.info(name)), shapes.info(name).caution]
    lines.append(f"{counted(len(shapes.curves[name]), 'head')}; black: median, dashed: quartiles{alone}.")
    lines += [
        f"{_sentence(band.part)}: those of the {band.counted} of {band.heads} heads with {band.steps} steps or more."
        for band in found
        if band.counted < band.heads
    ]
    return wrapped([*lines, model_line(shapes), coverage_line(shapes)], width)


def short_curve_caption(shapes: Shapes, name: str) -> str:
    """One line on a fan: what is black; empty where several parts' medians have a legend."""
    found = bands(shapes, name)
    if len(found) > 1:
        return ""
    if found[0].counted < found[0].heads:
        return f"black: median, quartiles of {found[0].counted} of {found[0].heads} heads, ≥ {found[0].steps} steps"
    return "median black, quartiles dashed"


def short_caption(reading: MeasureMap) -> str:
    """One line: the null as mean ± sd, or the error and what it rests on."""
    if reading.null is not None:
        decimals = decimals_for(reading.null[1:] if reading.null[1] else reading.null, figures=2)
        return f"null {typeset(reading.null[0], decimals)} ± {typeset(reading.null[1], decimals)} (mean ± sd)"
    said = ["not identified"] if reading.info.identified == "nowhere" else []
    if reading.error is not None:
        counts = reading.counts
        rests_on = listed(counts) if len(counts) < 2 else f"{counts[0]} to {counts[-1]}"
        said.append(f"{rests_on} sequences; heads' median se {short(reading.error)}")
    return "; ".join(said)


def model_line(shapes: Shapes) -> str:
    """Which model, of which size."""
    model = shapes.report.model
    size = f"{big(model.parameters)} parameters"
    return f"{model.title} ({clean(model.architecture)}, {size}, {layout_line(shapes)})"


def layout_line(shapes: Shapes) -> str:
    """How many layers of how many heads."""
    return f"{counted(len(shapes.layers), 'layer')} × {counted(len(shapes.heads), 'head')}"


def coverage_line(shapes: Shapes) -> str:
    """`COMPLETE: 72 of 72 heads`, or what is missing and why."""
    return clean(shapes.report.coverage.sentence)


def settings_line(shapes: Shapes) -> str:
    """On which text, with which attnlens."""
    settings, tool = shapes.report.settings, shapes.report.tool
    fed = f"input: {clean(settings.fed)} · " if settings.fed else ""
    return f"{fed}{clean(tool.name)} {clean(tool.version)}"


def heading(info: MeasureInfo) -> str:
    """A measure's name as a title: `effective rank`, `singular values of M`."""
    return fitted(title_of(info.name) + (f" of {info.matrix}" if info.matrix else ""), 60)


def source_heading(shapes: Shapes, name: str) -> str:
    """Where a row of pictures comes from."""
    settings = shapes.report.settings
    group = group_of(shapes.info(name))
    return f"{group} – {clean(settings.fed)}" if group == "tokens" and settings.fed else group


def typeset(number: float, decimals: int) -> str:
    """A number as print has it, with a true minus sign."""
    return written(number, decimals).replace("-", "−")


def fitted(text: str, width: int) -> str:
    """The text, cut with … where it has more characters than fit."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def wrapped(lines: list[str], width: int) -> str:
    """Lines folded at that many characters; empty ones are left out."""
    return "\n".join(textwrap.fill(clean(line), width) for line in lines if line)


def _meaning(info: MeasureInfo) -> str:
    return _sentence(f"{info.meaning}: {info.formula}" if info.formula else info.meaning)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _range(reading: MeasureMap) -> str:
    info, present = reading.info, reading.present
    if reading.labels:
        return ""
    decimals = decimals_for(present)
    least, most = (typeset(float(bound), decimals) for bound in (present.min(), present.max()))
    found = f"Here {least} to {most}" if present.min() < present.max() else f"Here {least} for every head"
    low, high = ("" if bound is None else f"{bound:g}".replace("-", "−") for bound in (info.low, info.high))
    if low and high:
        return f"{found}; possible: {low} to {high}."
    return (
        f"{found}; possible: at least {low}." if low else f"{found}; possible: at most {high}." if high else f"{found}."
    )


HEAD, FOOT = 0.62, 0.3
"""Inches over all pictures, and under them."""
LINE = 0.13
"""Inches of a further line of a legend."""
TITLE, FACTS, FOOTNOTE = 80, 155, 170
"""Characters that fit into the page's title, into a line of facts, and at the foot, on ten inches."""


@dataclass(frozen=True)
class Panel:
    """One picture."""

    stem: str  # its file's name, without the ending
    title: str  # what it shows
    note: str  # the line under the title; empty where a legend stands there
    caption: str  # what a reader must know, in a file of its own
    draw: Callable[[Axes], None]
    rows: int = 12  # about how many rows it has
    left: float = 0.42  # inches that the names beside it take
    wide: float = 4.6  # inches that it takes on a page of its own
    bar: bool = False  # whether a colour bar stands beside it
    legend: int = 1  # lines between the title and the axes


def head(
    figure: Figure, title: str, facts: Iterable[str], footnote: Iterable[str], *, left: float, right: float
) -> None:
    """The title over a line of facts, and how the page was made at its foot; left and right in inches."""
    width, height = figure.get_size_inches()
    where, end = left / width, right / width
    figure.text(where, 1 - 0.27 / height, fitted(title, TITLE), fontsize=14, weight="bold", color=INK, va="center")
    figure.text(where, 1 - 0.52 / height, fitted(_joined(facts), FACTS), fontsize=8, color=INK, va="center")
    foot = fitted(_joined(footnote), FOOTNOTE)
    figure.text(end, 0.13 / height, foot, fontsize=6.5, color=MUTED, ha="right", va="center")


def picture_title(axes: Axes, title: str, note: str, legend: int = 1) -> None:
    """The title over a line that says how to read the picture; where a legend stands there, over its lines."""
    axes.set_title(title, weight="bold", pad=15 + 72 * LINE * (legend - 1), color=INK)
    axes.annotate(note, (0, 1), (0, 5), xycoords="axes fraction", textcoords="offset points", fontsize=6.5, color=MUTED)


def _joined(facts: Iterable[str]) -> str:
    return " · ".join(filter(None, facts))


WIDTH = 10.0
"""Inches of the page."""
LEFT, RIGHT = 0.35, 9.68
"""Where the first column of panels begins and the last one ends, in inches."""
OVER, UNDER, BAR = 0.56, 0.42, 0.62
"""Inches over a panel for its title, under it for its axis, beside it for a colour bar."""
HIGHEST = 30  # rows of a panel beyond which a page grows no more


def panels_overview(
    panels: list[Panel], title: str, facts: Iterable[str], footnote: Iterable[str], *, crowned: bool = False
) -> Figure:
    """All panels on a page: in one row up to three, else two by two; `crowned`: the first over the others."""
    across = len(panels) if len(panels) <= 3 else 2
    grid = [panels[start : start + across] for start in range(0, len(panels), across)]
    if crowned:
        grid = [row for row in (panels[:1], panels[1:]) if row]
    blocks = [_block(row, alone=len(grid) == 1) for row in grid]
    height = HEAD + sum(blocks) + FOOT
    figure = new_figure(WIDTH, height, dpi=300)
    head(figure, title, facts, footnote, left=LEFT, right=RIGHT)
    letters = iter("abcdef")
    for number, row in enumerate(grid):
        bottom = height - HEAD - sum(blocks[: number + 1]) + UNDER
        # rows of equal length share their columns, so that their panels stand exactly below each other
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
    """One panel with its caption."""
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


def _block(row: list[Panel], *, alone: bool) -> float:
    """Inches that a row of panels takes: more where there are many layers, less where there are few kernels."""
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
    "text.parse_math": False,  # a model's name may hold a dollar sign
    "svg.hashsalt": "attnlens",
    "pdf.fonttype": 42,
}
"""The house style, over matplotlib's defaults; a reader's own matplotlibrc has no say."""

FORMATS: dict[str, dict[str, Any]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
"""Suffix → metadata to leave out, so that the bytes depend on the report alone."""

INK = "#222222"
MUTED = "#666666"
MISSING = "#dddddd"
CATEGORIES = ("#0072B2", "#56B4E9", "#D55E00", "#BBBBBB", "#009E73", "#CC79A7", "#E69F00", "#F0E442")
"""Okabe and Ito's colours, which colour-blind readers can tell apart, in an order that keeps neighbours apart."""

PARTS_OF_SCORES = ("positive", "negative", "skew", "key", "distance", "interaction")
PART_COLOURS = dict(zip(PARTS_OF_SCORES, CATEGORIES, strict=False))
"""The colour of each part of the scores, the same in every picture; other parts take turns with CATEGORIES."""

DPI = 200
"""Dots per inch of a map or fan; the overview, which goes on paper, has 300."""

RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")  # digits as exponents
CROWD = 400
"""Lines beyond which a vector picture holds them as pixels, to stay of a size that a page can carry."""


@contextmanager
def house_style() -> Iterator[None]:
    """Draw and save within: matplotlib's settings are the house's inside and the caller's again outside.

    A letter that the font lacks, as in a folder's name, is drawn as an empty box and not told.
    """
    with matplotlib.style.context(["default", SETTINGS]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def new_figure(width: float, height: float, dpi: int = DPI) -> Figure:
    """An empty figure of that size in inches that no global state knows."""
    figure = Figure(figsize=(width, height), dpi=dpi)
    FigureCanvasAgg(figure)
    return figure


def encoded(figure: Figure, suffix: str, dpi: float | Literal["figure"] = "figure") -> bytes:
    """The figure as the bytes of a .png, .svg or .pdf file, without dates; pixels as the figure says, or so many."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=suffix[1:], metadata=FORMATS[suffix], dpi=dpi)
    return buffer.getvalue()


def crowded(figure: Figure) -> bool:
    """Whether it holds lines as pixels, being too many."""
    return any(lines.get_rasterized() for lines in figure.findobj(LineCollection))


def tick_positions(count: int, most: int) -> list[int]:
    """At most about `most` of 0 … count−1, evenly spaced from 0, in steps that people count in."""
    steps = (1, 2, 4, 5, 8, 10, 16, 20, 25, 40, 50, 100, 200, 500, 1000)
    step = next((step for step in steps if count <= step * most), count)
    return list(range(0, count, step))


class PlainNumbers(Formatter):
    """Ticks written out in full, as many decimals as tell them apart: never `+9.99e−1` or `1e−3` at the axis' end."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        """One tick by itself."""
        return self.format_ticks([x])[0]

    def format_ticks(self, values: Sequence[float]) -> list[str]:
        """All ticks, with the same decimals; extreme ones as 1.2e−07."""
        ticks = np.asarray(values, dtype=float)
        apart = float(np.min(np.diff(np.unique(ticks)), initial=max(1.0, float(np.max(np.abs(ticks), initial=0.0)))))
        extreme = apart < 1e-7 or float(np.max(np.abs(ticks), initial=0.0)) >= 1e6
        near = (n for n in range(8) if np.all(np.abs(np.round(ticks, n) - ticks) <= 1e-3 * apart))
        decimals = SCIENTIFIC if extreme else next(near, 8)
        return [written(float(tick), decimals).replace("-", "−") for tick in ticks]


class Powers(Formatter):
    """Ticks of a logarithmic axis, `10⁻³`."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        """One tick by itself."""
        return f"10{str(round(np.log10(x))).translate(RAISED)}" if x > 0 else "0"


def legend_above(axes: Axes, columns: int, handlelength: float = 0.8) -> None:
    """What the colours or lines mean, in the line under the axes' title."""
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
    """The figure that the axes stand in."""
    figure = axes.get_figure(root=True)
    if figure is None:
        raise ValueError("these axes stand in no figure")
    return figure


def size_in_points(axes: Axes) -> tuple[float, float]:
    """Width and height of the axes on paper."""
    box = axes.get_position()
    width, height = figure_of(axes).get_size_inches()
    return box.width * width * 72, box.height * height * 72


def label_layers(axes: Axes, layers: Sequence[int], parts: Sequence[str], *, named: bool = True) -> None:
    """Layers down the side, layer 0 at the top; where there are several parts, each part's rows under its name."""
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
    # name the side axis over its numbers, where the parts' names take the usual place
    axes.annotate("layer", (0, 1), (-4, 3), "axes fraction", textcoords="offset points", fontsize=6.5, ha="right")
    for part, members in groups:
        at, place = (0, (members[0] + members[-1]) / 2), ("axes fraction", "data")
        axes.annotate(part, at, (-24, 0), place, "offset points", rotation=90, ha="center", va="center")
