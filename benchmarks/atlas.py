"""Make the atlas: the distribution of each measure over the heads of trained models, by depth.

python benchmarks/atlas.py [--reports FOLDER] [--models NAME ...] [--write] [--quick]

`inspect` reads every model with all analyzers, the default windows and seed 0: language models on the built-in texts,
chemistry models on the reactions of reactions.py, one per line. Reports are saved in FOLDER and reused. `--write`
writes attnlens/report/atlas.json and the pictures of docs/atlas.md. The printed error is that of a head's percentile if
it is read from the stored quantiles, over all heads, measures and depths.
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
from attnlens.report.report import Report, read_report

ANALYZERS = ("symmetry", "spectrum", "selection", "ksvd")
LINEAGES = {"demo": "demo", "SmolLM2": "SmolLM2", "MiniLM": "MiniLM"} | {
    name: name.partition(" ")[0] for name in reactions.FOLDERS
}
"""Name → lineage: the last two rxnfp models were fine-tuned from the first."""
ALLOWED = 150_000
"""Largest size of the file in bytes."""


def main() -> None:
    """Read the models, print the summary, and write the atlas."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of demo on 4 windows: does it still run?")
    parser.add_argument("--reports", type=Path, help="folder for the reports (default: a temporary one)")
    parser.add_argument("--models", nargs="+", default=list(LINEAGES), choices=LINEAGES, help="(default: all)")
    parser.add_argument("--write", action="store_true", help="write the atlas and its pictures")
    options = parser.parse_args()
    print(subjects.describe_machine())
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        names = ["demo"] if options.quick else options.models
        loaded = {name: load_report(name, options.reports or Path(folder), quick=options.quick) for name in names}
    reports = {name: report for name, report in loaded.items() if report is not None}
    atlas_content = build_atlas(reports)
    text = json.dumps(atlas_content, ensure_ascii=False, separators=(",", ":")).replace('{"name"', '\n{"name"') + "\n"
    heads = sum(model["heads"] for model in atlas_content["models"])
    errors = measure_errors(atlas_content["models"], reports)
    print(
        f"{heads} heads of {len(reports)} models; "
        f"percentiles off by {np.mean(errors):.1f} points, at most {max(errors):.1f}"
    )
    print(f"{'bytes':8} {len(text.encode()):10,} {ALLOWED:10,} ratio {len(text.encode()) / ALLOWED:.2f}")
    if options.write:
        write_atomically(atlas.FILE, text.encode())
        docs = Path(__file__).parent.parent / "docs"
        for name, picture in atlas_pictures.draw_pictures(list(map(atlas.model_of, atlas_content["models"]))).items():
            write_atomically(docs / name, picture)
            print(f"{name} {len(picture):,} bytes")


def load_report(name: str, folder: Path, *, quick: bool) -> Report | None:
    """Load the model's report from the folder, or make it; None if its package is not installed."""
    path = folder / f"{name}.json"
    if not path.is_file():
        report = inspect_model(name, folder, {"windows": 4, "length": 16, "heads": [0, 5]} if quick else {})
        if report is None:
            return None
        report.write_json(path)
    return read_report(path)


def inspect_model(name: str, folder: Path, size: dict[str, int]) -> Report | None:
    """Inspect a model with all analyzers; None if its package is not installed."""
    if name not in reactions.FOLDERS:
        path = subjects.find_models(quick=False).get(name)
        return attnlens.inspect(path, analyzers=ANALYZERS, **size) if path else None
    with tempfile.TemporaryDirectory() as temporary:
        head = "ForMaskedLM" if name in reactions.MASKED else "Model"
        path = reactions.build_chemistry_model(name, Path(temporary) / "model", head)
        texts = reactions.write_reactions(Path(temporary), 30)
        if path is None:
            return None
        return attnlens.inspect(path, text=texts, pack=False, allow_pickle=True, analyzers=ANALYZERS, **size)


def build_atlas(reports: dict[str, Report]) -> dict[str, Any]:
    """Build the atlas from these reports."""
    return {
        "made_by": "benchmarks/atlas.py",
        "attnlens": attnlens.__version__,
        "date": datetime.now(UTC).date().isoformat(),
        "levels": list(atlas.LEVELS),
        "models": [build_entry(name, report) for name, report in reports.items()],
    }


def build_entry(name: str, report: Report) -> dict[str, Any]:
    """Build the entry of a model: its origin, settings, and the quantiles of each measure by depth."""
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
            measure: {depth: [len(values), *atlas.quantiles(values)] for depth, values in values.items()}
            for measure in report.measure_names()
            if find_measure(measure).sized_by != "rounding" and (values := collect_values(report, measure))
        },
    }


def collect_values(report: Report, measure: str) -> dict[Third, list[float]]:
    """Group the values of a measure by depth; weights that all layers share have no depth and count once.

    A measure that depends on the size of the model gets only the group "all".
    """
    thirds, shared = atlas.depths(report), measure.startswith("weights.") and atlas.shares_weights(report.heads[0])
    values: dict[Third, list[float]] = {}
    whole = shared or find_measure(measure).sized_by
    for head in report.heads:
        measured = head.measures.get(measure)
        if measured is None or measured.value is None or (shared and head.layer != report.heads[0].layer):
            continue
        for depth in ("all",) if whole else (thirds[head.layer], "all"):
            values.setdefault(depth, []).append(measured.value)
    return values


def measure_errors(entries: list[dict[str, Any]], reports: dict[str, Report]) -> list[float]:
    """Compute the error, in points, of each head's percentile when it is read from the quantiles."""
    return [
        abs(spread.below(value) - 100 * (np.less(values, value).mean() + np.equal(values, value).mean() / 2))
        for model in map(atlas.model_of, entries)
        for measure, depths in model.measures.items()
        if not find_measure(measure).sized_by
        for depth, values in collect_values(reports[model.name], measure).items()
        for spread in [depths[depth]]
        for value in values
    ]


if __name__ == "__main__":
    main()
