"""Registers analyzers by a decorator; what an analyzer takes and gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module, metadata
from inspect import cleandoc
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from attnlens.choices import Sources
from attnlens.records.comparison import CHANGE
from attnlens.registry.measure_info import DISTANCES, NAMED, MeasureInfo
from attnlens.registry.names import checked_name, is_built_in, refuse_replacing

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from attnlens.records import Measure, QueryKey, Selection, Site, Source

    Readings = dict[str, Float[Tensor, "*batch heads"] | Float[Tensor, "*batch heads steps"]]
    """The measures and curves by qualified name; NaN where there is no value."""
else:
    Readings = dict  # others import the name, and importing the registry is to load no torch


@dataclass(frozen=True)
class Named:
    """What every analyzer has, however it answers."""

    name: str
    """As on the command line."""
    source: Source
    """What it reads: weights or tokens."""
    question: str
    """The first line of the function's docstring."""
    measures: tuple[MeasureInfo, ...]
    """What it returns, scalars and curves."""
    definitions: str = field(default="", kw_only=True)
    """What its docstring says below that line: the symbols of the formulas, what is assumed and left out."""


@dataclass(frozen=True)
class Analyzer(Named):
    """One question about a QueryKey, answered by a pure function."""

    function: Callable[[QueryKey], Readings]
    """The function itself."""
    by_default: bool = True
    """Whether it runs where no analyzer is named."""
    needs_base: bool = False
    """Whether it compares with the site before an adapter was merged; it then runs where there is one."""
    brief: tuple[str, Callable[[QueryKey], Readings]] | None = None
    """The one measure that is read of heads that are swept, and how, where the whole takes longer than a sweep may."""


@dataclass(frozen=True)
class GatheringPlace:
    """Where a gatherer works, and on what terms."""

    site: Site
    """The site."""
    form: QueryKey | str = "M on the module's inputs is not known"
    """M on (x, 1), x the module's inputs: the factors [W_Q; b_Q] and [W_K; b_K] of every head. Where the logits are not
    bilinear in the inputs (RoPE, QK-norm, cross-attention): why not; inputs are then not handed over."""
    seed: int = 0
    """Of everything random."""
    top_p: float | None = None
    """Which tokens count as selected by a query: the fewest that hold this share of its weight; None: the largest."""
    shown: bool = False
    """Whether what was posed is to be shown, and not only measured."""


@dataclass(frozen=True)
class Answer:
    """What a gatherer has to say of one head."""

    measures: dict[str, Measure]
    """By qualified name; each has its value, or its own reason for having none."""
    windows: dict[str, dict[int, float]] = field(default_factory=dict)
    """By qualified name, what each sequence read, of measures that are means over sequences: mean and error follow."""
    curves: dict[str, list[float]] = field(default_factory=dict)
    """By qualified name; those without a value are left out."""
    shown: Selection | None = None
    """What was posed, where that is to be shown; still without the tokens' texts."""


@runtime_checkable
class Gatherer(Protocol):
    """Poses one question over all sequences of a site."""

    def update(self, query_key: QueryKey, sequence: int) -> None:
        """Take in one sequence: a QueryKey from tokens with one batch axis of length 1, without padding.

        `sequence` is its number among those fed; `heads` are those that are asked for and finite in it.
        """

    def solve(self) -> dict[int, Answer]:
        """The answer for every head that was seen, by its number in the model."""


@dataclass(frozen=True)
class Gathering(Named):
    """One question over several sequences at once, answered by an object that gathers them."""

    begin: Callable[[GatheringPlace], Gatherer]
    """Makes the gatherer of one site."""
    by_default: bool = True
    """Whether it runs where no analyzer is named."""
    needs_inputs: bool = False
    """Whether it wants the modules' inputs, and the form on them."""


_ANALYZERS: dict[tuple[str, Source], Analyzer | Gathering] = {}


def analyzer(
    name: str,
    source: Source,
    measures: Iterable[MeasureInfo],
    *,
    by_default: bool = True,
    needs_base: bool = False,
    brief: tuple[str, Callable[[QueryKey], Readings]] | None = None,
    replace: bool = False,
) -> Callable[[Callable[[QueryKey], Readings]], Callable[[QueryKey], Readings]]:
    """Enter a function QueryKey → Readings as the analyzer `name`; `by_default`: it runs if none is named too.

    `needs_base`: it compares with the model without its adapter, and runs by itself where the model has one. `brief`:
    a measure and a function that gives it alone, which is read of heads that are swept. `replace`: take the place of
    the analyzer that another module entered under that name, which otherwise is a UsageError.
    """

    def enter(function: Callable[[QueryKey], Readings]) -> Callable[[QueryKey], Readings]:
        question, definitions = _said(function, name)
        made = Analyzer(
            name, source, question, tuple(measures), function, by_default, needs_base, brief, definitions=definitions
        )
        _enter(made, function, replace=replace)
        return function

    return enter


