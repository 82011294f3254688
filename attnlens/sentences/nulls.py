"""What the null of a measure is, in words."""

from __future__ import annotations

from collections.abc import Iterable

FACTORS = "what independent random factors read"
ROTATIONS = "what the head reads turned by random rotations"


def null_words(measures: Iterable[str]) -> str:
    """What the nulls of these measures read: `selection.*` turns the head's own M, all others draw W_Q and W_K."""
    turned = {name.startswith("selection.") for name in measures}
    if turned == {True, False}:
        return f"{FACTORS}, of selection.* {ROTATIONS}"
    return ROTATIONS if turned == {True} else FACTORS
