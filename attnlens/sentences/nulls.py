"""What the null of a measure is, in words."""

from __future__ import annotations

from collections.abc import Iterable

from attnlens.registry import MeasureInfo
from attnlens.wording import listed, source_of

WORDS = {
    "factors": "what independent random factors read",
    "rotations": "what the head reads turned by random rotations",
}


def null_words(measures: Iterable[MeasureInfo]) -> str:
    """What the nulls of these measures read; where they differ, of which sources those are that turn the head's M."""
    kinds = {source_of(info.name): info.null for info in measures}
    if len(set(kinds.values())) < 2:
        return WORDS[next(iter(kinds.values()), "factors")]
    turned = listed(f"{source}.*" for source, kind in kinds.items() if kind == "rotations")
    return f"{WORDS['factors']}, of {turned} {WORDS['rotations']}"
