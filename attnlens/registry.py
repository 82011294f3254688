"""Register analyzers and kernels by decorators; define their interfaces and the metadata of measures."""

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
    """Numeric parameter of a kernel, as in `rbf:gamma=1`."""

    name: str
    """Name as typed."""
    meaning: str
    """Meaning in one line."""
    kind: type[int] | type[float]
    """int for a count, float for a measured quantity."""
    default: float | None = None
    """Value if none is typed; None: the parameter is required."""
    low: float | None = None
    """Smallest allowed value."""
    above: float | None = None
    """Exclusive lower bound."""
    high: float | None = None
    """Largest allowed value: a larger one is a typo, and would fill the memory or never end."""
    even: bool = False
    """True if an odd value makes the kernel negative somewhere (refused unless signed kernels are allowed)."""
    multiple_of: int = 1
    """Factor that every value must be a multiple of, for counts."""
    words: tuple[tuple[str, float], ...] = ()
    """Values that are typed as words; without numeric bounds, they are the only values."""
    told: bool = True
    """True if the kernel's spelling includes the parameter at its default."""


@dataclass(frozen=True)
class KernelInfo:
    """Attention kernel: attention = softmax(log k(q, k) + bias, over the allowed keys) v."""

    name: str
    """Name on the command line."""
    formula: str
    """Formula of log k(q, k), with s the scale; for the form "output" the whole output, `output = …`."""
    meaning: str
    """First line of the function's docstring: a description and its origin."""
    source: str
    """Paper that defines the kernel."""
    positive: bool
    """True if k ≥ 0 everywhere, so that rows of the attention matrix stay in the simplex."""
    symmetric: bool
    """True if k(x, y) = k(y, x) for equal projections of queries and keys."""
    features: Literal["finite", "infinite", "none"]
    """Number of features in k = ⟨φ(q), φ(k)⟩: finite, infinite, or none if no such form is known."""
    form: Literal["score", "pair", "features", "output"]
    """Arguments of `function`: the score s⟨q, k⟩ (or the score defined by `dot`); queries and keys; one side of the
    pair, returning φ; or features of both, returning the output (attention is then not a sum over keys)."""
    function: Callable[..., Tensor]
    """score: (score, **parameters) → log|k|; pair: (query, key, scale, **parameters) → log k;
    features: (x, scale, side, **parameters) → φ with side "query" or "key";
    output: (φ(q), φ(k), **parameters) → output."""
    parameters: tuple[KernelParameter, ...] = ()
    """Parameters of the kernel."""
    sign: Callable[..., Tensor] | None = None
    """score: (score, **parameters) → sign of k, for kernels that can be negative."""
    dot: Callable[..., tuple[Tensor, Tensor, float]] | None = None
    """(query, key, scale, **parameters) → (q', k', s'). score: s'⟨q', k'⟩ is the score that `function` takes; pair: it
    equals log k up to terms that softmax cancels."""
    prepare: Callable[..., Call | None] | None = None
    """(call, **parameters, **fitted) → the call whose exponential kernel equals this kernel, for keys that combine
    several heads, positions or queries; None if `dot` suffices."""
    phi: Callable[..., Tensor] | None = None
    """score: (x, scale, side, **parameters) → φ with ⟨φ(q), φ(k)⟩ = k, of any sign, if φ has finitely many features."""
    fused: str = "row tiles"
    """Fast and exact method of computation."""
    hard: bool = False
    """True if all weight goes to the largest score."""
    fit: Callable[..., Fit | OutputFit] | None = None
    """(**parameters) → fit of the free parameters per head on calibration text; None if the kernel lacks any."""
    fit_reads: bool = True
    """True if the fit reads queries and keys; False if it reads only their shapes."""
    trainable: tuple[str, ...] = ()
    """Fitted parameters that healing can train further."""
    equal_lengths: str = ""
    """Equivalent kernel if all keys of a head have equal length; empty if there is none."""
    reads: bool = True
    """True if the kernel depends on queries and keys at all."""
    needs_fit: bool = False
    """True if the kernel is undefined without calibration text (rank)."""
    caution: str = ""
    """Caveat for readers of its numbers, in one sentence."""
    oracle: Callable[..., str | None] | None = None
    """(**parameters) → the tie of the model's own kernel that replaces it for an analysis of the evaluated text; None
    if the kernel is a model."""

    @property
    def feature_map(self) -> Callable[..., Tensor] | None:
        """Feature map (x, scale, side, **parameters) → φ for running sums, k = ⟨φ(q), φ(k)⟩; None if there is none."""
        return self.function if self.form == "features" else self.phi


