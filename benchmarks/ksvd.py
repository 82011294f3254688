"""Speed of KSVD on real text, beside the plain spectrum.

python benchmarks/ksvd.py [--quick]

Medians of runs taken in turn, in one process and on one thread, of the two analyzers alone, on queries and keys that
were captured before, and of all of attnlens.inspect with either, on a model that is already loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import subjects
from inspection import medians

import attnlens
from attnlens.analyzers import ksvd, spectrum
from attnlens.models import hooks, loading
from attnlens.models.loading import Loaded
from attnlens.records import Call, QueryKey, Site
from attnlens.registry import Readings

TARGET = 2


def main() -> None:
    """Print both rows."""
    quick = subjects.started(__doc__)
    name, model = subjects.main_model(quick=quick)
    loaded = loading.load(model)
    tokens, sequences, rounds = (32, 4, 1) if quick else (128, 32, 5)
    sites = captured(loaded, tokens, sequences)
    heads = sum(call.query.shape[1] for call in dict(sites).values())
    print(f"\nksvd against spectrum: {heads} heads of {name}, {sequences} × {tokens} tokens, medians of {rounds}")
    alone = [partial(analysed, found.of_tokens, sites) for found in (ksvd, spectrum)]
    row("the analyzers alone", *medians(rounds, *alone))
    whole = [partial(inspected, loaded, found, tokens, sequences) for found in ("ksvd", "spectrum")]
    row("all of attnlens.inspect", *medians(rounds, *whole))


def row(name: str, ours: float, theirs: float) -> None:
    """One line."""
    print(f"  {name}: ksvd {ours:.2f} s, spectrum {theirs:.2f} s, ratio {ours / theirs:.2f} (target ≤ {TARGET})")


def captured(loaded: Loaded, tokens: int, sequences: int) -> list[tuple[Site, Call]]:
    """What every site of the model computes attention from, batch by batch."""
    made = subjects.batches(loaded, tokens, sequences)
    return [(found.site, found.call) for batch in made for found in hooks.survey(loaded.model, batch.inputs)]


def analysed(analyzer: Callable[[QueryKey], Readings], sites: list[tuple[Site, Call]]) -> None:
    """One analyzer on all of it; each QueryKey is new, so that neither finds what the other has computed."""
    for site, call in sites:
        analyzer(call.query_key(site))


def inspected(loaded: Loaded, analyzer: str, tokens: int, sequences: int) -> None:
    """tokens.* or ksvd.* of all heads."""
    size = {"length": tokens, "windows": sequences, "batch_size": 8}
    attnlens.inspect(loaded, source="tokens", analyzers=(analyzer,), **size)


if __name__ == "__main__":
    main()
