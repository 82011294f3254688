"""Which analyzers are there? A decorator enters a plain function under a name; an unknown name gets a suggestion."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Literal

from attnlens.errors import UsageError
from attnlens.records import QueryKey, Source

if TYPE_CHECKING:
    from torch import Tensor

Readings = dict[str, "Tensor"]
"""Qualified name → (*batch, heads) for a measure, (*batch, heads, steps) for a curve; NaN where there is no value."""


@dataclass(frozen=True)
class MeasureInfo:
    """What a measure is called, what it means, and when it does not exist."""

    name: str
    """Qualified by source: `weights.symmetry`."""
    meaning: str
    """One line in plain words."""
    formula: str
    """The formula, in the notation of the docstrings."""
    low: float | None = None
    """Least possible value."""
    high: float | None = None
    """Largest possible value."""
    curve: bool = False
    """Whether it is a curve (one number a step) and not a scalar."""
    self_only: bool = True
    """Whether queries and keys must live on the same domain, so that cross-attention has no value."""
    labels: tuple[str, ...] = ()
    """Names of the categories 0, 1, … where the value is a category."""
    missing: str = "not a number"
    """Why there is no value where the analyzer returns NaN."""
    grows_with_factors: bool = False
    """Whether it is proportional to ‖Q‖‖K‖ (its null is then rescaled to the head's own norms)."""
    has_null: bool = True
    """Whether independent Gaussian factors are a null for it (weights.* scalars only)."""
    steps: str = "index"
    """What a curve's steps count, as its picture's axis says it: index, distance in tokens."""
    headline: bool = False
    """Whether it stands first in tables and on the overview."""
    more: str = ""
    """In plain words, what a head with an outstandingly large value does; empty where that says nothing."""
    less: str = ""
    """The same for an outstandingly small value."""


@dataclass(frozen=True)
class Analyzer:
    """One question about a QueryKey, answered by a pure function."""

    name: str
    """As on the command line."""
    source: Source
    """What it reads: weights or tokens."""
    question: str
    """The first line of the function's docstring."""
    measures: tuple[MeasureInfo, ...]
    """What it returns, scalars and curves."""
    function: Callable[[QueryKey], Readings]
    """The function itself."""


_ANALYZERS: dict[tuple[str, Source], Analyzer] = {}


def analyzer(
    name: str, source: Source, measures: Iterable[MeasureInfo]
) -> Callable[[Callable[[QueryKey], Readings]], Callable[[QueryKey], Readings]]:
    """Enter a function QueryKey → Readings as the analyzer `name` for `source`."""

    def enter(function: Callable[[QueryKey], Readings]) -> Callable[[QueryKey], Readings]:
        question = (function.__doc__ or name).splitlines()[0]
        _ANALYZERS[name, source] = Analyzer(name, source, question, tuple(measures), function)
        return function

    return enter


def analyzers(names: Iterable[str] = (), source: Literal["weights", "tokens", "both"] = "both") -> list[Analyzer]:
    """The analyzers of those names (all, where none is named) for that source, in the order of entry.

    Raises UsageError for an unknown name, with the nearest known one.
    """
    _load()
    known = list(dict.fromkeys(name for name, _ in _ANALYZERS))
    chosen = [checked_name("analyzer", name, known) for name in names] or known
    return [found for found in _ANALYZERS.values() if found.name in chosen and source in ("both", found.source)]


def measure_infos() -> dict[str, MeasureInfo]:
    """Every measure and curve of every analyzer, by qualified name."""
    return {info.name: info for found in analyzers() for info in found.measures}


def checked_name(what: str, name: str, known: Iterable[str]) -> str:
    """`name`, if it is known; else UsageError with «did you mean»."""
    options = list(known)
    if name in options:
        return name
    near = difflib.get_close_matches(str(name), options, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise UsageError(f"There is no {what} {name!r}.", f"{hint}There are: {', '.join(options)}.")


def _load() -> None:
    """Import the built-in analyzers and those that other packages offer as entry points."""
    import_module("attnlens.analyzers")
    for entry in metadata.entry_points(group="attnlens.analyzers"):
        entry.load()
