"""Captions of pictures: unit, null, error, coverage; and bands of curves over heads."""

from __future__ import annotations

import textwrap
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnlens.choices import Part
from attnlens.registry import MeasureInfo
from attnlens.shapes import MeasureMap, Shapes, group_of
from attnlens.wording import big, clean, counted, decimals_for, listed, short, title_of, written

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True)
class Band:
    """Median and quartiles of one curve over the heads of one part; every step rests on the same heads."""

    part: Part
    """encoder, decoder or cross."""
    quartiles: Float[np.ndarray, "3 steps"]
    """Lower quartile, median, upper quartile."""
    counted: int
    """The heads whose lines are long enough, and which it rests on."""
    heads: int
    """All heads of the part that have the curve."""

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
        said.append(f"{_counts(reading)} sequences; heads' median se {short(reading.error)}")
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
    return f"{found}{_possible(info)}."


def _possible(info: MeasureInfo) -> str:
    low, high = ("" if bound is None else f"{bound:g}".replace("-", "−") for bound in (info.low, info.high))
    if low and high:
        return f"; possible: {low} to {high}"
    return f"; possible: at least {low}" if low else f"; possible: at most {high}" if high else ""


def _counts(reading: MeasureMap) -> str:
    counts = reading.counts
    return listed(counts) if len(counts) < 2 else f"{counts[0]} to {counts[-1]}"