@runtime_checkable
class Fit(Protocol):
    """Fit of a kernel's free parameters per head, in closed form from a stream of queries and keys."""

    typed: dict[str, float]
    """Value of each parameter before the fit; empty for a kernel that is undefined without a fit."""

    def update(self, call: Call) -> None:
        """Add the queries and keys that the model computes for these heads in a batch."""

    def solve(self) -> dict[str, Tensor]:
        """Return the fitted parameters, each (heads, …), keyed by the keyword argument of the kernel's function."""


@runtime_checkable
class OutputFit(Protocol):
    """Fit to a head's own output, for kernels of the form "output"."""

    typed: dict[str, float]
    """See Fit.typed."""

    def observe(self, query: Tensor, key: Tensor, kept: Tensor | None, output: Tensor) -> None:
        """Add a batch: features (batch, heads, tokens, …), a mask of real tokens (#batch, #heads, tokens), and the
        head's own output (batch, heads, tokens, value_dim).
        """

    def solve(self) -> dict[str, Tensor]:
        """Return the fitted parameters in the form of Fit.solve."""


KERNELS: dict[str, KernelInfo] = {}
"""Registered kernels by name; attnlens.kernels registers the built-in ones."""


MODIFIERS: set[str] = set()
"""Names of ties, filters and hybrids, which kernels can't use; attnlens.kernels registers them."""


