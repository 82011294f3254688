"""Speed of KSVD on real text, compared with the plain spectrum.

python benchmarks/ksvd.py [--quick]

Times are medians of runs taken in turn in one process, on one thread: of both analyzers alone, on captured queries and
keys, and of all of attnlens.inspect with either analyzer, on a loaded model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import subjects

import attnlens
from attnlens.analyzers import ksvd, spectrum
from attnlens.analyzers.registry import Readings
from attnlens.models import hooks, loading
from attnlens.models.loading import Loaded
from attnlens.records import Call, QueryKey, Site

TARGET = 2


def main() -> None:
    """Print both rows."""
    quick = subjects.start_benchmark(__doc__)
    name, model = subjects.find_main_model(quick=quick)
    loaded = loading.load(model)
    tokens, sequences, rounds = (32, 4, 1) if quick else (128, 32, 5)
    sites = capture_calls(loaded, tokens, sequences)
    heads = sum(call.query.shape[1] for call in dict(sites).values())
    print(f"\nksvd against spectrum: {heads} heads of {name}, {sequences} × {tokens} tokens, medians of {rounds}")
    alone = [partial(run_analyzer, analyzer.measure_tokens, sites) for analyzer in (ksvd, spectrum)]
    print_row("the analyzers alone", *subjects.time_in_turn(alone, rounds, warm=True)[0])
    whole = [partial(run_inspect, loaded, analyzer, tokens, sequences) for analyzer in ("ksvd", "spectrum")]
    print_row("all of attnlens.inspect", *subjects.time_in_turn(whole, rounds, warm=True)[0])


def print_row(name: str, ours: float, theirs: float) -> None:
    """Print one line."""
    print(f"  {name}: ksvd {ours:.2f} s, spectrum {theirs:.2f} s, ratio {ours / theirs:.2f} (target ≤ {TARGET})")


def capture_calls(loaded: Loaded, tokens: int, sequences: int) -> list[tuple[Site, Call]]:
    """Capture the inputs of attention of all sites, batch by batch."""
    batches = subjects.build_batches(loaded, tokens, sequences)
    return [(capture.site, capture.call) for batch in batches for capture in hooks.survey(loaded.model, batch.inputs)]


def run_analyzer(analyzer: Callable[[QueryKey], Readings], sites: list[tuple[Site, Call]]) -> None:
    """Run one analyzer on all calls; each QueryKey is new, so that no result is cached."""
    for site, call in sites:
        analyzer(call.query_key(site))


def run_inspect(loaded: Loaded, analyzer: str, tokens: int, sequences: int) -> None:
    """Inspect tokens.* or ksvd.* of all heads."""
    size = {"length": tokens, "windows": sequences, "batch_size": 8}
    attnlens.inspect(loaded, source="tokens", analyzers=(analyzer,), **size)


if __name__ == "__main__":
    main()
