"""Registration and look-up of analyzers, their interface, and the metadata of measures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import cleandoc
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar, runtime_checkable

from attnlens.arguments import checked_name, load_plugins, refuse_replacing
from attnlens.choices import CHANGE, Sources
from attnlens.errors import UsageError
from attnlens.lazy import LazyModule

if TYPE_CHECKING:
    import torch as torch
    from jaxtyping import Float
    from torch import Tensor

    from attnlens.maths import linalg as linalg
    from attnlens.records import Measure, QueryKey, Selection, Site, Source

    Readings = dict[str, Float[Tensor, "*batch heads"] | Float[Tensor, "*batch heads steps"]]
    """Measures and curves, keyed by qualified name; NaN marks a missing value."""
else:  # analyzers import both names, and importing the registry must not load torch
    torch, linalg = LazyModule("torch"), LazyModule("attnlens.maths.linalg")
    Readings = dict

Function = TypeVar("Function", bound=Callable[..., object])
NOT_IDENTIFIED = "Not identified: other queries and keys with the same attention give different values."
NULLS = {  # meaning of a null's value, by kind of null
    "factors": "the value expected by chance (random W_Q, W_K of the same shape)",
    "rotations": "the value expected by chance (the head randomly rotated)",
}
NULL_DRAWS = {"factors": 64, "rotations": 8}
"""Number of random heads per null distribution. With 64, the standard errors are 1/8 sd (mean) and 9 % (sd)."""


@dataclass(frozen=True)
class MeasureInfo:
    """Description of a measure: name, meaning, range, null distribution, and the reason why a value can be missing."""

    name: str  #: Name qualified by source: `weights.symmetry`
    meaning: str  #: Meaning in one line of plain words
    formula: str  #: Formula in the notation of the docstrings
    low: float | None = None  #: Smallest possible value; None: unbounded
    high: float | None = None  #: Largest possible value; None: unbounded
    scale: tuple[str, str] = ("", "")  #: Meaning of a low and of a high value, in plain words
    curve: bool = False  #: True for a curve (one number per step), False for a scalar
    self_only: bool = True  #: True if queries and keys must share a domain, so that cross-attention has no value
    labels: tuple[str, ...] = ()  #: Names of the categories 0, 1, … if the value is a category
    missing: str = "not a number"  #: Reason for a missing value if the analyzer returns NaN, as a clause
    grows_with_factors: bool = False  #: True if proportional to ‖W_Q‖‖W_K‖; the null is rescaled to the head's norms
    has_null: bool = True  #: For weights.* scalars: True if the null of independent Gaussian factors is computed
    null: Literal["factors", "rotations"] = "factors"  #: Null: random independent factors, or M randomly rotated
    steps: str = "index"  #: Unit of a curve's steps on the axis of its plot: `index`, `distance in tokens`
    headline: bool = False  #: True if the measure comes first in tables and in the overview
    identified: Literal["everywhere", "all pairs", "nowhere"] = "everywhere"
    """Heads whose attention determines the measure. everywhere: all heads. all pairs: heads that see all pairs; other
    heads have no value. nowhere: none, because queries and keys with the same attention can have different values."""
    wholes: tuple[str, ...] = ()  #: Names of the totals to which the measure belongs; parts of a total sum to 1
    by_depth: bool = False  #: True if a curve is plotted separately for the first, middle and last third of the layers
    ends: Literal["", "largest", "both"] = ""  #: Extreme heads to list: `largest` values, or `both` ends; empty: none
    beside: str = ""  #: Name of the measure with the value under uniform attention, if needed to interpret this one
    matrix: str = ""  #: Matrix that a measure describes, shown in plots of curves: `M`
    series: int = 0  #: Rank from 1 among the measures shown for a series of checkpoints; 0: listed last
    space: str = ""  #: Space in which the measure is defined, if there are several; tables and plots group by space
    use: str = ""  #: Advice on using the result, in a sentence or two
    paper: str = ""  #: Publication with the equation or figure; empty if unpublished
    sized_by: str = ""
    """Quantity that affects the value (such as `head_dim`), so that only models in which it is equal are comparable.
    The length of the windows, which affects all tokens.* measures, is not listed."""

    @property
    def caution(self) -> str:
        """Caveat for a measure that is not identified in all heads; empty for other measures."""
        if self.identified == "all pairs":
            return "Identified for heads that see all pairs; other heads have no value."
        return "" if self.identified == "everywhere" else NOT_IDENTIFIED


OWN_ROWS, ROWS, FORMS = "compare.own_kl", "compare.row_kl", "compare.form_change"
QUERY_ANGLE, KEY_ANGLE = "compare.query_angle", "compare.key_angle"
distance = partial(MeasureInfo, low=0, self_only=False, has_null=False, missing="one of the models has no value")
BETWEEN_ROWS = (  # distances between the models' attention rows on the same windows
    distance(
        OWN_ROWS,
        "change in attention due to the block alone: the second model's block runs on the first model's hidden states",
        "KL(P ‖ P') = Σ p log(p/p'), mean over queries, both on the same states; weights below 1e-12 count as 1e-12",
        headline=True,
        use="Read this measure first: a head with a significant value changed independently of earlier blocks.",
    ),
    distance(
        ROWS,
        "change in attention as both models run, including the effect of earlier blocks",
        "KL(P ‖ P') = Σ p log(p/p'), mean over queries; weights below 1e-12 count as 1e-12",
        headline=True,
        use="If it is significant for a head, but compare.own_kl is not, the cause is in an earlier layer.",
    ),
)
BETWEEN_FORMS = (  # distances between the weights
    distance(
        FORMS,
        "relative change in the form M; under RoPE, M at equal positions",
        "‖M' − M‖_F/‖M‖_F",
        missing="M is 0 in both models, or unreadable in one of them",
        headline=True,
        use="If it is large, but compare.own_kl is not significant, the weights changed without effect on this text.",
    ),
    *(
        distance(
            name,
            f"rotation of the subspace that the {readers} read, in degrees; independent of the head's basis",
            f"largest principal angle between the column spaces of {matrix} and {matrix}'",
            high=90,
            use=f"Near 90, the {readers} no longer read one of the original directions; near 0 with a large "
            "compare.form_change, they read the same directions with different weights.",
        )
        for name, readers, matrix in ((QUERY_ANGLE, "queries", "W_Q"), (KEY_ANGLE, "keys", "W_K"))
    ),
)
DISTANCES = (*BETWEEN_ROWS, *BETWEEN_FORMS)  # each is 0 between equal heads
NAMED = distance(  # shown on pages and usable in rules, like the changes
    "compare.named",
    "number of the head's significant changes",
    "#{q ≤ the false-discovery rate}, q adjusted over all comparisons",
    missing="not a number",
)


@dataclass(frozen=True)
class Named:
    """Base class with the fields that all analyzers share."""

    name: str  # name on the command line
    source: Source  # source that the analyzer reads: weights or tokens
    question: str  # question that the analyzer answers: the first line of the function's docstring
    measures: tuple[MeasureInfo, ...]  # scalars and curves that the analyzer returns
    definitions: str = field(default="", kw_only=True)  # rest of the docstring: symbols, assumptions, omissions
    by_default: bool = field(default=True, kw_only=True)  # True if the analyzer runs when the user selects none


@dataclass(frozen=True)
class Analyzer(Named):
    """Analyzer that answers one question about a QueryKey with a pure function."""

    function: Callable[[QueryKey], Readings]  # function that computes the measures
    needs_base: bool = False  # True if it compares a site with and without an adapter (for models with adapters)
    brief: tuple[str, Callable[[QueryKey], Readings]] | None = None  # the measure that sweeps compute, and its function

    def read(self, query_key: QueryKey) -> Readings:
        """Compute the measures; raise UsageError if one is undeclared or has a wrong type or shape."""
        readings = self.function(query_key)
        remedy = "Return {measure: tensor of shape (…, heads)}; for a curve, the shape is (…, heads, steps)."
        if not isinstance(readings, dict):
            raise UsageError(f"The analyzer {self.name} returns {type(readings).__name__} instead of a dict.", remedy)
        curves, heads = {info.name: info.curve for info in self.measures}, tuple(query_key.query.shape[:-2])
        for name, reading in readings.items():
            if name not in curves:
                problem = f"returns {name!r}, but declares only {', '.join(curves)}"
            elif not isinstance(reading, torch.Tensor):
                problem = f"returns {name} as {type(reading).__name__} instead of a tensor"
            elif tuple(reading.shape[:-1] if curves[name] else reading.shape) != heads:
                expected = f"{heads} and an axis of steps" if curves[name] else heads
                problem = f"returns {name} of shape {tuple(reading.shape)}; expected {expected}"
            else:
                continue
            raise UsageError(f"The analyzer {self.name} {problem}.", remedy)
        return readings


@dataclass(frozen=True)
class GatheringPlace:
    """Site and settings of a gatherer."""

    site: Site  # site that the gatherer reads
    form: QueryKey | str = "M on the module's inputs is not known"
    """The heads' forms M on the module's inputs x extended by a 1, with factors [W_Q; b_Q] and [W_K; b_K]. If the
    logits are not bilinear in x (RoPE, QK-norm, cross-attention), `form` is a string with the reason."""
    seed: int = 0  # random seed
    top_p: float | None = None  # a query selects the fewest tokens with at least this total weight; None: one token
    shown: bool = False  # True if the report must also contain the selection problem (`Answer.shown`)


@dataclass(frozen=True)
class Answer:
    """Results of a gatherer for one head."""

    measures: dict[str, Measure]  # by qualified name; each has a value, or the reason why the value is missing
    windows: dict[str, dict[int, float]] = field(default_factory=dict)  # by measure and sequence; values to average
    curves: dict[str, list[float]] = field(default_factory=dict)  # by qualified name; only curves with a value
    shown: Selection | None = (
        None  # the selection problem, if the report must contain it; its `sentences` are added later
    )


@runtime_checkable
class Gatherer(Protocol):
    """Object that accumulates the sequences of a site to answer one question."""

    def update(self, query_key: QueryKey, sequence: int) -> None:
        """Add the queries and keys of one sequence, without padding and with one batch axis of length 1.

        `sequence` is the index of the sequence among all sequences read. `query_key` contains only requested heads
        whose queries and keys are finite in this sequence.
        """

    def solve(self) -> dict[int, Answer]:
        """Return answers for the heads that `update` received, keyed by head number within the layer."""


@dataclass(frozen=True)
class Gathering(Named):
    """Analyzer that answers one question about each head from several sequences, which a Gatherer accumulates."""

    begin: Callable[[GatheringPlace], Gatherer]  # function that creates the gatherer of one site
    needs_inputs: bool = False  # True if the gatherer needs the modules' inputs and the form M on them


_ANALYZERS: dict[tuple[str, Source], Analyzer | Gathering] = {}
"""Registered analyzers, keyed by (name, source); importing `attnlens.analyzers` registers the built-in analyzers."""


def analyzer(
    name: str,
    source: Source,
    measures: Iterable[MeasureInfo],
    *,
    kind: Callable[..., Analyzer | Gathering] = Analyzer,
    replace: bool = False,
    **facts: object,
) -> Callable[[Function], Function]:
    """Register a function QueryKey → Readings as the analyzer `name`; its docstring's first line is the question.

    `kind` is the class to create; `facts` are its other fields: `by_default=False` for an analyzer that runs only on
    request; `needs_base` for an analyzer that compares a model with and without its adapter; `brief`, the measure that
    sweeps compute and its function. Raises UsageError if an analyzer of another package or file already has one of the
    measures or, unless `replace` is true, the same name and source.
    """
    infos = tuple(measures)

    def register(function: Function) -> Function:
        question, _, definitions = cleandoc(function.__doc__ or name).partition("\n")
        for key, present in _ANALYZERS.items():
            owner = present.begin if isinstance(present, Gathering) else present.function
            if key != (name, source):
                for measure in sorted({info.name for info in infos} & {info.name for info in present.measures}):
                    refuse_replacing("measure", measure, function, owner, "Choose another name.")
            elif not replace:
                refuse_replacing("analyzer", name, function, owner)
        text = definitions.strip()
        _ANALYZERS[name, source] = kind(name, source, question, infos, function, definitions=text, **facts)
        return function

    return register


gathering = partial(analyzer, kind=Gathering)
"""Register, like `analyzer`, a function GatheringPlace → Gatherer that answers a question from several sequences.

