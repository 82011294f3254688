"""Colours, fonts, file formats, ticks and legends of all pictures; equal reports give byte-identical files."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import matplotlib.style
import numpy as np
from matplotlib import colormaps
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, Formatter, Locator, LogLocator, NullFormatter, NullLocator

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SETTINGS = {  # Settings that override matplotlib's defaults; the user's matplotlibrc is ignored
    "font.family": "DejaVu Sans",
    "font.size": 7.5,
    "axes.titlesize": 8.5,
    "axes.titlelocation": "left",
    "axes.titley": 1.0,  # otherwise each pass of the layout measures all ticks again to place the titles
    "axes.linewidth": 0.6,
    "axes.edgecolor": "#555555",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    "axes.formatter.limits": (-8, 8),  # numbers in full, without a factor at the end of the axis
    "legend.frameon": False,
    "legend.fontsize": 6.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "hatch.linewidth": 0.5,
    "text.parse_math": False,  # a model's name can contain a dollar sign
    "svg.hashsalt": "attnlens",
    "pdf.fonttype": 42,
}

BARE_POINTS = 8  # size of all text in bare figures
BARE = dict.fromkeys(("font.size", "axes.titlesize", "legend.fontsize"), BARE_POINTS)
"""Settings that override SETTINGS in bare figures."""

Style = dict[str, Any]  # keywords of a matplotlib artist

FORMATS: dict[str, dict[str, None]] = {  # Suffix → metadata to omit, so that the bytes depend only on the report
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}

INK = "#222222"
MUTED = "#666666"
CATEGORIES = ("#0072B2", "#56B4E9", "#D55E00", "#BBBBBB", "#009E73", "#CC79A7", "#E69F00", "#F0E442")
"""Colour-blind-safe colours of Okabe and Ito, and a grey, ordered so that neighbours differ clearly."""
SEQUENTIAL, DIVERGING = colormaps["viridis"], colormaps["RdBu_r"]
"""Colour maps for values of one sign, and for values of both signs."""
DEPTH = ListedColormap(SEQUENTIAL(np.linspace(0, 0.92, 256)), name="depth")
"""Colours from dark (first layer) to light (last layer), without the lightest yellow, which is invisible on paper."""

PART_COLOURS = dict(zip(("positive", "negative", "skew", "key", "position", "content"), CATEGORIES, strict=False))
"""Part of the scores → its colour in every picture; other parts take the colours of CATEGORIES in turn."""

DPI = 200  # dots per inch of a single panel; overviews, which are often printed, have 300

RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")  # digits as superscripts


@contextmanager
def house_style(*, bare: bool = False) -> Iterator[None]:
    """Apply SETTINGS, and BARE if `bare`, and ignore warnings about missing glyphs, within the `with` block."""
    with matplotlib.style.context(["default", SETTINGS, BARE if bare else {}]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def new_figure(width: float, height: float, dpi: int = DPI) -> Figure:
    """Create an empty figure, `width` × `height` inches, without registering it with pyplot."""
    figure = Figure(figsize=(width, height), dpi=dpi)
    FigureCanvasAgg(figure)
    return figure


def encode_figure(figure: Figure, suffix: str, dpi: float | Literal["figure"] = "figure") -> bytes:
    """Encode the figure as the bytes of a .png, .svg or .pdf file without dates or software names."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=suffix[1:], metadata=FORMATS[suffix], dpi=dpi)
    return buffer.getvalue()


