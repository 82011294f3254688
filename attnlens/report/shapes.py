"""The measures of a report as arrays: maps of layers × heads, sets of measures that sum to 1, and curves by head."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from shlex import quote
from typing import TYPE_CHECKING

import numpy as np

from attnlens.analyzers.registry import MeasureInfo, find_measure
from attnlens.choices import Part
from attnlens.records import Extreme, HeadId, Report
from attnlens.wording import source_of

if TYPE_CHECKING:
    from jaxtyping import Float

Names = Callable[[int], str]  # Function that names a layer
SAME = 1e-6  # relative spread up to which values count as equal
MOST_FILLED = 1024
"""Most rows or columns that a map can have if it includes empty ones for layers or heads that were not read."""


@dataclass(frozen=True)
class MeasureMap:
    """Values of a measure, with one row per layer and one column per head; NaN for missing values."""

    name: str  # qualified by source
    info: MeasureInfo  # registry entry, with empty texts for an unknown measure
    values: Float[np.ndarray, "layers heads"]
    errors: Float[np.ndarray, "layers heads"]  # standard errors of the values
    null_means: Float[np.ndarray, "layers heads"]  # means under the null
    null_sds: Float[np.ndarray, "layers heads"]  # standard deviations under the null
    labels: dict[int, str]  # category number → name; empty unless the values are categories
    reasons: dict[str, int]  # reason for a missing value → number of heads
    counts: tuple[int, ...]  # distinct sample sizes of the values (numbers of sequences or matrices), ascending

    @cached_property
    def present(self) -> Float[np.ndarray, " some"]:
        """The values that are not NaN, in row-major order."""
        return np.asarray(self.values[~np.isnan(self.values)])

    @property
    def constant(self) -> bool:
        """True if more than one head has a value and all values are equal up to rounding."""
        return self.present.size > 1 and bool(np.ptp(self.present) <= SAME * np.abs(self.present).max())

    @property
    def null(self) -> tuple[float, float] | None:
        """Medians over heads of the null's mean and of its sd; None without a null."""
        return None if np.isnan(self.null_means).all() else (middle(self.null_means), middle(self.null_sds))

    @property
    def chance(self) -> bool:
        """True if most heads lie within two sd of their null mean; False without a null or if the median sd is 0."""
        if self.null is None or not self.null[1]:
            return False
        away = np.abs(self.values - self.null_means)
        # if the null's sd is 0, only a value equal to the null's mean lies within two sd
        unvaried = np.where(away > 0, np.inf, away)
        return middle(np.divide(away, self.null_sds, out=unvaried, where=self.null_sds != 0)) < 2

    @property
    def error(self) -> float | None:
        """Median over heads of the standard error; None if no head has an error."""
        return None if np.isnan(self.errors).all() else middle(self.errors)


@dataclass(frozen=True)
class Written:
    """Files and options of the command that just ran, for use in suggestions of commands to run next."""

    report: str | None = None  # the report as JSON
    plan: str | None = None  # the plan of ranks
    model: str | None = None  # the changed model
    shown: bool = False  # True if a picture, a page or all tables were requested
    text: tuple[str, ...] = ()  # values of --text, as the user typed them
    calibration: tuple[str, ...] = ()  # values of --calibration, as the user typed them
    offline: bool = False  # True if the user set --offline

    def options(self, *names: str) -> str:
        """Format those of the named options that the user set, such as ` --text FILE`; "" if none was set."""
        return "".join(f" --{name} {quote(file)}" for name in names for file in getattr(self, name) if file != "-")