def _said(function: Callable[..., object], name: str) -> tuple[str, str]:
    """The first line of the function's docstring (its name, where it has none), and what stands below."""
    question, _, definitions = cleandoc(function.__doc__ or name).partition("\n")
    return question, definitions.strip()


def _enter(made: Analyzer | Gathering, function: Callable[..., object], *, replace: bool) -> None:
    """Register an analyzer. Raise UsageError if it would replace one of another module, or give its measures too."""
    if not is_built_in(function):
        import_module("attnlens.analyzers")
    names = {info.name for info in made.measures}
    for key, other in _ANALYZERS.items():
        present = other.function if isinstance(other, Analyzer) else other.begin
        if key != (made.name, made.source):
            for name in sorted(names & {info.name for info in other.measures}):
                refuse_replacing("measure", name, function, present, "Choose another name.")
        elif not replace:
            refuse_replacing("analyzer", made.name, function, present)
    _ANALYZERS[made.name, made.source] = made


def gathering(
    name: str, source: Source, measures: Iterable[MeasureInfo], *, replace: bool = False, **traits: bool
) -> Callable[[Callable[[GatheringPlace], Gatherer]], Callable[[GatheringPlace], Gatherer]]:
    """Enter a function GatheringPlace → Gatherer as the analyzer `name`: one question over several sequences.

    `traits` are the last fields of Gathering, `replace` is as for an analyzer.
    """

    def enter(begin: Callable[[GatheringPlace], Gatherer]) -> Callable[[GatheringPlace], Gatherer]:
        question, definitions = _said(begin, name)
        made = Gathering(name, source, question, tuple(measures), begin, **traits, definitions=definitions)
        _enter(made, begin, replace=replace)
        return begin

    return enter


def analyzers(names: Iterable[str] = (), source: Sources = "both") -> list[Analyzer | Gathering]:
    """The analyzers of those names (those that run by default, where none is named) for that source, gatherings last.

    Raises UsageError for an unknown name, with the nearest known one.
    """
    every = every_analyzer()
    known = list(dict.fromkeys(found.name for found in every))
    named = [checked_name("analyzer", name, known) for name in names]
    chosen = named or [found.name for found in every if found.by_default]
    return [found for found in every if found.name in chosen and source in ("both", found.source)]


def beside_sweeps() -> list[Analyzer]:
    """What is read of heads that are swept: plain analyzers that run by default, and of others the brief measure."""
    found = []
    for one in every_analyzer():
        if isinstance(one, Analyzer) and one.brief is not None:
            name, function = one.brief
            infos = tuple(info for info in one.measures if info.name == name)
            found.append(replace(one, function=function, measures=infos))
        elif isinstance(one, Analyzer) and one.by_default:
            found.append(one)
    return found


def comparing(source: Sources) -> list[Analyzer]:
    """The analyzers of that source that compare a model with itself without its adapter."""
    plain = [found for found in every_analyzer() if isinstance(found, Analyzer)]
    return [found for found in plain if found.needs_base and source in ("both", found.source)]


def every_analyzer() -> list[Analyzer | Gathering]:
    """Return all that `--analyzer` can name, gatherings last."""
    _load()
    return sorted(_ANALYZERS.values(), key=lambda found: isinstance(found, Gathering))


def measure_infos() -> dict[str, MeasureInfo]:
    """Every measure and curve of every analyzer, by qualified name."""
    return {info.name: info for found in every_analyzer() for info in found.measures}


def info_of(name: str) -> MeasureInfo:
    """What is known of a measure or curve, a distance or a change; empty texts where it is of no analyzer."""
    if name.startswith(CHANGE):
        of = info_of(name.removeprefix(CHANGE))
        return MeasureInfo(name, meaning=f"second − first: {of.meaning}" if of.meaning else "", formula=of.formula)
    known = measure_infos() | {info.name: info for info in (*DISTANCES, NAMED)}
    return known.get(name) or MeasureInfo(name, meaning="", formula="")


def measure_sources() -> dict[str, Source]:
    """What every measure and curve is read from; its name's first word need not say it (`ksvd.rank90`: tokens)."""
    return {info.name: found.source for found in every_analyzer() for info in found.measures}


@cache
def _load() -> None:
    """Import the built-in analyzers and those that other packages offer as entry points; once in a process."""
    import_module("attnlens.analyzers")
    for entry in metadata.entry_points(group="attnlens.analyzers"):
        entry.load()
