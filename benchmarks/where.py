"""Print the time of each stage of `attnlens inspect`, and the least time that any program would need.

python benchmarks/where.py [MODEL] [--windows N]

The floor is the import of torch and transformers, loading the model, and one plain forward pass over as many windows.
All stages are timed one after another; run the script on an idle machine.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import subprocess
import sys
import time
from collections.abc import Callable

BATCH = 8  # Windows per forward pass, as in attnlens
STAGES = {  # stage → functions whose cumulative times are added
    "survey": ("survey_model",),
    "checks": ("prove_identity", "refuse_unsteady", "require_identity"),
    "nulls": ("gaussian_null", "null_of_median"),
    "intervals": ("median_error", "standard_error"),
    "findings": ("find",),
}


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def run(*words: str) -> float:
    """Return how long a command of this Python takes."""
    return seconds(lambda: subprocess.run([sys.executable, *words], check=True, capture_output=True))  # noqa: S603  # ours


def main() -> None:
    """Measure every stage, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--quick", action="store_true", help="read two windows")
    options = parser.parse_args()
    if options.quick:
        options.windows = 2
    rows = {"imports": run("-c", "import torch, transformers.models.gpt2.modeling_gpt2")}

    import torch

    import attnlens

    attnlens.load("demo")  # imports what loading needs; imports are measured above
    begin = time.perf_counter()
    loaded = attnlens.load(options.model)
    rows["loading"] = time.perf_counter() - begin
    length = min(128, getattr(loaded.model.config, "max_position_embeddings", 128))
    tokens = torch.randint(100, loaded.model.config.vocab_size, (BATCH, length))
    with torch.inference_mode():
        rows["plain pass"] = seconds(lambda: [loaded.model(tokens) for _ in range(-(-options.windows // BATCH))])
    floor = sum(rows.values())
    profile = cProfile.Profile()
    report = profile.runcall(attnlens.inspect, loaded, windows=options.windows)
    statistics = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    for stage, names in STAGES.items():
        rows[stage] = sum(entry[3] for (_, _, name), entry in statistics.items() if name in names)
    rows["weights, with nulls"] = report.timings.get("weights", 0.0)
    rows["passes and analyzers"] = report.timings.get("tokens", 0.0)
    rows["drawing"] = seconds(report.plot)
    command = run("-m", "attnlens", "inspect", options.model, "--windows", str(options.windows))
    for stage, number in rows.items():
        print(f"{stage:22} {number:7.2f} s")
    print(f"{'floor':22} {floor:7.2f} s")
    print(f"{'attnlens inspect':22} {command:7.2f} s, ratio to the floor {command / floor:.2f}")


if __name__ == "__main__":
    main()
