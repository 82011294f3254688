"""Synthetic reports of any shape, with the trends that real models show."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from attnlens import records
from attnlens.choices import Part
from attnlens.records import Head, Measure, Null
from attnlens.report.report import Report

HIDDEN = "a causal head never scores a query against a later key"
CROSS = "queries and keys live on different domains"
NOT_FINITE = "the weights are not finite"
KINDS = ("flat", "exponential", "power")
"""Categories of `weights.kind`, a measure that no analyzer computes."""


def synthetic_report(
    layers: int = 12,
    heads: int = 12,
    *,
    source: Literal["weights", "tokens", "both"] = "both",
    parts: Sequence[Part] | None = None,
    missing: Iterable[tuple[int, int]] = (),
    head_dim: int = 64,
    d_model: int = 768,
    curves: bool = True,
    measures: Sequence[str] | None = None,
    sequences: int = 32,
    seed: int = 0,
    model: str = "bert-base-uncased",
    architecture: str = "BertForMaskedLM",
) -> Report:
    """Return a report of layers × heads; the heads in `missing` lack all measures of the weights."""
    random = np.random.default_rng(seed)
    sites: Sequence[Part] = parts or ["encoder"] * layers
    gone, made = set(missing), []
    for layer, head in np.ndindex(layers, heads):
        depth, part = layer / max(1, len(sites) - 1), sites[layer]
        values: dict[str, Measure] = {}
        lines: dict[str, list[float]] = {}
        if source != "tokens":
            reason = NOT_FINITE if (layer, head) in gone else None
            values |= _weights(random, depth, part, reason, head_dim, d_model)
            if reason is None:
                lines["weights.singular_values"] = _spectrum(random, depth, head_dim)
        if source != "weights":
            values |= _tokens(random, depth, sequences, part)
            sigma = _spectrum(random, 1 - depth, 128)
            lines["tokens.singular_values"] = (np.cumsum(sigma) / np.sum(sigma)).tolist()
        if measures is not None:
            values = {name: values[name] for name in measures}
        place = {"site": _site(layer), "layer": layer, "head": head, "kv_head": head, "part": part}
        made.append(Head(**place, measures=values, curves=lines if curves else {}))
    text = records.Text(name="built-in sample", sha256="0" * 64)
    read = {} if source == "weights" else {"text": text, "windows": sequences, "length": 128, "pack": True}
    skipped = [
        records.Skipped(
            site=_site(layer),
            heads=sorted(head for at, head in gone if at == layer),
            **{"measure": "weights", "reason": NOT_FINITE},
        )
        for layer in sorted({layer for layer, _ in gone})
    ]
    count = layers * heads
    conventions = records.Conventions(position="absolute", qk_norm=False, bias="excluded")
    facts = {"architecture": architecture, "parameters": 109_514_298, "conventions": conventions}
    libraries = {"python": "3.11.2", "torch": "2.13.0", "transformers": "5.23.0"}
    return Report(
        kind="inspection",
        tool=records.Tool(version="0.1.0"),
        command="inspect",
        model=records.ModelInfo(id=model, revision="86b5e0934494bd15c9632b12f734a8a67f723594", **facts),
        settings=records.Settings(source=source, **read),
        environment=records.Environment(**libraries, platform="Linux x86_64"),
        coverage=records.Coverage(sites=layers, heads=count, analysed=count - len(gone), skipped=skipped),
        heads=made,
        summary=_summary(made, layers),
    )


def planted(values: np.ndarray, name: str = "weights.planted", curve: str = "") -> Report:
    """Return a report of these values of one measure; NaN: the head lacks a value."""
    heads = []
    for (layer, head), value in np.ndenumerate(values):
        place = {"site": f"site.{layer}", "layer": layer, "head": head, "kv_head": head, "part": "encoder"}
        measure = Measure(value=float(value)) if np.isfinite(value) else Measure(value=None, reason="gone")
        curves = {curve: [float(value), float(value) / 2]} if curve else {}
        heads.append(Head(**place, measures={name: measure}, curves=curves))
    return synthetic_report(*values.shape).model_copy(update={"heads": heads})


def _site(layer: int) -> str:
    return f"bert.encoder.layer.{layer}.attention.self"


def _weights(random: Any, depth: float, part: Part, reason: str | None, head_dim: int, d_model: int) -> Any:
    symmetry = float(np.clip(0.8 * np.exp(-2.2 * depth) * random.beta(4, 2) - 0.06 * random.random(), -1, 1))
    definiteness = float(np.clip(0.75 * symmetry + 0.12 * random.standard_normal(), -1, 1))
    rank = float(head_dim * (0.5 + 0.35 * depth + 0.05 * random.standard_normal()))
    kind = int(random.choice(3, p=[0.15, 0.5, 0.35]))
    null = {"symmetry": Null(mean=1 / d_model, sd=2**0.5 / d_model)}
    null |= {"definiteness": Null(mean=0.0, sd=0.021), "directionality": Null(mean=0.0, sd=0.3)}
    values = {
        "symmetry": symmetry,
        "definiteness": definiteness,
        "directionality": float(np.tanh(0.4 * random.standard_normal() + 0.5 * depth)),
        "positivity": float(np.clip(definiteness + 0.05 * random.standard_normal(), -1, 1)),
        "effective_rank": rank,
        "stable_rank": 1 + 0.25 * rank * random.random(),
        "rank90": float(round(0.7 * rank)),
        **{"kind": float(kind), "inertia_positive": float(head_dim), "inertia_negative": float(head_dim)},
        "norm": float(np.exp(1.5 + 0.3 * random.standard_normal() + depth)),
    }
    self_only = {"symmetry", "definiteness", "directionality", "positivity", "inertia_positive", "inertia_negative"}
    missing = dict.fromkeys(values if reason else self_only if part == "cross" else (), reason or CROSS)
    return {
        f"weights.{name}": Measure(value=None, reason=missing[name])
        if name in missing
        else Measure(value=value, label=KINDS[kind] if name == "kind" else None, n=1, null=null.get(name))
        for name, value in values.items()
    }


def _tokens(random: Any, depth: float, sequences: int, part: Part) -> dict[str, Measure]:
    shares = random.dirichlet(12 * np.array([0.5 - 0.3 * depth, 0.08, 0.15, 0.27 + 0.3 * depth]))
    values = dict(zip(("positive", "negative", "skew", "key"), shares.tolist(), strict=True))
    values["position"] = 0.0 if part == "cross" else 0.3 * depth * (1 - values["key"])
    values["content"] = 1 - values["key"] - values["position"]
    why = {name: HIDDEN for name in ("positive", "negative", "skew") if part == "decoder"}
    why |= {name: CROSS for name in ("positive", "negative", "skew", "position") if part == "cross"}
    measures = {
        name: Measure(value=None, reason=why[name])
        if name in why
        else Measure(value=value, se=0.02 * random.random() + 0.001, n=sequences)
        for name, value in values.items()
    }
    entropy = float(np.clip(0.75 - 0.4 * depth + 0.15 * random.standard_normal(), 0.02, 0.99))
    more = {"definite": float(random.beta(0.4, 3)), "entropy": entropy, "max_weight": float(1 - 0.9 * entropy)}
    more |= {"effective_rank": 4 + 60 * (1 - entropy), "rank90": float(round(2 + 30 * (1 - entropy)))}
    named = {f"tokens.share_{name}": measure for name, measure in measures.items()}
    return named | {f"tokens.{name}": Measure(value=v, se=abs(v) * 0.02, n=sequences) for name, v in more.items()}


def _spectrum(random: Any, depth: float, steps: int) -> list[float]:
    rate = (4 - 2.5 * depth) * (1 + 0.2 * random.standard_normal()) / steps
    sigma = np.exp(0.3 * random.standard_normal()) * np.exp(-rate * np.arange(steps))
    return (sigma * (1 + 0.4 / (1 + np.arange(steps)))).tolist()


def _summary(heads: list[Head], layers: int) -> records.Summary:
    """Return two extreme heads, the symmetry of the layers, and errors and nulls of medians."""
    if not heads or "weights.symmetry" not in heads[0].measures:
        return records.Summary()
    ends = ((heads[0], "weights.symmetry", 0.9, 99, "largest"), (heads[-1], "weights.effective_rank", 2, 1, "smallest"))
    extremes = [
        records.Extreme(
            **{"layer": head.layer, "head": head.head, "measure": measure, "value": value, "rank": 1, "of": len(heads)},
            **{"percentile": percentile, "text": f"{end} {measure} of them: {value}"},
        )
        for head, measure, value, percentile, end in ends
    ]

    def errors(heads: list[Head]) -> dict[str, float]:
        """Return errors of medians: here, the largest error of a head divided by √heads."""
        largest: dict[str, float] = {}
        for name, measure in (item for head in heads for item in head.measures.items()):
            if measure.se is not None:
                largest[name] = max(largest.get(name, 0), measure.se / len(heads) ** 0.5)
        return largest

    nulls = {
        name: Null(mean=measure.null.mean, sd=measure.null.sd / len(heads) ** 0.5)
        for head in heads
        for name, measure in head.measures.items()
        if measure.null is not None
    }
    return records.Summary(
        **{"extremes": extremes, "median_errors": errors(heads), "median_nulls": nulls, "identity_error": 3.2e-7},
        layer_errors=[errors([head for head in heads if head.layer == layer]) for layer in range(layers)],
        layer_numbers=list(range(layers)),
        layer_symmetry=[round(0.6 * float(np.exp(-layer / layers)), 6) for layer in range(layers)],
    )


TIMES = {"timings", "environment", "peak_memory_bytes", "tokens_per_second", "seconds"}
"""Fields that differ between two runs of the same inputs, seed and machine."""


def timeless(value: Any) -> Any:
    """Return JSON without times and memory."""
    if isinstance(value, dict):
        return {name: timeless(part) for name, part in value.items() if name not in TIMES}
    return [timeless(part) for part in value] if isinstance(value, list) else value


def bytes_of(report: Report | Path | str) -> str:
    """Return the JSON text of a report, or of a report's file, without times and memory."""
    content = report.to_json() if isinstance(report, Report) else Path(report).read_text()
    return json.dumps(timeless(json.loads(content)))
