"""An experiment's figures and settings in words."""

from __future__ import annotations

from attnlens.records import Experiment
from attnlens.wording import clean


def worded(experiment: Experiment, name: str) -> str:
    """How a figure, a setting or a curve is written: its label, else its name, an identifier's with blanks."""
    return clean(experiment.labels.get(name) or (name.replace("_", " ") if name.isidentifier() else name))


def setting(experiment: Experiment, name: str) -> str:
    """A setting in words: `lr 0.1`, `d 2 4 10`, `accepted, d = 4: 0.2`."""
    words = worded(experiment, name)
    return f"{words}{':' * (' = ' in words)} {_value(experiment.settings[name])}"


def _value(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(_value, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)
