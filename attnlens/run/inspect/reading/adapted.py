"""Reads each site's weights as they are and, under an adapter, as they are without it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from attnlens import models, weights
from attnlens.errors import UnreadableError
from attnlens.hooks import Reached
from attnlens.records import QueryKey


def with_base(
    loaded: models.Loaded,
    first: Sequence[Reached],
    window: Sequence[Reached],
    chosen: Sequence[int],
    turns: weights.Turns,
) -> Iterator[tuple[weights.Factors | UnreadableError, QueryKey | None]]:
    """The factors of the `chosen` sites, and their forms without the adapter; None where there is no adapter.

    Where the adapter leaves a site alone, that is the site's own form, with the same tensors.
    """
    present = loaded.deferred.present if loaded.deferred is not None else weights.nothing_to_read
    every = weights.factors(loaded.model, first, window, chosen=chosen, turns=turns, present=present)
    for place in chosen:
        yield _based(loaded, first[place], window[place], next(every))  # no name here keeps what was read last


def _based(
    loaded: models.Loaded, one: Reached, many: Reached, factors: weights.Factors | UnreadableError
) -> tuple[weights.Factors | UnreadableError, QueryKey | None]:
    """One site's factors, and its form without the adapter."""
    if loaded.adapter is None or isinstance(factors, UnreadableError):
        return factors, None
    with loaded.adapter.removed(loaded.model, many.site.path) as differs:
        base = next(weights.factors(loaded.model, [one], [many])) if differs else None
    if isinstance(base, UnreadableError):
        return base, None
    # positions turn both alike
    return factors, factors.query_key if base is None else replace(base.query_key, rotation=factors.rotation)
