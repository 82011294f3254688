"""Coverage of standard errors and intervals on a trained model: windows in a row against windows spread over a text.

python benchmarks/coverage.py [--quick] [--model demo] [--text FILE ...] [--samples 400] [--json FILE]

Each text is read once, and all of its windows are the population, whose means the intervals estimate. Samples of 32
windows are then drawn as `--placement first` (starting at a random window), `spread` and `random` draw them. Each row
is the share of samples whose interval contains the population's value or, for sweeps without effects, the share that
name a head. Without --text, the built-in texts are used; 32 windows are a quarter of each, so the intervals, which
assume a far longer text, are too wide.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from tempfile import mkdtemp

import torch
from scipy import stats
from subjects import describe_machine
from torch import Tensor

import attnlens
from attnlens.maths.statistics import (
    Design,
    false_discovery,
    median_error,
    p_values,
    paired_difference,
    standard_error,
    student_interval,
)
from attnlens.models import loading, texts
from attnlens.models.texts.sequences import choose_windows

SAMPLE = 32
MEASURES = ("tokens.entropy", "tokens.effective_rank", "tokens.share_key")
PLACEMENTS = ("in a row", "spread", "random")


def main() -> None:
    """Print the table, and write it to the file of --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few windows and samples: does it still run?")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--text", nargs="*", default=[])
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--json")
    options = parser.parse_args()
    print(describe_machine())
    loaded = loading.load(options.model)
    contents = texts.read_each(options.text) or texts.sample(options.model)
    tokens, samples, most = (16, 5, 64) if options.quick else (128, options.samples, 1024)
    results = []
    for content in contents[: 1 if options.quick else None]:
        measures, losses = read_population(loaded, content, tokens, most)
        rows = measure_coverage(measures, losses, samples)
        results.append({"text": content.name, "windows": len(losses[0]), "samples": samples, "rows": rows})
        print(f"\n{options.model}, {content.name}: {len(losses[0])} windows of {tokens} tokens, {samples} samples")
        for name, shares in rows.items():
            cells = ", ".join(f"{place} {100 * share:.1f} %" for place, share in shares.items())
            print(f"  {name}: {cells} (ratio to nominal: {shares['spread'] / get_nominal_share(name):.2f} spread)")
    if options.json:
        Path(options.json).write_text(
            json.dumps({"model": options.model, "machine": describe_machine(), "texts": results}, indent=1)
        )


def get_nominal_share(name: str) -> float:
    """Return the nominal value of a row."""
    return 0.05 if name.startswith("a sweep") else 0.95


def read_population(
    loaded: loading.Loaded, content: texts.Content, tokens: int, most: int
) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    """Read each measure of each window and head, and each window's loss under the model's own kernel and under RBF."""
    options = {"length": tokens, "windows": most, "placement": "first", "text": [write_text(content)]}
    report = attnlens.inspect(loaded, source="tokens", analyzers=("symmetry", "spectrum"), **options)
    swap = attnlens.swap_kernel(loaded, "rbf", **options)
    assert report.windows is not None
    assert swap.windows is not None
    losses = swap.windows.values["loss.before"][:, 0], swap.windows.values["loss.after"][:, 0]
    return {name: report.windows.values[name] for name in MEASURES}, losses


def write_text(content: texts.Content) -> str:
    """Write the text to its own file; return the path."""
    path = Path(mkdtemp()) / f"{content.name}.txt"
    path.write_text(content.text)
    return str(path)


def measure_coverage(
    measures: dict[str, Tensor], losses: tuple[Tensor, Tensor], samples: int
) -> dict[str, dict[str, float]]:
    """Compute the share of samples whose interval contains the population's value, by row and placement."""
    rows: dict[str, Callable[[Sequence[int], int], float]] = {}
    for name, values in measures.items():
        finite = values[:, ~values.isnan().any(0)]
        rows[f"mean of a head, {name}"] = lambda sample, seed, values=finite: cover_means(values, sample)
        rows[f"median over heads, {name}"] = lambda sample, seed, values=finite: cover_medians(values, sample, seed)
        rows[f"a sweep without effects names a head, {name}"] = lambda sample, seed, values=finite: names_head(
            values, sample, seed
        )
    rows["paired Δ of the loss, rbf"] = lambda sample, seed: cover_difference(losses, sample, seed)
    count = len(losses[0])
    return {
        name: {
            place: sum(covers(draw_windows(count, place, seed), seed) for seed in range(samples)) / samples
            for place in PLACEMENTS
        }
        for name, covers in rows.items()
    }


def draw_windows(count: int, place: str, seed: int) -> list[int]:
    """Draw the numbers of the windows of one sample."""
    if place == "in a row":
        start = Random(seed).randrange(count - SAMPLE + 1)  # noqa: S311
        return list(range(start, start + SAMPLE))
    return choose_windows(count, SAMPLE, "spread" if place == "spread" else "random", seed)


def cover_means(values: Tensor, numbers: Sequence[int]) -> float:
    """Return the share of heads whose interval contains the population's mean."""
    sample = values[numbers]
    reach = float(stats.t.ppf(0.975, SAMPLE - 1)) * standard_error(sample, Design.plain(SAMPLE))
    return float(((sample.mean(0) - values.mean(0)).abs() <= reach).double().mean())


def cover_medians(values: Tensor, numbers: Sequence[int], seed: int) -> float:
    """Return 1 if the interval of the median over heads contains the population's median, else 0."""
    (error,) = median_error(values[numbers], Design.plain(SAMPLE), [range(values.shape[1])], draws=200, seed=seed)
    _, low, high = student_interval(float(values[numbers].mean(0).quantile(0.5)), error, SAMPLE - 1)
    return float(low <= float(values.mean(0).quantile(0.5)) <= high)


def cover_difference(losses: tuple[Tensor, Tensor], numbers: Sequence[int], seed: int) -> float:
    """Return 1 if the interval of the difference contains the population's difference, else 0."""
    before, after = losses
    difference = paired_difference(before[numbers], after[numbers], draws=400, seed=seed)
    return float(difference.low <= float((after - before).mean()) <= difference.high)


def names_head(values: Tensor, numbers: Sequence[int], seed: int) -> float:
    """Return 1 if any head is named although no head differs from the population, else 0."""
    differences = (values - values.mean(0))[numbers].T
    p = p_values(differences, Design.plain(SAMPLE), torch.ones(SAMPLE), seed)
    return float(bool(false_discovery(p).any()))


if __name__ == "__main__":
    main()
