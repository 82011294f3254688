"""How the figures, curves and pictures of the project's own experiments are written."""

from __future__ import annotations

import json
from pathlib import Path

from attnlens.records import Experiment
from attnlens.report.pictures.experiments import groups
from attnlens.report.sections.experiments import format_label

WORDS = json.loads((Path(__file__).parents[1] / "data" / "experiment_words.json").read_text(encoding="utf-8"))
"""Labels of each experiment's figures, in their order, and its pictures by title: axis and labels of the lines."""
LINEAR = {"correlation", "share of trials", "share separable", "share of queries", "share of Σσ"}
"""Quantities that end at 1."""


def assert_in_words(experiment: Experiment) -> None:
    """Check every figure, picture, axis and line against the file."""
    pictures = {
        title: {
            "quantity": "; ".join({curve.quantity for curve in curves.values()}),
            "lines": [curve.label or format_label(experiment, name) for name, curve in curves.items()],
        }
        for title, curves in groups(experiment).items()
    }
    figures = [format_label(experiment, name) for name in experiment.final]
    assert {"figures": figures, "pictures": pictures} == WORDS[experiment.name]
    assert all(curve.bounded == (curve.quantity in LINEAR) for curve in experiment.curves.values())