def kernel(
    name: str, *, replace: bool = False, **facts: Any
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Register a function as the kernel `name`; `facts` are the other fields of KernelInfo.

    `replace`: replace a kernel that another module registered under that name; otherwise that is a UsageError.
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
    """Raise UsageError if `present`, which already has the name, belongs to another module.

    A module may define its own functions again: a notebook does, and so does a script that is also imported.
    """
    origins = ["attnlens" if is_built_in(each) else each.__module__ for each in (function, present)]
    files = [getattr(getattr(each, "__code__", None), "co_filename", each) for each in (function, present)]
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
"""Meaning of a null's value, by kind of null."""


@dataclass(frozen=True)
class MeasureInfo:
    """Name, meaning and conditions of existence of a measure."""

    name: str
    """Name qualified by source: `weights.symmetry`."""
    meaning: str
    """Meaning in one line of plain words."""
    formula: str
    """Formula in the notation of the docstrings."""
    low: float | None = None
    """Smallest possible value."""
    high: float | None = None
    """Largest possible value."""
    curve: bool = False
    """True for a curve (one number per step), False for a scalar."""
    self_only: bool = True
    """True if queries and keys must share a domain, so that cross-attention has no value."""
    labels: tuple[str, ...] = ()
    """Names of the categories 0, 1, … if the value is a category."""
    missing: str = "not a number"
    """Reason for a missing value if the analyzer returns NaN."""
    grows_with_factors: bool = False
    """True if it is proportional to ‖Q‖‖K‖; its null is then rescaled to the head's own norms."""
    has_null: bool = True
    """True if independent Gaussian factors are a null for it (weights.* scalars only)."""
    null: Literal["factors", "rotations"] = "factors"
    """Random draws of its null, if any: independent factors, or random rotations of the head's own M."""
    steps: str = "index"
    """Unit of a curve's steps, as on the axis of its plot: index, distance in tokens."""
    headline: bool = False
    """True if it comes first in tables and in the overview."""
    identified: Literal["everywhere", "all pairs", "nowhere"] = "everywhere"
    """Heads whose attention determines it: all; those that see all pairs (others have no value); none, because it
    depends on queries and keys, and others with the same attention yield another value."""
    wholes: tuple[str, ...] = ()
    """Totals that it is a part of: measures of one source with the same total sum to 1 in every head."""
    by_depth: bool = False
    """True if a curve is plotted for the first, middle and last third of the layers, side by side."""
    ends: Literal["", "largest", "both"] = ""
    """Ends of its range that are listed among the most extreme heads; empty for neither."""
    beside: str = ""
    """Measure with the value under uniform attention, for a measure whose size says little without it."""
    matrix: str = ""
    """Matrix that it is computed from, if measures of the same name use others: `M`."""
    series: int = 0
    """Rank, from 1 on, among the measures that a series of checkpoints is about; 0: after them."""
    space: str = ""
    """Space of the question in a word, if an analyzer poses it in several: their numbers answer different questions,
    and are separate in tables and plots."""
    use: str = ""
    """Advice on using the result, in a sentence or two."""
    paper: str = ""
    """Publication with the equation or figure; empty if unpublished."""

    sized_by: str = ""
    """Other quantity that it scales with (`head_dim`): heads of models that differ in it can't be compared by it. Empty
    if there is none; the window's length, which all tokens.* depend on, is not listed."""

    @property
    def caution(self) -> str:
        """Caveat for a measure that attention does not determine; empty if it does."""
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
"""Distances between the attention rows of the same windows."""
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
"""Distances between the weights."""
DISTANCES = (*BETWEEN_ROWS, *BETWEEN_FORMS)
"""All distances; each is 0 between equal heads."""
NAMED = distance(
    "compare.named",
    "how many of the head's changes are named",
    "#{q ≤ the false-discovery rate} over all that is compared",
)
"""Number of named changes, which pages and rules use alongside the changes."""


if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from attnlens.records import Measure, QueryKey, Selection, Site, Source

    Readings = dict[str, Float[Tensor, "*batch heads"] | Float[Tensor, "*batch heads steps"]]
    """Measures and curves by qualified name; NaN for a missing value."""
else:
    Readings = dict  # others import the name, and importing the registry must not load torch


@dataclass(frozen=True)
class Named:
    """Fields common to all analyzers."""

    name: str
    """Name on the command line."""
    source: Source
    """Source that it reads: weights or tokens."""
    question: str
    """First line of the function's docstring."""
    measures: tuple[MeasureInfo, ...]
    """Scalars and curves that it returns."""
    definitions: str = field(default="", kw_only=True)
    """Rest of the docstring: symbols of the formulas, assumptions and omissions."""


@dataclass(frozen=True)
class Analyzer(Named):
    """Analyzer that answers one question about a QueryKey with a pure function."""

    function: Callable[[QueryKey], Readings]
    """Function that computes the measures."""
    by_default: bool = True
    """True if it runs when no analyzer is named."""
    needs_base: bool = False
    """True if it compares with the site before an adapter was merged; it then runs for every model with an adapter."""
    brief: tuple[str, Callable[[QueryKey], Readings]] | None = None
    """One measure and its function, computed for swept heads if the whole analyzer takes longer than a sweep allows."""


@dataclass(frozen=True)
class GatheringPlace:
    """Site and settings of a gatherer."""

    site: Site
    """Site that the gatherer reads."""
    form: QueryKey | str = "M on the module's inputs is not known"
    """M on (x, 1), x the module's inputs: the factors [W_Q; b_Q] and [W_K; b_K] of every head. If the logits are not
    bilinear in the inputs (RoPE, QK-norm, cross-attention): the reason; inputs are then not passed."""
    seed: int = 0
    """Seed of everything random."""
    top_p: float | None = None
    """Selection of tokens by a query: the fewest whose weights sum to at least this share; None: the largest one."""
    shown: bool = False
    """True if the posed problem is shown as well as measured."""


@dataclass(frozen=True)
class Answer:
    """Results of a gatherer for one head."""

    measures: dict[str, Measure]
    """Measures by qualified name, each with its value or its own reason for lacking one."""
    windows: dict[str, dict[int, float]] = field(default_factory=dict)
    """Values per sequence, by qualified name, for measures that are means over sequences; they give mean and error."""
    curves: dict[str, list[float]] = field(default_factory=dict)
    """Curves by qualified name; those without a value are left out."""
    shown: Selection | None = None
    """Posed problem if it is shown; without the tokens' texts at this point."""


@runtime_checkable
class Gatherer(Protocol):
    """Accumulator of one question over all sequences of a site."""

    def update(self, query_key: QueryKey, sequence: int) -> None:
        """Add one sequence: a QueryKey from tokens with one batch axis of length 1, without padding.

        `sequence` is its number among the sequences read; `heads` are the requested heads that are finite in it.
        """

    def solve(self) -> dict[int, Answer]:
        """Return the answer for every head that was seen, keyed by its number in the model."""


@dataclass(frozen=True)
class Gathering(Named):
    """Analyzer that answers one question over several sequences at once with an object that accumulates them."""

    begin: Callable[[GatheringPlace], Gatherer]
    """Function that creates the gatherer of one site."""
    by_default: bool = True
    """True if it runs when no analyzer is named."""
    needs_inputs: bool = False
    """True if it needs the modules' inputs, and the form on them."""


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
    """Register a function QueryKey → Readings as the analyzer `name`; `by_default`: it also runs if none is named.

    `needs_base`: it compares with the model without its adapter, and runs by default if the model has one. `brief`: a
    measure and a function that computes it alone, for heads that are swept. `replace`: replace an analyzer that another
    module registered under that name; otherwise that is a UsageError.
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
    """Register an analyzer: its question is the first line of the docstring, or its name if there is none.

    Raise UsageError if another module has registered one of its measures already or, without `replace`, its name.
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
    """Register a function GatheringPlace → Gatherer as the analyzer `name`: one question over several sequences.

    `traits` are the last fields of Gathering; `replace` is as in `analyzer`.
    """

    def enter(begin: Callable[[GatheringPlace], Gatherer]) -> Callable[[GatheringPlace], Gatherer]:
        _enter(Gathering, begin, name, source, measures, replace=replace, **traits)
        return begin

    return enter


def analyzers(names: Iterable[str] = (), source: Sources = "both") -> list[Analyzer | Gathering]:
    """Return the named analyzers (by default those that run if none is named) of that source, gatherings last.

    Raise UsageError for an unknown name, with the nearest known one.
    """
    available = every_analyzer()
    known = list(dict.fromkeys(each.name for each in available))
    named = [checked_name("analyzer", name, known) for name in names]
    chosen = named or [each.name for each in available if each.by_default]
    return [each for each in available if each.name in chosen and source in ("both", each.source)]


def beside_sweeps() -> list[Analyzer]:
    """Return analyzers of swept heads: plain ones that run by default, and others reduced to their brief measure."""
    selected = []
    for entry in every_analyzer():
        if isinstance(entry, Analyzer) and entry.brief is not None:
            name, function = entry.brief
            infos = tuple(info for info in entry.measures if info.name == name)
            selected.append(replace(entry, function=function, measures=infos))
        elif isinstance(entry, Analyzer) and entry.by_default:
            selected.append(entry)
    return selected


def comparing(source: Sources) -> list[Analyzer]:
    """Return the analyzers of that source that compare a model with itself without its adapter."""
    plain = [each for each in every_analyzer() if isinstance(each, Analyzer)]
    return [each for each in plain if each.needs_base and source in ("both", each.source)]


def every_analyzer() -> list[Analyzer | Gathering]:
    """Return all analyzers that `--analyzer` can name, gatherings last."""
    _load()
    return sorted(_ANALYZERS.values(), key=lambda found: isinstance(found, Gathering))


def measure_infos() -> dict[str, MeasureInfo]:
    """Return every measure and curve of every analyzer, by qualified name."""
    return {info.name: info for each in every_analyzer() for info in each.measures}


def info_of(name: str) -> MeasureInfo:
    """Return the info of a measure, curve, distance or change; its texts are empty for an unknown name."""
    if name.startswith(CHANGE):
        of = info_of(name.removeprefix(CHANGE))
        return MeasureInfo(name, meaning=f"second − first: {of.meaning}" if of.meaning else "", formula=of.formula)
    known = measure_infos() | {info.name: info for info in (*DISTANCES, NAMED)}
    return known.get(name) or MeasureInfo(name, meaning="", formula="")


def measure_sources() -> dict[str, Source]:
    """Return the source of every measure and curve; its name may not show it (`ksvd.rank90` is read from tokens)."""
    return {info.name: each.source for each in every_analyzer() for info in each.measures}


@cache
def _load() -> None:
    """Import the built-in analyzers and those that other packages offer as entry points, once per process."""
    import_module("attnlens.analyzers")
    for entry in metadata.entry_points(group="attnlens.analyzers"):
        entry.load()
