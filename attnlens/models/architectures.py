"""Which model types of transformers attnlens reads: the table that benchmarks/sweep.py measures."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).with_name("architectures.csv")
"""The sweep's table; its first line says which transformers it was measured with."""


@dataclass(frozen=True)
class Architecture:
    """What became of one model type, built tiny from its own configuration."""

    model_type: str
    """As in config.json."""
    read: str
    """`whole`, `in part`, `refused`, `not built` (by the sweep), `too slow`."""
    route: str
    """How its attention is reached: `interface`, `traced`, `both`; empty where it is not."""
    positions: str
    """How positions enter: `absolute`, `rotary`, `bias`, `unknown`."""
    weights: str
    """At how many sites weights.* can be read: `all`, `some`, `none`."""
    doctor: str
    """The verdict of `doctor`, or how it ended."""
    swap: str
    """Whether `swap-kernel` ran with the exponential and the RBF kernel."""
    reason: str
    """What is missing and why."""


def architectures() -> tuple[str, list[Architecture]]:
    """What the table was measured with, and its rows."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        measured = file.readline().removeprefix("# ").strip()
        fields = Architecture.__dataclass_fields__
        return measured, [Architecture(*(row[name] for name in fields)) for row in csv.DictReader(file)]
