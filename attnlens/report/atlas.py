"""The atlas: distributions of measures over the heads of several trained models (made by benchmarks/atlas.py)."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Literal

import numpy as np
from pydantic import PlainValidator, TypeAdapter

from attnlens.analyzers.registry import find_measure
from attnlens.records import Head, Report
from attnlens.wording import group_pairs, source_of

FILE = Path(__file__).with_name("atlas.json")
LEVELS = (0, 1, 2.5, 5, 10, 20, 25, 30, 40, 50, 60, 70, 75, 80, 90, 95, 97.5, 99, 100)
"""Levels of the quantiles in the atlas file, in per cent."""
Third = Literal["first", "middle", "last", "all"]
SAME, ENOUGH, ABOUT = 0.25, 3, 0.05
"""Thresholds for recognising an atlas model: mean difference between quantiles (in interquartile ranges), number of
measures to compare, and relative difference in the number of parameters. Quantiles of fine-tuned versions of a model
differ by 0.1 interquartile ranges, those of unrelated models by at least 0.38."""
DEPTHS: tuple[Third, ...] = ("first", "middle", "last")  # Names of the thirds of the layers


@dataclass(frozen=True)
class Distribution:
    """Distribution of a measure over the heads, or over a third of the layers, of one model."""

    heads: int  # number of heads with a value
    quantiles: tuple[float, ...]  # values at LEVELS

    def below(self, value: float) -> float:
        """Estimate the percentage of heads with a smaller value; a head with an equal value counts as half a head."""
        value, known = round_value(value), self.quantiles
        left, right = bisect_left(known, value), bisect_right(known, value)
        if right == 0 or left == len(known):
            return 0.0 if right == 0 else 100.0
        if left < right:
            level = (LEVELS[left] + LEVELS[right - 1]) / 2
        else:
            share = (value - known[left - 1]) / (known[left] - known[left - 1])
            level = LEVELS[left - 1] + share * (LEVELS[left] - LEVELS[left - 1])
        # the levels of n heads run from 0 % to 100 %, but a percentile also counts half of the head itself
        return (level * (self.heads - 1) + 50) / self.heads


ReadDistribution = PlainValidator(lambda entry: Distribution(int(entry[0]), tuple(entry[1:])))
ReadHashes = PlainValidator(lambda files: frozenset(file["sha256"] for file in files))


@dataclass(frozen=True)
class TrainedModel:
    """A model in the atlas, or one part (encoder or decoder) of a model."""

    name: str
    lineage: str  # name shared by a model and its fine-tuned versions; each lineage counts once in averages
    part: str  # encoder or decoder
    positions: str  # how positions enter the scores
    tokens: int | None  # tokens per window; if lines were read, the largest number of tokens per line
    pack: bool  # True if windows of `tokens` tokens were read, False if lines were read
    heads: int
    parameters: int
    files: Annotated[frozenset[str], ReadHashes]  # SHA-256 of the weight files
    measures: dict[str, dict[Third, Annotated[Distribution, ReadDistribution]]]


@dataclass(frozen=True)
class Subject:
    """Properties of a part of a model that determine which atlas models are comparable."""

    part: str
    positions: str | None
    tokens: int | None
    pack: bool
    lineages: frozenset[str] = frozenset()  # lineages to which the model belongs, excluded from the comparison


@dataclass(frozen=True)
class Reference:
    """Atlas models to compare a value with, or the reason why there are none."""

    models: tuple[TrainedModel, ...] = ()
    spreads: tuple[Distribution, ...] = ()  # for each model, the distribution over its heads
    reason: str | None = None  # reason why there are no models

    def percentile(self, value: float) -> float | None:
        """Return the percentage of atlas heads with a smaller value, or None if there are no models.

        Percentages are averaged over the models of each lineage, then over lineages.
        """
        pairs = zip(self.models, self.spreads, strict=True)
        percentages = group_pairs((model.lineage, spread.below(value)) for model, spread in pairs)
        return fmean(map(fmean, percentages.values())) if percentages else None


def round_value(value: float) -> float:
    """Round to four significant digits, the precision of the quantiles in the atlas file."""
    return float(f"{value:.4g}")


@cache
def models() -> tuple[TrainedModel, ...]:
    """Return the models of the atlas."""
    return tuple(map(model_of, provenance()["models"]))


@cache
def provenance() -> dict[str, list[dict[str, object]]]:
    """Load the atlas file: the distributions of each model, and how they were measured."""
    entries: dict[str, list[dict[str, object]]] = json.loads(FILE.read_text(encoding="utf-8"))
    return entries


def model_of(entry: Mapping[str, object]) -> TrainedModel:
    """Build a TrainedModel from an entry of the atlas file."""
    return TypeAdapter(TrainedModel).validate_python(entry)


@lru_cache(1024)  # called for every head of a page
def reference(measure: str, depth: Third, subject: Subject) -> Reference:
    """Return the atlas models comparable to `subject` and their distributions of a measure, or why there are none."""
    if not any(measure in model.measures for model in models()):
        return Reference(reason=f"the atlas lacks {measure}")
    if sized_by := find_measure(measure).sized_by:
        return Reference(reason=f"the measure depends on {sized_by}")
    alike = [model for model in models() if model.part == subject.part and model.lineage not in subject.lineages]
    if source_of(measure) == "weights":
        alike = [model for model in alike if _forms_alike(model, subject)]
        criterion = f"with comparable forms M (positions: {subject.positions}; {subject.tokens} tokens)"
    else:
        alike = [model for model in alike if model.pack and subject.pack and model.tokens == subject.tokens]
        criterion = f"that read windows of {subject.tokens} tokens" if subject.pack else "that do not read windows"
    others = [model for model in alike if depth in model.measures.get(measure, {})]
    if not others:
        return Reference(reason=f"the atlas lacks other trained models of part {subject.part} {criterion}")
    return Reference(tuple(others), tuple(model.measures[measure][depth] for model in others))


def _forms_alike(model: TrainedModel, subject: Subject) -> bool:
    """Return True if `model` and `subject` have equal position encodings and, with RoPE, windows of equal length."""
    return model.positions == subject.positions and (model.positions != "rotary" or model.tokens == subject.tokens)


def subject_of(report: Report, part: str) -> Subject:
    """Return the properties of a part of the report's model that determine which atlas models are comparable."""
    settings, conventions = report.settings, report.model.conventions
    subject = Subject(part, conventions.position if conventions else None, settings.length, bool(settings.pack))
    heads = [head for head in report.heads if head.part == part]
    files = {file.sha256 for file in report.model.files}
    lineages = {model.lineage for model in models() if model.files & files or _is_same(model, report, heads, subject)}
    return replace(subject, lineages=frozenset(lineages))


