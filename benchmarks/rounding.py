"""Coverage of the test for rounding in `compare`, for several numbers of draws per model and of windows.

python benchmarks/rounding.py [--quick] [--model demo] [--draws 48] [--json FILE]

The weights of one model are rounded at random many times. The difference between two roundings is a change that
rounding explains. Each row is the share of such changes, over all heads and repetitions, whose p-value is below 5 % and
0.1 %, with the p-values computed from other draws as `compare` computes them. The test holds if a share is at most its
level. The last columns are the median smallest change detected at 0.1 %, as a multiple of that in the first row, and
the processor time of a comparison's draws. In bfloat16, the weights are rounded to it first.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from random import Random

import torch
from subjects import describe_machine
from torch import Tensor

from attnlens.analyzers.registry import OWN_ROWS, ROWS
from attnlens.models import loading
from attnlens.requests import InspectRequest
from attnlens.runs.compare import significance
from attnlens.runs.compare.sides import Blocks, ComparedModel
from attnlens.runs.compare.significance import combine_rounding, draw_tokens, draw_weights, rounding_p_values
from attnlens.runs.inspect.pipeline import prepare
from attnlens.runs.progress import silent

LEVELS = 0.05, 0.001
SCHEMES = (5, 2), (5, 1), (4, 1), (3, 1), (significance.DRAWS, significance.FEW), (1, 1)
"""Draws per model, and windows; the first is the reference."""
REPETITIONS = 400


def main() -> None:
    """Print the table, and write it to the file of --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few draws: does it still run?")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--draws", type=int, default=48)
    parser.add_argument("--json")
    options = parser.parse_args()
    print(describe_machine())
    draws, windows, repetitions = (12, 2, 5) if options.quick else (options.draws, 8, REPETITIONS)
    rows = []
    for dtype in ("float32", "bfloat16"):
        side = read_model(options.model, dtype, windows)
        tables, seconds = {}, {}
        for count in sorted({windows, *(count for _, count in SCHEMES)}):
            begin = time.process_time()
            tables[count] = draw(side, count, draws)
            seconds[count] = (time.process_time() - begin) / draws
        reference = None
        for number, count in SCHEMES:
            shares, least = measure_coverage(tables[windows], tables[count], number, repetitions)
            reference = reference or least
            row = {"draws": number, "windows": count, **shares, "least_ratio": least / reference}
            row["seconds"] = 2 * number * seconds[count]
            rows.append({"dtype": dtype, **row})
            print(f"{options.model} in {dtype}:", ", ".join(f"{name} {value:.2g}" for name, value in row.items()))
    if options.json:
        content = {"model": options.model, "machine": describe_machine(), "population": draws, "rows": rows}
        Path(options.json).write_text(json.dumps(content, indent=1))


def read_model(name: str, dtype: str, windows: int) -> ComparedModel:
    """Inspect a model, whose weights are rounded to `dtype` first, and which runs in float32."""
    loaded = loading.load(name, dtype="float32")
    with torch.no_grad():
        for weight in loaded.model.parameters():
            weight.copy_(weight.to(getattr(torch, dtype)))
    request = InspectRequest(windows=windows, length=64)
    return ComparedModel.of(prepare(loaded, request, None, silent), {})


def draw(side: ComparedModel, windows: int, draws: int) -> dict[str, Tensor]:
    """Sample how rounding changes each measure; the draws of the weights do not depend on the number of windows."""
    cut = replace(side.cut, sequences=windows)
    tables = draw_tokens(side, cut, Blocks.of(side), draws, torch.Generator().manual_seed(0), lambda _: None)
    return tables | draw_weights(side, draws, torch.Generator().manual_seed(1))


def measure_coverage(
    truth: dict[str, Tensor], drawn: dict[str, Tensor], number: int, repetitions: int
) -> tuple[dict[str, float], float]:
    """Return the share of p-values below each level, and the median smallest change that is detected."""
    random = Random(0)  # noqa: S311
    p, least = [], []
    for _ in range(repetitions):
        order = random.sample(range(len(next(iter(truth.values())))), 2 * number + 2)
        first, second, pair = order[:number], order[number : 2 * number], order[2 * number :]
        for name, values in truth.items():
            squared = name in (ROWS, OWN_ROWS)
            # a divergence has no sign: take that between one rounding and the original weights
            delta = values[pair[0]] if squared else values[pair[0]] - values[pair[1]]
            rounding = combine_rounding(drawn[name][first], drawn[name][second], squared=squared)
            test = significance.ChangeTest(delta, rounding_p_values(delta, rounding), rounding=rounding)
            p.append(test.p[~test.p.isnan()])
            least.append(test.least_change(LEVELS[1]) / drawn[name].abs().mean(0))
    together, limits = torch.cat(p), torch.cat(least)
    shares = {f"below {level:g}": float((together < level).double().mean()) for level in LEVELS}
    return shares, float(limits[limits.isfinite()].median())


if __name__ == "__main__":
    main()
