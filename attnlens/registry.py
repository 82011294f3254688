"""Registers analyzers and kernels by decorators; what they take and give, and the facts about a measure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import import_module, metadata
from inspect import cleandoc
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from attnlens.arguments import checked_name
from attnlens.choices import CHANGE, Sources
from attnlens.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from attnlens.records import Call


@dataclass(frozen=True)
class KernelParameter:
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
    multiple_of: int = 1
    """Every value is a multiple of this, where it counts."""
    words: tuple[tuple[str, float], ...] = ()
    """Values that are typed as words; where there is no bound beside them, there are no others."""
    told: bool = True
    """Whether the kernel's spelling names it where it has its default."""


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
    parameters: tuple[KernelParameter, ...] = ()
    """What it takes."""
    sign: Callable[..., Tensor] | None = None
    """score: (score, **parameters) → the sign of k, for kernels that can be negative."""
    dot: Callable[..., tuple[Tensor, Tensor, float]] | None = None
    """(query, key, scale, **parameters) → (q', k', s'). score: s'⟨q', k'⟩ is the score that `function` takes; pair: it
    is log k up to terms that softmax ignores."""
    prepare: Callable[..., Call | None] | None = None
    """(call, **parameters, **fitted) → the call whose exponential kernel is this one, where its keys come of several
    heads, of positions or of queries; None where `dot` serves."""
    phi: Callable[..., Tensor] | None = None
    """score: (x, scale, side, **parameters) → φ with ⟨φ(q), φ(k)⟩ = k, of any sign, where finitely many features do."""
    fused: str = "row tiles"
    """How it is computed fast and exactly."""
    hard: bool = False
    """Whether all weight goes to the largest score."""
    fit: Callable[..., Fit | OutputFit] | None = None
    """(**parameters) → what chooses its free parameters per head from calibration text; None: it has none."""
    fit_reads: bool = True
    """Whether its fit reads queries and keys, and not their shapes alone."""
    trainable: tuple[str, ...] = ()
    """Fitted parameters that healing may train on."""
    equal_lengths: str = ""
    """What it becomes where all keys of a head have one length; empty where nothing else."""
    reads: bool = True
    """Whether it depends on queries and keys at all."""
    needs_fit: bool = False
    """Whether it is nothing without calibration text (rank)."""
    caution: str = ""
    """What a reader of its numbers must know, in a sentence."""
    oracle: Callable[..., str | None] | None = None
    """(**parameters) → the tie of the model's own kernel that stands in its place as an analysis of the evaluated text;
    None where it is a model."""

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


MODIFIERS: set[str] = set()
"""Names of ties, filters and hybrids, which a kernel cannot have; attnlens.kernels enters them."""