def _is_same(model: TrainedModel, report: Report, heads: Sequence[Head], subject: Subject) -> bool:
    """Return True if these heads of one part appear to come from an atlas model, even if the weight files differ."""
    # copies agree exactly, quantised or fine-tuned weights approximately
    if not heads or model.part != subject.part:
        return False
    distances = []
    for name, depths in model.measures.items():
        weights = source_of(name) == "weights"
        windows_alike = (model.pack, model.tokens) == (subject.pack, subject.tokens)
        alike = _forms_alike(model, subject) if weights else windows_alike
        shared = weights and shares_weights(heads[0])
        measures = [head.measures.get(name) for head in heads if not shared or head.layer == heads[0].layer]
        numbers = [measure.value for measure in measures if measure is not None and measure.value is not None]
        spread = depths["all"]
        quartiles = spread.quantiles[LEVELS.index(25)], spread.quantiles[LEVELS.index(75)]
        if alike and len(numbers) == spread.heads and quartiles[0] < quartiles[1]:
            pairs = zip(quantiles(numbers), spread.quantiles, strict=True)
            distances.append(fmean(abs(value - quantile) for value, quantile in pairs) / (quartiles[1] - quartiles[0]))
    if len(distances) >= ENOUGH:
        return median(distances) < SAME
    # with fewer measures, models of about equal size are the same if the measures agree or heads were selected
    some = len(heads) < model.heads or (bool(distances) and median(distances) < SAME)
    return some and abs(report.model.parameters / model.parameters - 1) < ABOUT


def quantiles(values: Sequence[float]) -> list[float]:
    """Compute the quantiles at LEVELS, interpolated linearly between heads, and round them."""
    return [round_value(float(value)) for value in np.quantile(values, np.divide(LEVELS, 100))]


def depths(report: Report) -> dict[int, Third]:
    """Map each layer to a third of its part (`first`, `middle`, `last`), or to `all` if only some layers were read."""
    if report.settings.layers is not None:
        return {head.layer: "all" for head in report.heads}
    thirds: dict[int, Third] = {}
    for heads in group_pairs((head.part, head.layer) for head in report.heads).values():
        layers = sorted(set(heads))
        thirds |= {layer: DEPTHS[len(DEPTHS) * place // len(layers)] for place, layer in enumerate(layers)}
    return thirds


def shares_weights(head: Head) -> bool:
    """Return True if the model calls the head's module several times, so that the weights have no single depth."""
    return "#" in head.site
