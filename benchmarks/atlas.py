"""Makes the atlas: how each measure is distributed over the heads of trained models, by depth.

python benchmarks/atlas.py [--reports FOLDER] [--models NAME ...] [--write] [--quick]

Every model is read by `inspect` with all analyzers, the default windows and seed 0: language models on the built-in
texts, chemistry models on the reactions of reactions.py, a line each. Reports are kept in FOLDER and not made again.
`--write` writes attnlens/report/atlas.json and the pictures of docs/atlas.md. Beside the sizes stands how much a
percentile
read from the quantiles that are kept is off, over all heads, measures and depths.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import atlas_pictures
import numpy as np
import reactions
import subjects
import torch

import attnlens
from attnlens.analyzers.registry import find_measure
from attnlens.files import write_atomically
from attnlens.report import atlas
from attnlens.report.atlas import Third
from attnlens.report.export import Report, read_report

ANALYZERS = ("symmetry", "spectrum", "selection", "ksvd")
LINEAGES = {"demo": "demo", "SmolLM2": "SmolLM2", "MiniLM": "MiniLM"} | {
    name: name.partition(" ")[0] for name in reactions.FOLDERS
}
"""Name → what it was trained from: the two last rxnfp were tuned from the first."""
ALLOWED = 150_000
"""Bytes that the file may have."""


def main() -> None:
    """Read the models, and say or write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of demo on 4 windows: does it still run?")
    parser.add_argument("--reports", type=Path, help="folder that keeps the reports (default: they are not kept)")
    parser.add_argument("--models", nargs="+", default=list(LINEAGES), choices=LINEAGES, help="(default: all)")
    parser.add_argument("--write", action="store_true", help="write the atlas and its pictures")
    asked = parser.parse_args()
    print(subjects.machine())
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        names = ["demo"] if asked.quick else asked.models
        found = {name: read(name, asked.reports or Path(folder), quick=asked.quick) for name in names}
    reports = {name: report for name, report in found.items() if report is not None}
    made = made_of(reports)
    text = json.dumps(made, ensure_ascii=False, separators=(",", ":")).replace('{"name"', '\n{"name"') + "\n"
    heads = sum(model["heads"] for model in made["models"])
    off = differences(made["models"], reports)
    print(
        f"{heads} heads of {len(reports)} models; percentiles off by {np.mean(off):.1f} points, at most {max(off):.1f}"
    )
    print(f"{'bytes':8} {len(text.encode()):10,} {ALLOWED:10,} ratio {len(text.encode()) / ALLOWED:.2f}")
    if asked.write:
        write_atomically(atlas.FILE, text.encode())
        docs = Path(__file__).parent.parent / "docs"
        for name, content in atlas_pictures.drawn(list(map(atlas.model_of, made["models"]))).items():
            write_atomically(docs / name, content)
            print(f"{name} {len(content):,} bytes")


def read(name: str, folder: Path, *, quick: bool) -> Report | None:
    """The model's report, from the folder if it is there; None where its package is not installed."""
    kept = folder / f"{name}.json"
    if not kept.is_file():
        report = inspected(name, folder, {"windows": 4, "length": 16, "heads": [0, 5]} if quick else {})
        if report is None:
            return None
        report.write_json(kept)
    return read_report(kept)


def inspected(name: str, folder: Path, size: dict[str, int]) -> Report | None:
    """What `inspect` finds of the model with every analyzer."""
    if name not in reactions.FOLDERS:
        place = subjects.models(quick=False).get(name)
        return attnlens.inspect(place, analyzers=ANALYZERS, **size) if place else None
    with tempfile.TemporaryDirectory() as made:
        head = "ForMaskedLM" if name in reactions.MASKED else "Model"
        place = reactions.chemistry_model(name, Path(made) / "model", head)
        texts = reactions.write_reactions(Path(made), 30)
        if place is None:
            return None
        return attnlens.inspect(place, text=texts, pack=False, allow_pickle=True, analyzers=ANALYZERS, **size)


def made_of(reports: dict[str, Report]) -> dict[str, Any]:
    """The atlas of these reports."""
    return {
        "made_by": "benchmarks/atlas.py",
        "attnlens": attnlens.__version__,
        "date": datetime.now(UTC).date().isoformat(),
        "levels": list(atlas.LEVELS),
        "models": [entry(name, report) for name, report in reports.items()],
    }


def entry(name: str, report: Report) -> dict[str, Any]:
    """A model with what it was read on, and each measure's number of heads and quantiles by depth."""
    (part,) = {head.part for head in report.heads}
    settings, conventions = report.settings, report.model.conventions
    assert conventions is not None
    return {
        "name": name,
        "lineage": LINEAGES[name],
        "architecture": report.model.architecture,
        "parameters": report.model.parameters,
        "files": [file.model_dump() for file in report.model.files],
        "part": part,
        "positions": conventions.position,
        "layers": len({head.layer for head in report.heads}),
        "heads": len(report.heads),
        "sequences": settings.windows,
        "tokens": settings.length,
        "pack": settings.pack,
        "windows": settings.placement,
        "seed": settings.seed,
        "texts": [{"name": text.name, "sha256": text.sha256} for text in settings.texts],
        "measures": {
            measure: {depth: [len(values), *atlas.quantiles(values)] for depth, values in found.items()}
            for measure in report.measure_names()
            if find_measure(measure).sized_by != "rounding" and (found := values_of(report, measure))
        },
    }


def values_of(report: Report, measure: str) -> dict[Third, list[float]]:
    """Depth → what its heads read; weights that all layers share have no depth and count once.

    What goes with a model's size, so that nothing is compared by it, is kept of the model as a whole.
    """
    thirds, shared = atlas.depths(report), measure.startswith("weights.") and atlas.shares_weights(report.heads[0])
    found: dict[Third, list[float]] = {}
    whole = shared or find_measure(measure).sized_by
    for head in report.heads:
        one = head.measures.get(measure)
        if one is None or one.value is None or (shared and head.layer != report.heads[0].layer):
            continue
        for depth in ("all",) if whole else (thirds[head.layer], "all"):
            found.setdefault(depth, []).append(one.value)
    return found


def differences(entries: list[dict[str, Any]], reports: dict[str, Report]) -> list[float]:
    """By how much the percentile of each head within its model, read from the quantiles, is off."""
    return [
        abs(spread.below(value) - 100 * (np.less(values, value).mean() + np.equal(values, value).mean() / 2))
        for model in map(atlas.model_of, entries)
        for measure, depths in model.measures.items()
        if not find_measure(measure).sized_by
        for depth, values in values_of(reports[model.name], measure).items()
        for spread in [depths[depth]]
        for value in values
    ]


if __name__ == "__main__":
    main()
