"""Synthetic reports of `converge` and `reproduce`: experiments, and a series of checkpoints."""

from __future__ import annotations

from typing import Any

import numpy as np
from reports import synthetic_report

from attnlens.records import Coverage, Curve, Experiment, ModelInfo, Settings, Trajectory
from attnlens.report.report import Report

CORRELATION: dict[str, Any] = {"quantity": "correlation", "bounded": True}
SHARE: dict[str, Any] = {"quantity": "share of trials", "bounded": True}


def curve(steps: list[float], median: np.ndarray, spread: float = 0.0, **shown: Any) -> Curve:
    """Return a curve with a band of ± spread around its median, if spread is not 0."""
    values = np.asarray(median, dtype=float)
    low, high = ((values + sign * spread).tolist() if spread else None for sign in (-1, 1))
    return Curve(steps=steps, median=values.tolist(), low=low, high=high, **shown)


def converging(**changes: Any) -> Experiment:
    """Return an experiment of four correlations that rise with the iterations; all figures are as published."""
    steps = [1.0, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
    ends = {"W to Frobenius": 0.991, "W to nuclear": 0.858, "K,Q to nuclear": 0.996, "K,Q to Frobenius": 0.851}
    fields: dict[str, Any] = {
        "name": "local convergence",
        "question": "Does gradient descent converge to the SVM of its parameterisation?",
        "settings": {"n": 6, "T": 8, "d": 10, "lr": 0.1, "trials": 100},
        "final": ends,
        "errors": dict.fromkeys(ends, 0.0021),
        "published": {name: end + 0.001 for name, end in ends.items()},
        "tolerance": dict.fromkeys(ends, 0.01),
        "source": "Tarzanagh et al. 2023, Fig. 3",
        "curves": {
            name: curve(steps, end * (1 - np.exp(-np.sqrt(steps) / 3)), 0.03, **CORRELATION)
            for name, end in ends.items()
        },
    }
    return Experiment(**(fields | changes)).judge()


def selecting(**changes: Any) -> Experiment:
    """Return an experiment of a share by dimension, with the published curve."""
    steps, shares = [2.0, 4, 10, 30, 50], np.array([0.13, 0.34, 0.68, 0.9, 0.95])
    published = [0.12, 0.35, 0.67, 0.91, 0.96]
    names = [f"d={step:.0f}" for step in steps]
    fields: dict[str, Any] = {
        "name": "global selection",
        "question": "From zero, does gradient descent select the best tokens?",
        "settings": {"n": 6, "T": 8, "trials": 200},
        "final": dict(zip(names, shares.tolist(), strict=True)),
        "published": dict(zip(names, published, strict=True)),
        "tolerance": dict.fromkeys(names, 0.08),
        "axis": "dimension d",
        "curves": {
            "all optimal": curve(steps, shares, **SHARE),
            "known": curve(steps, np.array(published), **SHARE, label="published", published=True),
        },
    }
    return Experiment(**(fields | changes)).judge()


def golden(**changes: Any) -> Experiment:
    """Return an experiment of figures without curves, exact to a millionth; one is a bound."""
    fields: dict[str, Any] = {
        "name": "golden instances",
        "question": "Are solved instances solved again?",
        "final": {"vis1 ‖W‖_F": 8.685735001, "largest gap": 3.2e-13, "rank": 1.0},
        "published": {"vis1 ‖W‖_F": 8.685735002513, "largest gap": 0.0, "rank": 1.0},
        "tolerance": {"vis1 ‖W‖_F": 1e-6, "largest gap": 1e-9},
        "bounds": {"largest gap": "at most"},
    }
    return Experiment(**(fields | changes)).judge()


def of_head() -> Experiment:
    """Return an experiment of one head: quantities that need separate axes, nothing published."""
    at = np.array([0.0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000])
    steps = at.tolist()
    rise, kept = 1 - np.exp(-at / 100), {"quantity": "share of queries", "bounded": True, "picture": "selection kept"}
    curves = {
        "correlation: from zero": curve(steps, rise, **CORRELATION, picture="correlation", label="from zero"),
        "correlation: from M": curve(steps, 0.3 + 0.6 * rise, **CORRELATION, picture="correlation", label="from M"),
        "norm: from zero": curve(steps, at * 0.1, quantity="‖W‖ / ‖W of the SVM‖", picture="norm"),
        "selection kept": curve(steps, 1 - 0.2 * rise, **kept),
        "KL to one-hot": curve(steps, 3 * np.exp(-at / 50), quantity="KL, nats", picture="KL"),
    }
    return Experiment(
        name="head 3.7",
        question="Does training on its own choice bring the head to the max-margin solution?",
        settings={"layer": 3, "head": 7},
        final={"correlation: from zero": 0.98, "correlation: from M": None},
        reasons={"correlation: from M": "the head is saturated"},
        curves=curves,
    )


def training(layers: int = 4, heads: int = 8, checkpoints: int = 7, **changes: Any) -> Experiment:
    """Return a series of checkpoints whose measures leave their null during training."""
    random = np.random.default_rng(0)
    steps = [0.0, *np.round(np.geomspace(30, 6000, checkpoints - 1))]
    curves = {"loss": curve(steps, 2.5 + 4.5 * np.exp(-np.arange(checkpoints)), quantity="nats per token")}
    trajectories: list[Trajectory] = []
    ends = {"weights.symmetry": (0.0, 0.3), "weights.effective_rank": (15.0, 9.0), "tokens.entropy": (1.0, 0.6)}
    ends |= {"selection.efficiency": (0.01, 0.1), "tokens.share_key": (0.0, 0.7)}
    for name, (start, end) in ends.items():
        path = start + (end - start) * np.linspace(0, 1, checkpoints)
        values = path + 0.1 * abs(end - start) * random.standard_normal((layers * heads, checkpoints)).cumsum(1)
        low, middle, high = np.percentile(values, [25, 50, 75], axis=0)
        curves[name] = Curve(steps=steps, median=middle.tolist(), low=low.tolist(), high=high.tolist())
        if name.startswith("weights"):
            curves[f"{name}: null"] = curve(steps, np.full(checkpoints, start), 0.02 * max(start, 1), null_of=name)
        trajectories += [
            Trajectory(layer=row // heads, head=row % heads, measure=name, values=line.tolist())
            for row, line in enumerate(values)
        ]
    fields: dict[str, Any] = {
        "name": "training",
        "question": "How do the heads change during training?",
        "final": {name: found.median[-1] for name, found in curves.items() if ":" not in name},
        "axis": "training step",
        "curves": curves,
        "trajectories": trajectories,
    }
    return Experiment(**(fields | changes))


def experiment_report(*experiments: Experiment, command: str = "converge", **changes: Any) -> Report:
    """Return the report of these experiments, without a model."""
    architecture = "f(X, z) = h(Xᵀ softmax(XWz))"
    fields = {
        **{"command": command, "kind": "experiments", "heads": [], "experiments": list(experiments)},
        "model": ModelInfo(id="one-layer attention (synthetic)", architecture=architecture, parameters=100),
        "settings": Settings(dtype="float64"),
        "coverage": Coverage(sites=0, heads=0, analysed=0),
        "timings": {experiment.name: 1.25 for experiment in experiments},
    }
    return synthetic_report(1, 1).model_copy(update=fields | changes)


def series_report(layers: int = 4, heads: int = 8, **changes: Any) -> Report:
    """Return the report of a model's checkpoints."""
    update = {"command": "converge", "kind": "experiments", "heads": []}
    update["experiments"] = [training(layers, heads, **changes)]
    return synthetic_report(layers, heads).model_copy(update=update)


def failing() -> Experiment:
    """Return an experiment whose figures differ from the published ones; one lacks a value."""
    figures = {"norm": 8.7, "gap": 3e-3, "rank": None}
    published = {"norm": 8.685735, "gap": 0.0, "rank": 1.0}
    more = {"tolerance": {"norm": 1e-6, "gap": 1e-9}, "bounds": {"gap": "at most"}}
    return golden(name="failing", final=figures, published=published, reasons={"rank": "the solver stopped"}, **more)
