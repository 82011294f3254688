"""Reads the atlas: how each measure is distributed over the heads of a few trained models (benchmarks/atlas.py)."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

from attnlens.records import Head, Report
from attnlens.registry import info_of
from attnlens.wording import gathered, source_of

FILE = Path(__file__).with_name("atlas.json")
LEVELS = (0, 1, 2.5, 5, 10, 20, 25, 30, 40, 50, 60, 70, 75, 80, 90, 95, 97.5, 99, 100)
"""Percentages of heads whose values the file holds."""
Third = Literal["first", "middle", "last", "all"]
SAME, ENOUGH, ABOUT = 0.25, 3, 0.05
"""A model is that of the atlas if the median over at least ENOUGH measures of their quantiles' mean difference, in
interquartile ranges, is less than SAME: 0.1 between a model and its fine-tuning, at least 0.38 between lineages. If
that cannot be formed, parameters that differ by less than ABOUT decide."""
DEPTHS: tuple[Third, ...] = ("first", "middle", "last")
"""Thirds of the layers."""


@dataclass(frozen=True)
class Distribution:
    """A measure over some heads of one model."""

    heads: int
    """How many have a value."""
    quantiles: tuple[float, ...]
    """At LEVELS."""

    @property
    def median(self) -> float:
        """The value of the head in the middle."""
        return self.quantiles[LEVELS.index(50)]

    def below(self, value: float) -> float:
        """Percentage of heads below the value, half of those at it; linear between the quantiles that are known."""
        value, known = rounded(value), self.quantiles
        left, right = bisect_left(known, value), bisect_right(known, value)
        if right == 0 or left == len(known):
            return 0.0 if right == 0 else 100.0
        if left < right:
            level = (LEVELS[left] + LEVELS[right - 1]) / 2
        else:
            share = (value - known[left - 1]) / (known[left] - known[left - 1])
            level = LEVELS[left - 1] + share * (LEVELS[left] - LEVELS[left - 1])
        # quantiles put the least of n heads at 0 % and the largest at 100 %, but half of each lies below itself
        return (level * (self.heads - 1) + 50) / self.heads


@dataclass(frozen=True)
class TrainedModel:
    """A model of the atlas."""

    name: str
    lineage: str
    """What it was trained from: models of one lineage count as one."""
    part: str
    """encoder or decoder."""
    positions: str
    """How positions enter its scores."""
    tokens: int | None
    """Tokens of each window, up to which distances count; the most that a line has."""
    pack: bool
    """Whether windows of that length were read (else: lines of different lengths)."""
    heads: int
    parameters: int
    files: frozenset[str]
    """SHA-256 of its weight files."""
    measures: dict[str, dict[Third, Distribution]]


@dataclass(frozen=True)
class Subject:
    """What decides to which models' heads a head may be compared."""

    part: str
    positions: str | None
    tokens: int | None
    pack: bool
    own: frozenset[str] = frozenset()
    """Lineages that the model belongs to: it is not compared with itself, nor with what it was tuned from or to."""


@dataclass(frozen=True)
class Reference:
    """The heads that a value may be compared with, or why there are none."""

    models: tuple[TrainedModel, ...] = ()
    spreads: tuple[Distribution, ...] = ()
    """For each model its heads' values."""
    reason: str | None = None
    """Why there is nothing to compare with."""

    @property
    def heads(self) -> int:
        """How many heads there are."""
        return sum(spread.heads for spread in self.spreads)

    def percentile(self, value: float) -> float | None:
        """Percentage of heads below the value, where every lineage counts once, and each of its models alike."""
        pairs = zip(self.models, self.spreads, strict=True)
        found = gathered((model.lineage, spread.below(value)) for model, spread in pairs)
        return fmean(map(fmean, found.values())) if found else None


def rounded(value: float) -> float:
    """Four significant digits, as the quantiles have, so that what is equal stays so."""
    return float(f"{value:.4g}")


@cache
def models() -> tuple[TrainedModel, ...]:
    """The models of the atlas."""
    return tuple(map(model_of, provenance()["models"]))


@cache
def provenance() -> dict[str, Any]:
    """The file as it is: what made it, with which texts, windows and seed, and each model's files."""
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def model_of(told: dict[str, Any]) -> TrainedModel:
    """A model as the file has it."""
    spreads = {
        name: {depth: Distribution(count, tuple(quantiles)) for depth, (count, *quantiles) in depths.items()}
        for name, depths in told["measures"].items()
    }
    names = ("name", "lineage", "part", "positions", "tokens", "pack", "heads", "parameters")
    kept = {name: told[name] for name in names}
    return TrainedModel(**kept, files=frozenset(file["sha256"] for file in told["files"]), measures=spreads)


