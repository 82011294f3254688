"""Write attnlens/report/demo_heads.json: the heads of `demo` with the smallest and the largest value of each measure.

python training/demo_heads.py

`attnlens explain` shows them as examples.
"""

from __future__ import annotations

import json

import attnlens
from attnlens.report.report import Report
from attnlens.report.sections.reference import DEMO_HEADS


def ends(report: Report) -> dict[str, list[list[float]]]:
    """Return [layer, head, value] of the smallest and of the largest value of each measure that varies."""
    entries = {}
    for name in report.measure_names():
        values = [
            (measure.value, head.layer, head.head)
            for head in report.heads
            if (measure := head.measures[name]).value is not None
        ]
        if len({value for value, *_ in values}) > 1:
            entries[name] = [[layer, head, float(f"{value:.4g}")] for value, layer, head in (min(values), max(values))]
    return entries


if __name__ == "__main__":
    examples = ends(attnlens.inspect("demo")) | ends(attnlens.inspect("demo", analyzers=["selection", "ksvd"]))
    DEMO_HEADS.write_text(json.dumps(examples, indent=0) + "\n", encoding="utf-8")
