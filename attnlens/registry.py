"""Registers analyzers and kernels by a decorator, and suggests the nearest name for an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from attnlens.choices import Sources
from attnlens.errors import UsageError

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from attnlens.records import Call, Measure, QueryKey, Selection, Site, Source

    Readings = dict[str, Float[Tensor, "*batch heads"] | Float[Tensor, "*batch heads steps"]]
    """The measures and curves by qualified name; NaN where there is no value."""
else:
    Readings = dict  # others import the name, and importing the registry is to load no torch

NOT_IDENTIFIED = "Not identified: other queries and keys with the same attention read otherwise."


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
    identified: Literal["everywhere", "all pairs", "nowhere"] = "everywhere"
    """For which heads the attention fixes it: all; those that see all pairs (others have no value); none (it reads
    queries and keys, and others with the same attention read otherwise)."""
    wholes: tuple[str, ...] = ()
    """The wholes of which it is a part: measures of one source that name the same whole sum to 1 in every head."""
    by_depth: bool = False
    """Whether a curve is to be seen in the first, middle and last third of the layers, side by side."""
    ends: Literal["", "largest", "both"] = ""
    """Which of its ends are worth a place among the most extreme heads; empty where neither is."""
    beside: str = ""
    """The measure that says what even attention would read, for one whose size says little without it."""
    space: str = ""
    """Where the question is posed, in a word, if an analyzer poses it in several spaces: their numbers are answers to
    different questions, and stand apart from each other in tables and pictures."""

    @property
    def caution(self) -> str:
        """What to know where the attention does not fix it; empty where it does."""
        if self.identified == "all pairs":
            return "Identified for heads that see all pairs; others have no value."
        return "" if self.identified == "everywhere" else NOT_IDENTIFIED


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


@dataclass(frozen=True)
class Analyzer(Named):
    """One question about a QueryKey, answered by a pure function."""

    function: Callable[[QueryKey], Readings]
    """The function itself."""
    by_default: bool = True
    """Whether it runs where no analyzer is named."""


@dataclass(frozen=True)
class Place:
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

    begin: Callable[[Place], Gatherer]
    """Makes the gatherer of one site."""
    by_default: bool = True
    """Whether it runs where no analyzer is named."""
    needs_inputs: bool = False
    """Whether it wants the modules' inputs, and the form on them."""


_ANALYZERS: dict[tuple[str, Source], Analyzer] = {}
_GATHERINGS: dict[tuple[str, Source], Gathering] = {}


def analyzer(
    name: str, source: Source, measures: Iterable[MeasureInfo], *, by_default: bool = True
) -> Callable[[Callable[[QueryKey], Readings]], Callable[[QueryKey], Readings]]:
    """Enter a function QueryKey → Readings as the analyzer `name`; `by_default`: it runs where none is named too."""

    def enter(function: Callable[[QueryKey], Readings]) -> Callable[[QueryKey], Readings]:
        question = (function.__doc__ or name).splitlines()[0]
        _ANALYZERS[name, source] = Analyzer(name, source, question, tuple(measures), function, by_default)
        return function

    return enter


def gathering(
    name: str, source: Source, measures: Iterable[MeasureInfo], **traits: bool
) -> Callable[[Callable[[Place], Gatherer]], Callable[[Place], Gatherer]]:
    """Enter a function Place → Gatherer as the analyzer `name`, which poses one question over several sequences.

    `traits` are the last fields of Gathering.
    """

    def enter(begin: Callable[[Place], Gatherer]) -> Callable[[Place], Gatherer]:
        question = (begin.__doc__ or name).splitlines()[0]
        _GATHERINGS[name, source] = Gathering(name, source, question, tuple(measures), begin, **traits)
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


def every_analyzer() -> list[Analyzer | Gathering]:
    """All that `--analyzer` can name."""
    _load()
    return [*_ANALYZERS.values(), *_GATHERINGS.values()]


def measure_infos() -> dict[str, MeasureInfo]:
    """Every measure and curve of every analyzer, by qualified name."""
    return {info.name: info for found in every_analyzer() for info in found.measures}


def measure_sources() -> dict[str, Source]:
    """What every measure and curve is read from; its name's first word need not say it (`ksvd.rank90`: tokens)."""
    return {info.name: found.source for found in every_analyzer() for info in found.measures}


@dataclass(frozen=True)
class Parameter:
    """A number that a kernel takes, as in `rbf:gamma=1`."""

    name: str
    """As typed."""
    meaning: str
    """What it does, in one line."""
    kind: type[int] | type[float]
    """Whether it counts or measures."""
    default: float | None = None
    """Its value where none is typed; None: it must be typed."""
    low: float | None = None
    """Least value allowed."""
    above: float | None = None
    """It must exceed this."""
    high: float | None = None
    """Greatest value allowed: more is a slip, and would fill the memory or never end."""
    even: bool = False
    """Whether an odd value makes the kernel negative somewhere (refused unless signed kernels are allowed)."""