def kernel(
    name: str, *, replace: bool = False, **facts: Any
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Enter a function as the kernel `name`; `facts` are the other fields of KernelInfo.

    `replace`: take the place of the kernel that another module entered under that name, else a UsageError.
    """

    def enter(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        if not is_built_in(function):
            import_module("attnlens.kernels")
        if name in MODIFIERS:
            raise UsageError(f"{name!r} is a tie, filter or hybrid, not a kernel.", "Choose another name.")
        if name in KERNELS and not replace:
            refuse_replacing("kernel", name, function, KERNELS[name].function)
        meaning = (function.__doc__ or name).splitlines()[0]
        KERNELS[name] = KernelInfo(name=name, meaning=meaning, function=function, **facts)
        return function

    return enter


def refuse_replacing(
    what: str,
    name: str,
    function: Callable[..., Any],
    present: Callable[..., Any],
    remedy: str = "Choose another name, or pass replace=True to the decorator.",
) -> None:
    """Raise UsageError if `present`, which has the name already, is of another module.

    A module may define its own functions again, as a notebook does, and a script that is imported too.
    """
    origins = ["attnlens" if is_built_in(one) else one.__module__ for one in (function, present)]
    files = [getattr(getattr(one, "__code__", None), "co_filename", one) for one in (function, present)]
    if origins[0] == origins[1] or files[0] == files[1]:
        return
    owner = "built in" if is_built_in(present) else f"defined by {present.__module__}"
    raise UsageError(f"{function.__module__} defines the {what} {name!r}, which is already {owner}.", remedy)


def is_built_in(function: Callable[..., Any]) -> bool:
    """Return whether a function belongs to attnlens itself."""
    return function.__module__.partition(".")[0] == "attnlens"


NOT_IDENTIFIED = "Not identified: other queries and keys with the same attention read otherwise."


NULLS = {
    "factors": "what independent random factors read",
    "rotations": "what the head reads turned by random rotations",
}
"""What the value of a null is, by its kind."""


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
    null: Literal["factors", "rotations"] = "factors"
    """What its null draws, where it has one: those factors, or random rotations of the head's own M."""
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
    matrix: str = ""
    """Which matrix it is of, where others of its name are of others: `M`."""
    series: int = 0
    """Its place, from 1 on, among the measures that a series of checkpoints is about; 0: it stands behind them."""
    space: str = ""
    """Where the question is posed, in a word, if an analyzer poses it in several spaces: their numbers are answers to
    different questions, and stand apart from each other in tables and pictures."""
    use: str = ""
    """What to do with the answer, in a sentence or two."""
    paper: str = ""
    """Where it was published, with the equation or figure; empty where nowhere."""

    sized_by: str = ""
    """What its size goes with beside what it measures (`head_dim`): heads of models that differ in it can't be compared
    by it. Empty where nothing does; the window's length, with which all tokens.* go, is not named."""

    @property
    def caution(self) -> str:
        """What to know where the attention does not fix it; empty where it does."""
        if self.identified == "all pairs":
            return "Identified for heads that see all pairs; others have no value."
        return "" if self.identified == "everywhere" else NOT_IDENTIFIED


OWN_ROWS, ROWS, FORMS = "compare.own_kl", "compare.row_kl", "compare.form_change"
QUERY_ANGLE, KEY_ANGLE = "compare.query_angle", "compare.key_angle"
MISSING = "one of the models has no value"
distance = partial(MeasureInfo, low=0, self_only=False, has_null=False)
BETWEEN_ROWS = (
    distance(
        OWN_ROWS,
        "how far attention moves where each block of the second model takes the first one's hidden states: what of the "
        "change is the block's own",
        "KL(P ‖ P') = Σ p log(p/p'), mean over queries, of the same states; weights below 1e-12 count as 1e-12",
        missing=MISSING,
        headline=True,
        use="Read it first: a head that it names was changed itself, whatever came before it.",
    ),
    distance(
        ROWS,
        "how far attention moves as both models run: with what the blocks before it changed",
        "KL(P ‖ P') = Σ p log(p/p'), mean over queries; weights below 1e-12 count as 1e-12",
        missing=MISSING,
        headline=True,
        use="Where it names a head that compare.own_kl does not, look for the cause in the layers before.",
    ),
)
"""Between the rows of attention of the same windows."""
BETWEEN_FORMS = (
    distance(
        FORMS,
        "how far the form M moved, beside its size; under RoPE M is that of equal positions",
        "‖M' − M‖_F/‖M‖_F",
        missing="M is 0 in the first model, or can't be read in one",
        headline=True,
        use="Named without compare.own_kl, the weights moved where this text does not look: try another text.",
    ),
    distance(
        QUERY_ANGLE,
        "how far the directions that the queries read moved, in degrees; no change of basis within the head moves it",
        "largest principal angle between the column spaces of W_Q and W_Q'",
        high=90,
        missing=MISSING,
        use="Near 90 a direction that the queries read is read no longer; near 0 beside a large compare.form_change, "
        "the same directions are weighted otherwise.",
    ),
    distance(
        KEY_ANGLE,
        "how far the directions that the keys read moved, in degrees; no change of basis within the head moves it",
        "largest principal angle between the column spaces of W_K and W_K'",
        high=90,
        missing=MISSING,
        use="Near 90 a direction that the keys read is read no longer; near 0 beside a large compare.form_change, the "
        "same directions are weighted otherwise.",
    ),
)
"""Between the weights."""
DISTANCES = (*BETWEEN_ROWS, *BETWEEN_FORMS)
"""What is 0 between equal heads."""
NAMED = distance(
    "compare.named",
    "how many of the head's changes are named",
    "#{q ≤ the false-discovery rate} over all that is compared",
)
"""The count that a page and rules have beside the changes."""


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
        traits: dict[str, Any] = {"by_default": by_default, "needs_base": needs_base, "brief": brief}
        _enter(Analyzer, function, name, source, measures, replace=replace, **traits)
        return function

    return enter


def _enter(
    kind: Callable[..., Analyzer | Gathering],
    function: Callable[..., object],
    name: str,
    source: Source,
    measures: Iterable[MeasureInfo],
    *,
    replace: bool,
    **traits: Any,
) -> None:
    """Register an analyzer: its question is the first line of the docstring (its name, where there is none).

    Raise UsageError if it would replace one of another module, or give its measures too.
    """
    if not is_built_in(function):
        import_module("attnlens.analyzers")
    question, _, definitions = cleandoc(function.__doc__ or name).partition("\n")
    made = kind(name, source, question, tuple(measures), function, definitions=definitions.strip(), **traits)
    names = {info.name for info in made.measures}
    for key, other in _ANALYZERS.items():
        present = other.function if isinstance(other, Analyzer) else other.begin
        if key != (name, source):
            for measure in sorted(names & {info.name for info in other.measures}):
                refuse_replacing("measure", measure, function, present, "Choose another name.")
        elif not replace:
            refuse_replacing("analyzer", name, function, present)
    _ANALYZERS[name, source] = made


def gathering(
    name: str, source: Source, measures: Iterable[MeasureInfo], *, replace: bool = False, **traits: bool
) -> Callable[[Callable[[GatheringPlace], Gatherer]], Callable[[GatheringPlace], Gatherer]]:
    """Enter a function GatheringPlace → Gatherer as the analyzer `name`: one question over several sequences.

    `traits` are the last fields of Gathering, `replace` is as for an analyzer.
    """

    def enter(begin: Callable[[GatheringPlace], Gatherer]) -> Callable[[GatheringPlace], Gatherer]:
        _enter(Gathering, begin, name, source, measures, replace=replace, **traits)
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