def shorten_label(text: str, width: int) -> str:
    """Shorten a text of more than `width` characters to that width, with `…` at its end."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


class Powers(Formatter):
    """Formatter of tick labels on a logarithmic axis: 0.01, 200, 10⁻⁶."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        """Format the label of a tick at `x`."""
        power = np.log10(abs(x)) if x else 0.0
        if -4 < power < 5 or abs(power - round(power)) > 1e-6:
            return f"{x:g}".replace("-", "−")
        return f"{'−' if x < 0 else ''}10{str(round(power)).translate(RAISED)}"


class IndexTicks(Locator):
    """Locator of as many ticks as there is room for, in round steps, for `count` indices from `first` on."""

    def __init__(self, count: int, first: int = 0) -> None:
        self.count, self.first = count, first

    def __call__(self) -> list[int]:
        """Return the ticks for which the axis currently has room."""
        # matplotlib's estimate of the room is for longer labels than a layer's or head's number
        assert isinstance(self.axis, Axis)  # noqa: S101  # for the type checker: set_major_locator has set it
        room = int(1.4 * self.axis.get_tick_space())
        _, *later = tick_positions(self.first + self.count, max(2, room))
        step = later[0] if later else 1
        return [self.first, *(tick for tick in later if tick - self.first > step / 2)]

    def tick_values(self, vmin: float, vmax: float) -> list[int]:
        """Return the ticks, ignoring the view limits."""
        return self()


def tick_positions(count: int, most: int) -> list[int]:
    """Return at most `most` numbers below `count`, starting at 0, in equal, round steps."""
    steps = (1, 2, 4, 5, 8, 10, 16, 20, 25, 40, 50, 100, 200, 500, 1000)
    step = next((step for step in steps if count <= step * most), count)
    return list(range(0, count, step))


def thin_ticks(axis: Axis, ticks: Sequence[float], gap: float) -> None:
    """Label the first and last tick, and others that are at least `gap` of the axis away from every labelled tick."""
    places = axis.get_transform().transform(np.asarray(ticks, dtype=float))
    span = float(np.ptp(places)) or 1.0
    labelled = sorted({0, len(ticks) - 1})
    for index in sorted(range(1, len(ticks) - 1), key=lambda index: abs(ticks[index])):
        if min(abs(places[index] - places[other]) for other in labelled) >= gap * span:
            labelled.append(index)
    axis.set_major_locator(FixedLocator([ticks[index] for index in sorted(labelled)]))
    axis.set_minor_locator(NullLocator())


def label_powers(axis: Axis, least: float) -> None:
    """Label 0 and, where there is room, ±10ⁿ for all powers of ten from `least` up."""
    low, high = sorted(axis.get_view_interval())
    powers = [power for power in 10.0 ** np.arange(-12, 12) if power >= 0.99 * least]
    ticks = [-power for power in reversed(powers)] + [0.0, *powers]
    thin_ticks(axis, [tick for tick in ticks if low <= tick <= high], 0.08)
    axis.set_major_formatter(Powers())


def scale_logarithmically(axes: Axes, which: Literal["x", "y"], subs: Sequence[float] = (1.0,)) -> None:
    """Make the x or y axis logarithmic, with ticks at powers of ten times `subs`."""
    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(Powers())
    axis.set_minor_formatter(NullFormatter())


def scale_values(axes: Axes, least: float, most: float, *, logarithmic: bool) -> None:
    """Set the limits of the y axis slightly beyond `least` and `most`, on a linear or logarithmic scale."""
    if logarithmic:
        scale_logarithmically(axes, "y", (1, 2, 5) if most < 100 * least else (1,))
        room = np.clip((most / least) ** 0.03, 1.25, 1.9)
        axes.set_ylim(least / room, most * room)
    else:
        room = 0.05 * (most - least) or 0.5
        axes.set_ylim(least - room, most + room)


LEGEND_LINE = 1.45  # height of a legend's line, as a multiple of its font size


def legend_above(axes: Axes, characters: int, handlelength: float = 1.4) -> None:
    """Draw the legend between the axes and the title, with as many columns as fit into `characters` characters."""
    labels = axes.get_legend_handles_labels()[1]
    if not labels:
        return
    columns = max(1, min(len(labels), characters // (max(map(len, labels)) + 5)))  # 5 characters for handle and gap
    spaces: Style = {"handlelength": handlelength, "handletextpad": 0.4, "columnspacing": 0.9, "borderpad": 0.2}
    legend = axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 0.985), ncols=columns, **spaces)
    legend.set_in_layout(False)  # the title's padding makes room for the legend
    lines = -(-len(labels) // columns)
    pad = 15 + LEGEND_LINE * matplotlib.rcParams["legend.fontsize"] * (lines - 1)
    axes.set_title(axes.get_title(loc="left"), pad=pad, weight="bold", color=INK)
