"""Rebuilds a site's queries and keys from the inputs of its module and the weights that were read."""

from __future__ import annotations

from dataclasses import replace

from attnlens.hooks import Reached
from attnlens.records import QueryKey
from attnlens.weights.factors import Factors


def rebuilt(found: Reached, factors: Factors) -> QueryKey:
    """The site's queries and keys rebuilt as (x W_Q + b_Q) R(i) from the module's inputs x.

    Under QK-norm the per-token length, which W_Q does not carry, is taken from the captured queries and keys.
    """
    captured = found.call.query_key(found.site)
    x, y = (found.sequences(found.arguments[name]) for name in (found.input_name, found.other or found.input_name))
    query, key = factors.rebuilt(x, y, (captured.query, captured.key))
    return replace(captured, query=query, key=key)
