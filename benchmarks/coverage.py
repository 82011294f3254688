"""Coverage of standard errors and intervals on a trained model: windows in a row against windows spread over a text.

python benchmarks/coverage.py [--quick] [--model demo] [--text FILE ...] [--samples 400] [--json FILE]

A text is read once, window by window, and its windows are the population: its means are what an interval over 32 of
them is about. Then samples of 32 windows are drawn as `--placement first` (from a random window on), `spread` and
`random` draw them; each row shows how often the interval contains the population's value. Every text is a population by
itself. Without --text: the built-in texts (few windows: 32 are a quarter of them, so that intervals are too wide).
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
from subjects import machine
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
from attnlens.models.texts.sequences import chosen

SAMPLE = 32
MEASURES = ("tokens.entropy", "tokens.effective_rank", "tokens.share_key")
PLACEMENTS = ("in a row", "spread", "random")


def main() -> None:
    """Print the table, and write it where --json names a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few windows and samples: does it still run?")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--text", nargs="*", default=[])
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--json")
    given = parser.parse_args()
    print(machine())
    loaded = loading.load(given.model)
    contents = texts.read_each(given.text) or texts.sample(given.model)
    tokens, samples, most = (16, 5, 64) if given.quick else (128, given.samples, 1024)
    found = []
    for content in contents[: 1 if given.quick else None]:
        read, losses = population(loaded, content, tokens, most)
        rows = coverage(read, losses, samples)
        found.append({"text": content.name, "windows": len(losses[0]), "samples": samples, "rows": rows})
        print(f"\n{given.model}, {content.name}: {len(losses[0])} windows of {tokens} tokens, {samples} samples")
        for name, shares in rows.items():
            told = ", ".join(f"{place} {100 * share:.1f} %" for place, share in shares.items())
            print(f"  {name}: {told} (ratio to what is said: {shares['spread'] / said(name):.2f} spread)")
    if given.json:
        Path(given.json).write_text(json.dumps({"model": given.model, "machine": machine(), "texts": found}, indent=1))


def said(name: str) -> float:
    """What the row should read."""
    return 0.05 if name.startswith("a sweep") else 0.95


def population(
    loaded: loading.Loaded, content: texts.Content, tokens: int, most: int
) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    """Each measure of each window and head, and each window's loss under the model's own kernel and under RBF."""
    options = {"length": tokens, "windows": most, "placement": "first", "text": [written(content)]}
    report = attnlens.inspect(loaded, source="tokens", analyzers=("symmetry", "spectrum"), **options)
    swap = attnlens.swap_kernel(loaded, "rbf", **options)
    assert report.windows is not None
    assert swap.windows is not None
    losses = swap.windows.values["loss.before"][:, 0], swap.windows.values["loss.after"][:, 0]
    return {name: report.windows.values[name] for name in MEASURES}, losses


def written(content: texts.Content) -> str:
    """The text as a file of its own, to be read by itself."""
    path = Path(mkdtemp()) / f"{content.name}.txt"
    path.write_text(content.text)
    return str(path)


def coverage(read: dict[str, Tensor], losses: tuple[Tensor, Tensor], samples: int) -> dict[str, dict[str, float]]:
    """The share of samples whose interval holds the population's value, row by row and placement by placement."""
    rows: dict[str, Callable[[Sequence[int], int], float]] = {}
    for name, values in read.items():
        whole = values[:, ~values.isnan().any(0)]
        rows[f"mean of a head, {name}"] = lambda own, seed, values=whole: means(values, own)
        rows[f"median over heads, {name}"] = lambda own, seed, values=whole: medians(values, own, seed)
        rows[f"a sweep without effects names a head, {name}"] = lambda own, seed, values=whole: sweeps(
            values, own, seed
        )
    rows["paired Δ of the loss, rbf"] = lambda own, seed: paired(losses, own, seed)
    count = len(losses[0])
    return {
        name: {
            place: sum(covers(windows(count, place, seed), seed) for seed in range(samples)) / samples
            for place in PLACEMENTS
        }
        for name, covers in rows.items()
    }


def windows(count: int, place: str, seed: int) -> list[int]:
    """The numbers of the windows of one sample."""
    if place == "in a row":
        start = Random(seed).randrange(count - SAMPLE + 1)  # noqa: S311
        return list(range(start, start + SAMPLE))
    return chosen(count, SAMPLE, "spread" if place == "spread" else "random", seed)


def means(values: Tensor, own: Sequence[int]) -> float:
    """The share of heads whose interval holds."""
    sample = values[own]
    reach = float(stats.t.ppf(0.975, SAMPLE - 1)) * standard_error(sample, Design.plain(SAMPLE))
    return float(((sample.mean(0) - values.mean(0)).abs() <= reach).double().mean())


def medians(values: Tensor, own: Sequence[int], seed: int) -> float:
    """Whether the interval of the median over heads holds."""
    (error,) = median_error(values[own], Design.plain(SAMPLE), [range(values.shape[1])], draws=200, seed=seed)
    _, low, high = student_interval(float(values[own].mean(0).quantile(0.5)), error, SAMPLE - 1)
    return float(low <= float(values.mean(0).quantile(0.5)) <= high)


def paired(losses: tuple[Tensor, Tensor], own: Sequence[int], seed: int) -> float:
    """Whether the interval of the difference holds."""
    before, after = losses
    found = paired_difference(before[own], after[own], draws=400, seed=seed)
    return float(found.low <= float((after - before).mean()) <= found.high)


def sweeps(values: Tensor, own: Sequence[int], seed: int) -> float:
    """Whether any head is named although none differs from the population."""
    differences = (values - values.mean(0))[own].T
    found = p_values(differences, Design.plain(SAMPLE), torch.ones(SAMPLE), seed)
    return float(bool(false_discovery(found).any()))


if __name__ == "__main__":
    main()
