"""Speed of KSVD on real text, compared with the plain spectrum.

python benchmarks/ksvd.py [--quick]

Times are medians of runs of attnlens.inspect with either analyzer, taken in turn on a loaded model, on one thread.
"""

from __future__ import annotations

from functools import partial

import subjects

import attnlens
from attnlens.models import loading
from attnlens.models.loading import Loaded

TARGET = 2


def main() -> None:
    """Print the times and their ratio."""
    quick = subjects.start_benchmark(__doc__)
    name, model = subjects.find_main_model(quick=quick)
    loaded = loading.load(model)
    tokens, sequences, rounds = (32, 4, 1) if quick else (128, 32, 5)
    print(f"\nksvd against spectrum on {name}, {sequences} × {tokens} tokens, medians of {rounds}")
    tasks = [partial(run_inspect, loaded, analyzer, tokens, sequences) for analyzer in ("ksvd", "spectrum")]
    ours, theirs = subjects.time_in_turn(tasks, rounds, warm=True)[0]
    print(f"  ksvd {ours:.2f} s, spectrum {theirs:.2f} s, ratio {ours / theirs:.2f} (target ≤ {TARGET})")


def run_inspect(loaded: Loaded, analyzer: str, tokens: int, sequences: int) -> None:
    """Inspect tokens.* or ksvd.* of all heads."""
    size = {"length": tokens, "windows": sequences, "batch_size": 8}
    attnlens.inspect(loaded, source="tokens", analyzers=(analyzer,), **size)


if __name__ == "__main__":
    main()
