"""What a report found, measure by measure, in plain words: its median, its range, and how it stands to chance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from attnlens.records import Report, Text
from attnlens.registry import MeasureInfo
from attnlens.shapes import MeasureMap, Shapes, middle
from attnlens.wording import clean, counted, decimals_with_error, listed, source_of, spread, written

FAR = 3
"""Standard deviations of the null beyond which a head is counted as unlike chance."""


def findings(shapes: Shapes) -> Iterator[tuple[str, str]]:
    """Each headline measure that differs between heads, and what it reads; the first measure where there is none."""
    varying = [reading for reading in shapes.readings.values() if not reading.constant]
    headlines = [reading for reading in varying if reading.info.headline] or varying[:1]
    yield from ((clean(reading.name), finding(reading, shapes)) for reading in headlines)


def finding(reading: MeasureMap, shapes: Shapes) -> str:
    """`median 0.0155 over 32 heads, from −0.0087 to 0.0784; chance reads 0.010 ± 0.012: 6 heads above it by …`."""
    if reading.labels:
        names = Counter(reading.labels[round(value)] for value in reading.present.tolist())
        return listed((f"{name}: {counted(count, 'head')}" for name, count in names.most_common()), 5)
    error = shapes.report.summary.median_errors.get(reading.name)
    decimals = decimals_with_error(reading.present.tolist(), error)
    low, median, high = (written(float(f(reading.present)), decimals) for f in (np.min, np.median, np.max))
    sure = f" ± {spread(error, decimals)}" if error is not None else ""
    number = counted(reading.present.size, "head")
    over = f" over {number}, from {low} to {high}" if reading.present.size > 1 else ""
    return f"{'median ' * bool(over)}{median}{sure}{over}{_chance(reading)}".replace("-", "−")


def _chance(reading: MeasureMap) -> str:
    """How many heads lie further than three standard deviations from what chance reads, and on which side."""
    if reading.null is None:
        return ""
    known = ~np.isnan(reading.values) & ~np.isnan(reading.null_means)
    away = (reading.values - reading.null_means)[known]
    reach = FAR * reading.null_sds[known]
    above, below = int((away > reach).sum()), int((away < -reach).sum())
    mean, sd = middle(reading.null_means), middle(reading.null_sds)
    decimals = decimals_with_error([mean], sd)
    sides = [f"{counted(number, 'head')} {side}" for number, side in ((above, "above"), (below, "below")) if number]
    told = f"{listed(sides)} it by more than {FAR} sd" if sides else f"no head lies more than {FAR} sd from it"
    return f"; chance reads {written(mean, decimals)} ± {spread(sd, decimals)}: {told}"


WORDS = {
    "factors": "what independent random factors read",
    "rotations": "what the head reads turned by random rotations",
}


def null_words(measures: Iterable[MeasureInfo]) -> str:
    """What the nulls of these measures read; where they differ, of which sources those are that turn the head's M."""
    kinds = {source_of(info.name): info.null for info in measures}
    if len(set(kinds.values())) < 2:
        return WORDS[next(iter(kinds.values()), "factors")]
    turned = listed(f"{source}.*" for source, kind in kinds.items() if kind == "rotations")
    return f"{WORDS['factors']}, of {turned} {WORDS['rotations']}"


def no_errors(report: Report) -> str:
    """Why there are no errors and intervals, where one window was all that was read; else empty."""
    return f"one {_unit(report)} has no spread: no errors" if report.settings.sequences == 1 else ""


def population(report: Report, counted: str = "") -> str:
    """What the errors are about: windows of the texts named, or texts like them; empty where no text was fed.

    Windows in a row from the beginning stand for no others of their text. Several texts are weighted by their windows,
    or by what is `counted` instead.
    """
    settings = report.settings
    texts, what = _read(report), f"{_unit(report)}s"
    if not texts:
        return f"errors are over the {len(settings.texts)} files and hold for files like them" if settings.texts else ""
    first, names = settings.windows == "first", listed([text.name for text in texts], 4)
    counts = [len(text.windows) for text in texts]
    weights = (
        f"; every {counted or _unit(report)} counts once, and the texts gave {listed(counts)} {what}"
        if len(texts) > 1
        else ""
    )
    if len(texts) < len(settings.texts) and settings.noise is None:
        weights += "; what reads no text varies by what stands beside it alone"
    if settings.intervals == "texts":
        return f"errors are over {len(texts)} texts and hold for {'beginnings of ' * first}texts like these{weights}"
    if first:
        about = f"over the first {sum(counts)} {what} and hold for {what} like these, not for all of {names}"
    else:
        about = f"over {what} and hold for the {sum(text.available or 0 for text in texts)} {what} of {names}"
    return f"errors are {about}{weights}"


def _unit(report: Report) -> str:
    """A window, a line, or where no text was fed an input."""
    return "input" if not _read(report) else "line" if report.settings.pack is False else "window"


def _read(report: Report) -> list[Text]:
    """The texts that were cut; images and sounds, of files or noise, may stand beside them."""
    return [text for text in report.settings.texts if text.available is not None]
