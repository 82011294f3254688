"""Colours, fonts and encoding of pictures, the same bytes in every run."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import matplotlib.style
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.ticker import Formatter

from attnlens.wording import SCIENTIFIC, written

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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

RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
"""Digits as exponents."""
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
    axes.annotate(
        "layer",
        xy=(0, 1),
        xycoords="axes fraction",
        xytext=(-4, 3),
        textcoords="offset points",
        fontsize=6.5,
        ha="right",
    )
    for part, members in groups:
        axes.annotate(
            part,
            xy=(0, (members[0] + members[-1]) / 2),
            xycoords=("axes fraction", "data"),
            xytext=(-24, 0),
            textcoords="offset points",
            rotation=90,
            ha="center",
            va="center",
        )
