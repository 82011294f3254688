"""Registry of kernels, ties, filters and hybrids, and the interfaces of kernels and their fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from attnlens.arguments import load_plugins, refuse_replacing
from attnlens.errors import UsageError
from attnlens.lazy import LazyModule

if TYPE_CHECKING:
    import torch as torch
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from attnlens.records import Call

    Query = Float[Tensor, "batch heads queries head_dim"]
    Key = Float[Tensor, "batch heads keys head_dim"]
    Tokens = Float[Tensor, "batch heads tokens head_dim"]
    Matrix = Float[Tensor, "batch heads queries keys"]
    Pairs = Float[Tensor, "*batch n n"]
else:
    torch = LazyModule("torch")


@dataclass(frozen=True)
class KernelParameter:
    """Numeric parameter of a kernel, as in `rbf:gamma=1`."""

    name: str  # name in the spelling of the kernel
    meaning: str  # meaning in one line
    kind: type[int] | type[float]  # int if only whole numbers are allowed
    default: float | None = None  # value if none is typed; None: the parameter is required
    low: float | None = None  # smallest allowed value
    above: float | None = None  # exclusive lower bound
    high: float | None = None  # largest allowed value, to catch typos that would need too much memory
    even: bool = False  # True if odd values make the kernel negative somewhere (refused unless allow_signed)
    multiple_of: int = 1  # allowed whole numbers are multiples of this number
    words: tuple[tuple[str, float], ...] = ()  # values typed as words; without `high`, no other values are allowed
    shown_at_default: bool = True  # True if the kernel's spelling includes the parameter at its default


def choice(name: str, meaning: str, words: Sequence[str], default: int | None = None) -> KernelParameter:
    """Build a parameter whose values are typed as words and stored as indices into `words`."""
    values = tuple((word, index) for index, word in enumerate(words))
    return KernelParameter(name, meaning, int, default, words=values, shown_at_default=default is None)


@dataclass(frozen=True)
class KernelInfo:
    """Description of a kernel k; attention is softmax(log k(q, k) + bias, over the allowed keys) v."""

    name: str  # name on the command line
    formula: str  # formula of log k(q, k), where s is the scale; `output = …` for the form "output"
    meaning: str  # first line of the function's docstring
    source: str  # paper that defines the kernel
    positive: bool  # True if k ≥ 0 everywhere, so that rows of the attention matrix are probabilities
    symmetric: bool  # True if k(x, y) = k(y, x) for equal projections of queries and keys
    features: Literal["finite", "infinite", "none"]  # number of features in k = ⟨φ(q), φ(k)⟩; none: no known φ
    form: Literal["score", "pair", "features", "output"]
    """Arguments of `function`. score: s⟨q, k⟩, or the score computed from `dot`; pair: queries and keys; features:
    queries or keys; output: the features of queries and of keys (the output is then not a sum over keys)."""
    function: Callable[..., Tensor]
    """score: (score, **parameters) → log|k|; pair: (query, key, scale, **parameters) → log k; features: (x, scale,
    "query" or "key", **parameters) → φ; output: (φ(q), φ(k), **parameters) → output."""
    parameters: tuple[KernelParameter, ...] = ()
    sign: Callable[..., Tensor] | None = None  # score: (score, **parameters) → sign of k, if it can be negative
    dot: Callable[..., tuple[Tensor, Tensor, float]] | None = None
    """(query, key, scale, **parameters) → (q', k', s'). For the form score, s'⟨q', k'⟩ is the argument of `function`;
    for pair, s'⟨q', k'⟩ equals log k up to terms that softmax cancels."""
    prepare: Callable[..., Call | None] | None = None
    """(call, **parameters, **fitted) → call whose exponential kernel equals this kernel, or None if `dot` suffices."""
    phi: Callable[..., Tensor] | None = None
    """score: (x, scale, side, **parameters) → φ with ⟨φ(q), φ(k)⟩ = k (of any sign); None if no finite φ is known."""
    fused: str = "row tiles"  # fastest exact method of computation
    hard: bool = False  # True if all weight goes to the largest score
    fit: Callable[..., Fit] | None = None  # (**parameters) → fit of the free parameters per head; None if there is none
    fit_reads: bool = True  # True if the fit reads queries and keys; False if it reads only their shapes
    trainable: tuple[str, ...] = ()  # fitted parameters that healing can train further
    equal_lengths: str = ""  # equivalent kernel if all keys of a head have equal length; empty if there is none
    reads: bool = True  # True if the kernel depends on queries and keys at all
    needs_fit: bool = False  # True if the kernel is undefined without a fit to calibration text (rank)
    caution: str = ""  # caveat for readers of the kernel's results, in one sentence
    oracle: Callable[..., str | None] | None = None
    """(**parameters) → name of the tie that replaces this kernel (to analyse a text's own logits), or None."""

    @property
    def built_in(self) -> bool:
        """True for a kernel of attnlens, False for a kernel registered by other code."""
        return self.function.__module__.startswith("attnlens.")

    @property
    def feature_map(self) -> Callable[..., Tensor] | None:
        """Feature map (x, scale, side, **parameters) → φ for running sums, k = ⟨φ(q), φ(k)⟩; None if there is none."""
        return self.function if self.form == "features" else self.phi


@runtime_checkable
class Fit(Protocol):
    """Fit that chooses a kernel's free parameters per head, in closed form, from the model's attention calls."""

    typed: dict[str, float]  # value of each parameter before the fit; empty if the kernel is undefined without a fit

    def update(self, call: Call) -> None:
        """Add the queries, keys and values of one batch to the fit."""

    def solve(self) -> dict[str, Tensor]:
        """Return the fitted parameters, each (heads, …), keyed by keyword arguments of the kernel's function."""


PAIR: dict[str, Any] = {"positive": True, "symmetric": True, "features": "infinite", "form": "pair"}
SCORE = {**PAIR, "form": "score"}  # PAIR, SCORE: fields shared by most kernels of pairs (query, key) and of scores
KERNELS: dict[str, KernelInfo] = {}  # registered kernels by name; importing the package registers the built-in kernels


def kernels() -> dict[str, KernelInfo]:
    """Return all kernels keyed by name, in order of registration: built-in kernels, then those of other packages."""
    load_plugins("attnlens.kernels")
    return dict(KERNELS)


def kernel(
    name: str, *, replace: bool = False, **facts: object
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Register a function as the kernel `name`; `facts` are the other fields of KernelInfo.

    Raises UsageError if the name belongs to a tie, filter or hybrid or, unless `replace` is true, to another kernel.
    """

    def register(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        if name in (*TIES, *FILTERS, *HYBRIDS):
            raise UsageError(f"The name {name!r} is taken by a tie, filter or hybrid.", "Choose another name.")
        if name in KERNELS and not replace:
            refuse_replacing("kernel", name, function, KERNELS[name].function)
        build: Callable[..., KernelInfo] = KernelInfo
        KERNELS[name] = build(name, meaning=(function.__doc__ or name).splitlines()[0], function=function, **facts)
        return function

    return register


def _positive(core: Pairs) -> Pairs:
    """Return the positive part of the symmetric part of `core`; NaN if `core` is not finite."""
    return positive_part((core + core.mT) / 2) if bool(core.isfinite().all()) else core * torch.nan


def positive_part(form: Pairs) -> Pairs:
    """Set negative eigenvalues of the symmetric `form` to 0. The result has no gradient if eigenvalues are equal."""
    values, vectors = torch.linalg.eigh(form)
    positive: Tensor = (vectors * values.clamp_min(0)[..., None, :]) @ vectors.mT
    return positive


@dataclass(frozen=True)
class Modifier:
    """A tie, a filter or a hybrid, as shown by `attnlens list kernels`."""

    name: str  # name on the command line
    formula: str  # effect on log k, or the condition for a query i to keep a key j
    meaning: str  # effect in plain words
    source: str  # paper that defines the modifier
    parameters: tuple[KernelParameter, ...] = ()
    keeps: Callable[..., Bool[Tensor, "*shape"]] | None = None
    """Filters: (query positions, key positions, **parameters) → True for kept keys; the positions broadcast."""
    reach: Callable[..., int] | None = None  # filters: largest |i − j| of a kept key, in tokens; None for any distance
    from_start: bool = False  # filters: True if positions count from the start of the text
    part: Callable[[Pairs], Pairs] | None = None
    """Ties that need whole sequences: log k → the part that is kept, up to query-only terms."""
    caution: str = ""  # caveat for readers of the modifier's results


@dataclass(frozen=True)
class KeyFilter:
    """A filter or hybrid with its parameters; the kept keys are the set M(x_q, S) of Tsai et al. 2019, sec. 2.2.4."""

    modifier: Modifier
    parameters: Mapping[str, int]

    def keeps(self, queries: Int[Tensor, "*batch q"], keys: Int[Tensor, "*batch k"]) -> Bool[Tensor, "*batch q k"]:
        """Return True for each pair of query and key positions that the filter keeps, regardless of causality."""
        assert self.modifier.keeps is not None  # noqa: S101  # a tie is not a filter
        return self.modifier.keeps(queries[..., None], keys[..., None, :], **self.parameters)

    @property
    def reach(self) -> int | None:
        """Largest |i − j| of a kept key, in tokens; None if keys at any distance may be kept."""
        return self.modifier.reach(**self.parameters) if self.modifier.reach is not None else None


def _build_sequence_tie(
    name: str, formula: str, meaning: str, source: str, combine: Callable[[Pairs, Tensor], Pairs]
) -> Modifier:
    """Build a tie that needs whole sequences: `combine` maps JLJ and c to the kept part of LJ = JLJ + 1cᵀ.

    L is log k of a sequence's n tokens, J is I − 11ᵀ/n, and c contains the column means of LJ.
    """

    def part(log_k: Pairs) -> Pairs:
        seen = log_k - log_k.mean(-1, keepdim=True)
        key = seen.mean(-2, keepdim=True)
        return combine(seen - key, key)

    caution = "For analysis only: whole matrices of log k are decomposed, in O(T²) memory."
    return Modifier(name, formula, f"{meaning}; bidirectional heads", source, part=part, caution=caution)


def _by_name(*modifiers: Modifier) -> dict[str, Modifier]:
    return {modifier.name: modifier for modifier in modifiers}


PARTS = "Schoenberg 1938; Wright & Gonzalez 2021"
TIES = _by_name(  # ties of queries and keys, for self-attention only
    Modifier(
        "symmetric",
        "(log k(q_i, k_j) + log k(q_j, k_i)) / 2",
        "the mean of log k and its transpose",
        "Tsai T.2",
        caution="Averaging log k and its transpose also halves the gate on keys, so the cost is not only that of "
        "asymmetry. In bidirectional heads, skewless measures the cost of asymmetry alone.",
    ),
    Modifier("tied-query", "log k(q_i, q_j)", "W_K = W_Q: keys are replaced by queries", "Tsai T.2"),
    Modifier("tied-key", "log k(k_i, k_j)", "W_Q = W_K: queries are replaced by keys", "Tsai T.2"),
    _build_sequence_tie(
        "skewless",
        "L − JAJ, L = log k of a sequence's n tokens, J = I − 11ᵀ/n, A = (L − Lᵀ)/2",
        "removes the asymmetry that is not due to gates on queries or keys; keeps the gates",
        PARTS,
        lambda core, key: (core + core.mT) / 2 + key,
    ),
    _build_sequence_tie(
        "negativeless",
        "L − Σ μ₋uuᵀ, μ and u of JSJ, S = (L + Lᵀ)/2",
        "removes the negative part of the symmetric kernel; keeps skew part and gates",
        PARTS,
        lambda core, key: _positive(core) + (core - core.mT) / 2 + key,
    ),
    _build_sequence_tie(
        "mercer",
        "Σ μ₊uuᵀ + 1cᵀ, μ and u of JSJ, S = (L + Lᵀ)/2, c the centred column means of L",
        "the positive definite (Mercer) part of log k plus the key gate",
        PARTS,
        lambda core, key: _positive(core) + key,
    ),
    _build_sequence_tie(
        "keyless",
        "L − 1cᵀ, c the centred column means of L",
        "removes the key gate: no key is favoured by all queries",
        "attnlens",
        lambda core, key: core,
    ),
)

WIDTH = KernelParameter("width", "number of tokens on each side, including the token itself", int, low=1, high=2**31)
FILTERS = _by_name(  # filters, which select by position the keys that a query keeps
    Modifier(
        "window",
        "|i − j| < width",
        "the `width` nearest tokens, including the token itself",
        "Tsai 2.2.4; Beltagy 2020",
        (WIDTH,),
        lambda i, j, width: (i - j).abs() < width,
        lambda width: width - 1,
    ),
    Modifier(
        "sink-window",
        "j < sinks or |i − j| < width",
        "the first `sinks` tokens and the `width` nearest",
        "Xiao et al. 2024",
        (replace(WIDTH, name="sinks", meaning="number of first tokens, which all tokens see"), WIDTH),
        lambda i, j, sinks, width: (j < sinks) | ((i - j).abs() < width),
        from_start=True,
    ),
    Modifier(
        "strided",
        "|i − j| < stride or (i − j) mod stride = 0",
        "the `stride` nearest tokens, and every `stride`-th of the others",
        "Child et al. 2019; Tsai 2.2.4",
        (replace(WIDTH, name="stride", meaning="distance between kept tokens"),),
        lambda i, j, stride: ((i - j).abs() < stride) | ((i - j) % stride == 0),
    ),
)
LOLCATS = "Zhang et al. 2024 (LoLCATs)"
HYBRIDS = {  # keys that a filter keeps use the model's own kernel; all other keys use a kernel of features
    name: replace(
        window,
        name=name,
        formula="a_ij ∝ γ·exp(s⟨q_i, k_j⟩ − max over near j' of s⟨q_i, k_j'⟩) "
        f"where {window.formula}, φ(q_i)φ(k_j) elsewhere",
        meaning=f"the model's own kernel for {window.meaning}; a kernel of positive features for other keys",
        source=source,
        caution="γ, one number per head, is 1 unless healed. If no key is beyond the window, the head is unchanged.",
    )
    for name, window, source in (
        ("hybrid", FILTERS["window"], LOLCATS),
        ("sink-hybrid", FILTERS["sink-window"], f"{LOLCATS}; Xiao et al. 2024"),
    )
}

NEAR_WEIGHT = "near_log_weight"  # name of log γ, (heads,), among the fitted parameters of a hybrid
