"""Reads each site's weights as they are and, under an adapter, as they are without it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from attnlens import models, weights
from attnlens.errors import UnreadableError
from attnlens.hooks import Reached
from attnlens.records import QueryKey


def with_base(
    loaded: models.Loaded, first: Sequence[Reached], window: Sequence[Reached]
) -> Iterator[tuple[weights.Factors | UnreadableError, QueryKey | None]]:
    """The factors of every site, and its form without the adapter; None where there is no adapter.

    Where the adapter leaves a site alone, that is the site's own form, with the same tensors.
    """
    every = weights.factors(loaded.model, list(first), list(window))
    for one, many, factors in zip(first, window, every, strict=True):
        if loaded.adapter is None or isinstance(factors, UnreadableError):
            yield factors, None
            continue
        with loaded.adapter.removed(loaded.model, many.site.path) as differs:
            base = next(weights.factors(loaded.model, [one], [many])) if differs else None
        if isinstance(base, UnreadableError):
            yield base, None
            continue
        # positions turn both alike
        yield factors, factors.query_key if base is None else replace(base.query_key, rotation=factors.rotation)
