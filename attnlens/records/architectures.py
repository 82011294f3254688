"""Table of attnlens' support for transformers' model types, as measured by benchmarks/sweep.py."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).with_name("architectures.csv")  # Its first line names the versions of the libraries


class Architecture(NamedTuple):
    """Result of benchmarks/sweep.py for one model type, measured on a tiny model with the type's configuration."""

    model_type: str  # Name of the model type in transformers
    read: str  # Extent of the analysis: `whole`, `in part`; none: `refused`, `not built`, `too slow`
    route: str  # Access to the attention: `interface`, `traced`, `both`; empty if it can't be read
    positions: str  # Encoding of positions: `absolute`, `rotary`, `bias`, `unknown`
    weights: str  # Attention sites at which weights.* can be read: `all`, `some`, `none`
    doctor: str  # Verdict of `doctor`, or the reason why there is none: `refused`, `too slow`
    swap: str  # Outcome of `swap-kernel` with the exponential and the RBF kernel
    reason: str  # Missing results and the reasons why they are missing


def architectures() -> tuple[str, list[Architecture]]:
    """Return the table's first line (versions of the libraries) and its rows."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        measured = file.readline().removeprefix("# ").strip()
        return measured, [Architecture(*(row[name] for name in Architecture._fields)) for row in csv.DictReader(file)]
