"""What a report found, measure by measure, in plain words: its median, its range, and how it stands to chance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from attnlens.shapes import MeasureMap, Shapes, middle
from attnlens.wording import clean, counted, decimals_with_error, listed, spread, written

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