@dataclass(frozen=True)
class KernelInfo:
    """An attention kernel: attention = softmax(log k(q, k) + bias, over the keys allowed) v."""

    name: str
    """As on the command line."""
    formula: str
    """log k(q, k), with s the scale; of the form "output" the whole, `output = …`."""
    meaning: str
    """The first line of the function's docstring: what it is, and where it comes from."""
    source: str
    """The paper."""
    positive: bool
    """Whether k ≥ 0 everywhere, so that rows of the attention matrix stay in the simplex."""
    symmetric: bool
    """Whether k(x, y) = k(y, x) where queries and keys are projected alike."""
    features: Literal["finite", "infinite", "none"]
    """Whether k = ⟨φ(q), φ(k)⟩ with finitely many features, infinitely many, or not known to be one."""
    form: Literal["score", "pair", "features", "output"]
    """What `function` takes: the score s⟨q, k⟩, or that of `dot`; queries and keys; one side of them, returning φ; or
    features of both, returning the output (attention is then no sum over keys)."""
    function: Callable[..., Tensor]
    """score: (score, **parameters) → log|k|; pair: (query, key, scale, **parameters) → log k;
    features: (x, scale, side, **parameters) → φ, side being "query" or "key";
    output: (φ(q), φ(k), **parameters) → output."""
    parameters: tuple[Parameter, ...] = ()
    """What it takes."""
    sign: Callable[..., Tensor] | None = None
    """score: (score, **parameters) → the sign of k, for kernels that can be negative."""
    dot: Callable[..., tuple[Tensor, Tensor, float]] | None = None
    """(query, key, scale, **parameters) → (q', k', s'). score: s'⟨q', k'⟩ is the score that `function` takes; pair: it
    is log k up to terms that softmax ignores."""
    phi: Callable[..., Tensor] | None = None
    """score: (x, scale, side, **parameters) → φ with ⟨φ(q), φ(k)⟩ = k, of any sign, where finitely many features do."""
    fused: str = "row tiles"
    """How it is computed fast and exactly."""
    hard: bool = False
    """Whether all weight goes to the largest score."""
    fit: Callable[..., Fit | OutputFit] | None = None
    """(**parameters) → what chooses its free parameters per head from calibration text; None: it has none."""
    trainable: tuple[str, ...] = ()
    """Fitted parameters that healing may train on."""
    needs_fit: bool = False
    """Whether it is nothing without calibration text (rank)."""

    @property
    def feature_map(self) -> Callable[..., Tensor] | None:
        """(x, scale, side, **parameters) → φ for running sums, k = ⟨φ(q), φ(k)⟩; None where there are no such φ."""
        return self.function if self.form == "features" else self.phi


@runtime_checkable
class Fit(Protocol):
    """Chooses a kernel's free parameters per head in closed form, from queries and keys that pass by."""

    typed: dict[str, float]
    """What each parameter is before the fit; none for a kernel that is nothing without it."""

    def update(self, call: Call) -> None:
        """Take in what the model asks of these heads in a batch."""

    def solve(self) -> dict[str, Tensor]:
        """The fitted parameters, each (heads, …), by the keyword under which the kernel's function takes them."""


@runtime_checkable
class OutputFit(Protocol):
    """A fit to a head's own output, for kernels of the form "output"."""

    typed: dict[str, float]
    """As in Fit."""

    def observe(self, query: Tensor, key: Tensor, kept: Tensor | None, output: Tensor) -> None:
        """Take in a batch's features (batch, heads, tokens, …), which tokens are real (#batch, #heads, tokens), and the
        head's own output (batch, heads, tokens, value_dim).
        """

    def solve(self) -> dict[str, Tensor]:
        """As in Fit."""


KERNELS: dict[str, KernelInfo] = {}
"""Every kernel that was entered so far; attnlens.kernels enters its own."""


def kernel(name: str, **facts: Any) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Enter a function as the kernel `name`; `facts` are the other fields of KernelInfo."""

    def enter(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        meaning = (function.__doc__ or name).splitlines()[0]
        KERNELS[name] = KernelInfo(name=name, meaning=meaning, function=function, **facts)
        return function

    return enter


def checked_name(what: str, name: str, known: Iterable[str]) -> str:
    """`name`, if it is known; else UsageError with «did you mean»."""
    options = list(known)
    if name in options:
        return name
    written = name[:60] if isinstance(name, str) else f"of type {type(name).__name__}"
    near = difflib.get_close_matches(written, options, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise UsageError(f"There is no {what} {written!r}.", f"{hint}There are: {', '.join(options)}.")


@cache
def _load() -> None:
    """Import the built-in analyzers and those that other packages offer as entry points; once in a process."""
    import_module("attnlens.analyzers")
    for entry in metadata.entry_points(group="attnlens.analyzers"):
        entry.load()