@lru_cache(1024)  # a page asks for every head
def reference(measure: str, depth: Third, subject: Subject) -> Reference:
    """The heads of other trained models of that part, at that depth, among which a value of the measure may stand."""
    if not any(measure in model.measures for model in models()):
        return Reference(reason=f"the atlas has no {measure}")
    if sized_by := info_of(measure).sized_by:
        return Reference(reason=f"it goes with {sized_by}")
    alike = [model for model in models() if model.part == subject.part]
    if not alike:
        return Reference(reason=f"the atlas has no trained model with heads of part {subject.part}")
    if source_of(measure) == "weights":
        alike = [model for model in alike if _forms_alike(model, subject)]
        lacking = f"whose form M is of that kind (positions {subject.positions}, {subject.tokens} tokens)"
    else:
        alike = [model for model in alike if model.pack and subject.pack and model.tokens == subject.tokens]
        lacking = f"that read windows of {subject.tokens} tokens" if subject.pack else "that read what is no window"
    others = [one for one in alike if one.lineage not in subject.own and depth in one.measures.get(measure, {})]
    if not others:
        return Reference(reason=f"the atlas has no other trained {subject.part} {lacking}")
    return Reference(tuple(others), tuple(model.measures[measure][depth] for model in others))


def _forms_alike(model: TrainedModel, subject: Subject) -> bool:
    """Whether M is of one kind: under RoPE it is a sum over the distances within a window."""
    return model.positions == subject.positions and (model.positions != "rotary" or model.tokens == subject.tokens)


def percentile(measure: str, depth: Third, subject: Subject, value: float) -> tuple[float | None, str | None]:
    """The percentage of the reference's heads that lie below the value, or None and the reason."""
    found = reference(measure, depth, subject)
    return found.percentile(value), found.reason


def subject_of(report: Report, part: str) -> Subject:
    """Return what decides to which models' heads the report's heads of one part can be compared."""
    settings, conventions = report.settings, report.model.conventions
    subject = Subject(part, conventions.position if conventions else None, settings.tokens, bool(settings.pack))
    heads = [head for head in report.heads if head.part == part]
    files = {file.sha256 for file in report.model.files}
    own = {one.lineage for one in models() if one.files & files or _is_same(one, report, heads, subject)}
    return replace(subject, own=frozenset(own))


def _is_same(model: TrainedModel, report: Report, heads: Sequence[Head], subject: Subject) -> bool:
    """Return whether heads of one part have the values of a model of the atlas, whatever its files are called.

    Copies agree exactly, quantised weights and fine-tunings nearly. Some heads of a model have no distribution to go
    by, and one or two measures say too little: then a model of about the same number of parameters is the same.
    """
    if not heads or model.part != subject.part:
        return False
    distances = []
    for name, depths in model.measures.items():
        weights = source_of(name) == "weights"
        alike = (
            _forms_alike(model, subject) if weights else (model.pack, model.tokens) == (subject.pack, subject.tokens)
        )
        shared = weights and shares_weights(heads[0])
        read = [head.measures.get(name) for head in heads if not shared or head.layer == heads[0].layer]
        values = [one.value for one in read if one is not None and one.value is not None]
        spread = depths["all"]
        quartiles = spread.quantiles[LEVELS.index(25)], spread.quantiles[LEVELS.index(75)]
        if alike and len(values) == spread.heads and quartiles[0] < quartiles[1]:
            pairs = zip(quantiles(values), spread.quantiles, strict=True)
            distances.append(fmean(abs(one - other) for one, other in pairs) / (quartiles[1] - quartiles[0]))
    if len(distances) >= ENOUGH:
        return median(distances) < SAME
    some = len(heads) < model.heads or (bool(distances) and median(distances) < SAME)
    return some and abs(report.model.parameters / model.parameters - 1) < ABOUT


def quantiles(values: Sequence[float]) -> list[float]:
    """Return the values at LEVELS, linear between heads, rounded."""
    ordered, found = sorted(values), []
    for level in LEVELS:
        place, share = divmod(level / 100 * (len(ordered) - 1), 1)
        low, high = ordered[int(place)], ordered[min(int(place) + 1, len(ordered) - 1)]
        found.append(rounded(low + share * (high - low)))
    return found


def depths(report: Report) -> dict[int, Third]:
    """The third of its part in which each layer lies; `all` for each where not all layers were asked for."""
    if report.settings.layers is not None:
        return {head.layer: "all" for head in report.heads}
    found: dict[int, Third] = {}
    for heads in gathered((head.part, head.layer) for head in report.heads).values():
        layers = sorted(set(heads))
        found |= {layer: DEPTHS[len(DEPTHS) * place // len(layers)] for place, layer in enumerate(layers)}
    return found


def shares_weights(head: Head) -> bool:
    """Whether its module is called more than once, so that the depth of its weights means nothing."""
    return "#" in head.site