class Shapes:
    """Layers, parts and heads of a report, and the measures as maps of layers × heads."""

    def __init__(self, report: Report, written: Written | None = None) -> None:
        self.report = report
        self.written = written
        """Files of the command that shows the report; None if no command does."""
        part_of: dict[int, Part] = {head.layer: head.part for head in report.heads}
        order = list(dict.fromkeys(part_of.values()))
        layers = _numbers(part_of, report.coverage.sites, report.settings.layers is None and len(order) == 1)
        self.layers: tuple[int, ...] = tuple(sorted(layers, key=lambda n: (order.index(part_of.get(n, order[0])), n)))
        """Internal numbers of the layers, part by part; `layer_names` contains the displayed names."""
        self.parts: tuple[Part, ...] = tuple(part_of.get(layer, order[0]) for layer in self.layers)
        """Part of the model to which each layer belongs: encoder, decoder, cross, …"""
        self.heads: tuple[int, ...] = _numbers({head.head for head in report.heads}, 0, report.settings.heads is None)
        """Numbers of the heads, within their layers."""
        self.layer_names = tuple(map(report.model.layer_name, self.layers))
        """Displayed names of the layers: numbers, or `decoder.2` in models with several parts."""
        self.layer_numbers = tuple(map(report.model.layer_number, self.layers))
        """Number of each layer within its part."""
        self._row = {layer: row for row, layer in enumerate(self.layers)}
        self._column = {head: column for column, head in enumerate(self.heads)}

    @cached_property
    def readings(self) -> dict[str, MeasureMap]:
        """Map of every scalar measure with a value in any head, keyed by measure name, the most informative first."""
        readings = (self._reading(name) for name in self.report.measure_names())
        ordered = sorted((reading for reading in readings if reading.present.size), key=_informativeness)
        return {reading.name: reading for reading in ordered}

    @cached_property
    def curves(self) -> dict[str, list[tuple[int, Float[np.ndarray, " steps"]]]]:
        """Name of a curve → (row of the layer in `layers`, values) for each head that has the curve."""
        result: dict[str, list[tuple[int, Float[np.ndarray, " steps"]]]] = {}
        for head in self.report.heads:
            for name, curve in head.curves.items():
                if curve:
                    result.setdefault(name, []).append((self._row[head.layer], np.asarray(curve, dtype=float)))
        return result

    def info(self, name: str) -> MeasureInfo:
        """Return the registry entry of a measure or curve, without clauses about RoPE if the model lacks RoPE."""
        return describe_measure(self.report, name)

    def name_head(self, head: HeadId | Extreme) -> str:
        """Return the displayed name of a head: `3.7`, or `decoder.3.7`."""
        return f"{self.report.model.layer_name(head.layer)}.{head.head}"

    @cached_property
    def cells(self) -> tuple[list[int], list[int]]:
        """Row and column indices of the report's heads in the maps."""
        heads = self.report.heads
        return [self._row[head.layer] for head in heads], [self._column[head.head] for head in heads]

    @cached_property
    def shares(self) -> dict[str, list[str]]:
        """Sets of non-negative measures that sum to 1 in each head: name of the set → names of the measures.

        Measures that belong to no set of the registry are grouped by the stem of their names (`other.share_…`). Sets
        are sorted by the number of heads that have them, then by their number of measures, both descending.
        """
        sets: dict[str, list[str]] = {}
        for name in (name for name in self.report.measure_names() if name in self.readings):
            source, title = name.rpartition(".")[::2]
            for whole in filter(None, find_measure(name).wholes or [title.rpartition("_")[0]]):
                sets.setdefault(f"{source}.{whole}", []).append(name)
        heads: dict[str, int] = {}  # number of heads that have the whole set
        for whole, names in sets.items():
            stack = np.stack([self.readings[name].values for name in names])
            totals = stack.sum(axis=0)
            totals = totals[~np.isnan(totals)]
            # reports keep nine significant digits, so a sum of a few shares is exact to about 1e-9
            if len(names) > 1 and totals.size and np.nanmin(stack) >= 0 and np.all(np.abs(totals - 1) < 1e-6):
                heads[whole] = totals.size
        return {whole: sets[whole] for whole in sorted(heads, key=lambda whole: (-heads[whole], -len(sets[whole])))}

    def _reading(self, name: str) -> MeasureMap:
        maps = np.full((4, len(self.layers), len(self.heads)), np.nan)
        labels: dict[int, str] = {}
        reasons: Counter[str] = Counter()
        counts: set[int] = set()
        for head, row, column in zip(self.report.heads, *self.cells, strict=True):
            measure = head.measures.get(name)
            if measure is None or measure.value is None:
                reasons[(measure.reason if measure else None) or "not measured"] += 1
                continue
            null = (measure.null.mean, measure.null.sd) if measure.null else (None, None)
            maps[:, row, column] = np.array([measure.value, measure.se, *null], dtype=float)  # None becomes NaN
            if measure.label is not None:
                labels[round(measure.value)] = measure.label
            if measure.n is not None:
                counts.add(measure.n)
        samples = tuple(sorted(counts))
        values, errors, null_means, null_sds = maps
        return MeasureMap(name, self.info(name), values, errors, null_means, null_sds, labels, dict(reasons), samples)


ROPE = re.compile(r"(?:^|[.;] ?)\s*(?:[Uu]nder RoPE|RoPE:)[^.;]*")  # A clause or sentence about rotary positions


def drop_rotary(report: Report, text: str) -> str:
    """Remove the clauses about RoPE from a text if the model is known not to use RoPE."""
    conventions = report.model.conventions
    return text if conventions is None or conventions.position in ("rotary", "unknown") else ROPE.sub("", text)


def describe_measure(report: Report, name: str) -> MeasureInfo:
    """Return the registry entry of a measure, without clauses about RoPE if the model does not use RoPE."""
    info = find_measure(name)
    return replace(info, meaning=drop_rotary(report, info.meaning), formula=drop_rotary(report, info.formula))


def group_of(info: MeasureInfo) -> str:
    """Return the heading under which a measure is grouped: its source and, if it has one, its space."""
    source = source_of(info.name)
    return f"{source}, {info.space}" if info.space else source


def middle(values: Float[np.ndarray, "layers heads"]) -> float:
    """Compute the median of the values that are not NaN; return NaN if there are no such values."""
    present = values[~np.isnan(values)]
    return float(np.median(present)) if present.size else float("nan")


def alternate_sources(names: Iterable[str]) -> list[str]:
    """Order measure names so that sources alternate: the first name of each source, then the second of each, …"""
    sources: dict[str, list[str]] = {}
    for name in names:
        sources.setdefault(source_of(name), []).append(name)
    return [name for turn in zip_longest(*sources.values()) for name in turn if name is not None]


def _informativeness(reading: MeasureMap) -> tuple[bool, bool, bool, bool, bool, int]:
    """Return the sort key that puts the most informative measures first."""
    # measures that are constant, not a headline, not identified, categories, or proportional to ‖Q‖‖K‖ come last;
    # bounded ranges with negative values come first, then other bounded ranges
    info = reading.info
    ends = 2 if info.low is None or info.high is None else int(info.low >= 0)
    traits = (reading.constant, not info.headline, info.identified == "nowhere", bool(reading.labels))
    return *traits, info.grows_with_factors, ends


def _numbers(present: Iterable[int], expected: int, fill: bool) -> tuple[int, ...]:
    """Sort the numbers; if `fill`, add all others below the largest or `expected`, unless that exceeds MOST_FILLED."""
    numbers = sorted(set(present))
    size = max([expected, *(number + 1 for number in numbers)])
    return tuple(range(size)) if fill and numbers and size <= MOST_FILLED else tuple(numbers)