Pass `needs_inputs=True` if the gatherer needs the modules' inputs.
"""


def list_analyzers() -> list[Analyzer | Gathering]:
    """Return all analyzers, including those of other packages; gatherings come last."""
    load_plugins("attnlens.analyzers")
    return sorted(_ANALYZERS.values(), key=lambda entry: isinstance(entry, Gathering))


def select_analyzers(names: Iterable[str] = (), source: Sources = "both") -> list[Analyzer | Gathering]:
    """Return the named analyzers (default: those with `by_default`) that read `source`; gatherings come last.

    Raises UsageError for an unknown name.
    """
    available = list_analyzers()
    known = list(dict.fromkeys(entry.name for entry in available))
    named = [checked_name("analyzer", name, known) for name in names]
    chosen = named or [entry.name for entry in available if entry.by_default]
    return [entry for entry in available if entry.name in chosen and source in ("both", entry.source)]


def select_sweep_analyzers() -> list[Analyzer]:
    """Return the analyzers that sweeps run: those with `brief`, each reduced to that measure, and other defaults.

    Gatherings are left out.
    """
    selected = []
    for entry in _plain_analyzers():
        if entry.brief is not None:
            name, function = entry.brief
            infos = tuple(info for info in entry.measures if info.name == name)
            selected.append(replace(entry, function=function, measures=infos))
        elif entry.by_default:
            selected.append(entry)
    return selected


def select_adapter_analyzers(source: Sources) -> list[Analyzer]:
    """Return the analyzers that read `source` and compare a model with and without its adapter."""
    return [entry for entry in _plain_analyzers() if entry.needs_base and source in ("both", entry.source)]


def _plain_analyzers() -> list[Analyzer]:
    return [entry for entry in list_analyzers() if isinstance(entry, Analyzer)]


def measure_infos() -> dict[str, MeasureInfo]:
    """Return the MeasureInfo of every measure and curve, keyed by qualified name."""
    return {info.name: info for entry in list_analyzers() for info in entry.measures}


def measure_sources() -> dict[str, Source]:
    """Return the source of every measure and curve, keyed by qualified name."""
    return {info.name: entry.source for entry in list_analyzers() for info in entry.measures}


def find_measure(name: str) -> MeasureInfo:
    """Return the MeasureInfo of a measure, curve, distance or change; its texts are empty if the name is unknown."""
    if name.startswith(CHANGE):
        measure = find_measure(name.removeprefix(CHANGE))
        meaning = f"second − first: {measure.meaning}" if measure.meaning else ""
        return MeasureInfo(name, meaning=meaning, formula=measure.formula)
    known = measure_infos() | {info.name: info for info in (*DISTANCES, NAMED)}
    return known.get(name) or MeasureInfo(name, meaning="", formula="")
