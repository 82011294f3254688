"""Register kernels by a decorator; define their interface, their parameters and their fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from attnlens.arguments import load_plugins, refuse_replacing
from attnlens.errors import UsageError
from attnlens.lazy import LazyModule

if TYPE_CHECKING:
    import torch as torch
    from jaxtyping import Float
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

    name: str  # as typed
    meaning: str  # in one line
    kind: type[int] | type[float]  # int for a count, float for a measured quantity
    default: float | None = None  # value if none is typed; None: the parameter is required
    low: float | None = None  # smallest allowed value
    above: float | None = None  # exclusive lower bound
    high: float | None = None  # largest allowed value: a larger one is a typo, and would fill the memory or never end
    even: bool = False  # True if an odd value makes the kernel negative somewhere (refused unless these are allowed)
    multiple_of: int = 1  # factor that every value must be a multiple of, for counts
    words: tuple[tuple[str, float], ...] = ()
    """Values that are typed as words; without numeric bounds, they are the only values."""
    shown_at_default: bool = True  # True if the kernel's spelling includes the parameter at its default


def choice(name: str, meaning: str, words: Sequence[str], default: int | None = None) -> KernelParameter:
    """Build a parameter whose values are words: their indices. A default is not part of the kernel's spelling."""
    values = tuple((word, index) for index, word in enumerate(words))
    return KernelParameter(name, meaning, int, default, words=values, shown_at_default=default is None)


@dataclass(frozen=True)
class KernelInfo:
    """Attention kernel: attention = softmax(log k(q, k) + bias, over the allowed keys) v."""

    name: str  # on the command line
    formula: str  # of log k(q, k), with s the scale; for the form "output" the whole output, `output = …`
    meaning: str  # first line of the function's docstring: a description and its origin
    source: str  # paper that defines the kernel
    positive: bool  # True if k ≥ 0 everywhere, so that rows of the attention matrix stay in the simplex
    symmetric: bool  # True if k(x, y) = k(y, x) for equal projections of queries and keys
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
    fused: str = "row tiles"  # fast and exact method of computation
    hard: bool = False  # True if all weight goes to the largest score
    fit: Callable[..., Fit] | None = None
    """(**parameters) → fit of the free parameters per head on calibration text; None if the kernel lacks any."""
    fit_reads: bool = True  # True if the fit reads queries and keys; False if it reads only their shapes
    trainable: tuple[str, ...] = ()  # fitted parameters that healing can train further
    equal_lengths: str = ""  # equivalent kernel if all keys of a head have equal length; empty if there is none
    reads: bool = True  # True if the kernel depends on queries and keys at all
    needs_fit: bool = False  # True if the kernel is undefined without calibration text (rank)
    caution: str = ""  # caveat for readers of its numbers, in one sentence
    oracle: Callable[..., str | None] | None = None
    """(**parameters) → the tie of the model's own kernel that replaces it for an analysis of the evaluated text; None
    if the kernel is a model."""

    @property
    def feature_map(self) -> Callable[..., Tensor] | None:
        """Feature map (x, scale, side, **parameters) → φ for running sums, k = ⟨φ(q), φ(k)⟩; None if there is none."""
        return self.function if self.form == "features" else self.phi


@runtime_checkable
class Fit(Protocol):
    """Fit of a kernel's free parameters per head, in closed form from the calls that the model makes."""

    typed: dict[str, float]
    """Value of each parameter before the fit; empty for a kernel that is undefined without a fit."""

    def update(self, call: Call) -> None:
        """Add the queries, keys and values that the model computes for these heads in a batch."""

    def solve(self) -> dict[str, Tensor]:
        """Return the fitted parameters, each (heads, …), keyed by the keyword argument of the kernel's function."""


PAIR: dict[str, Any] = {"positive": True, "symmetric": True, "features": "infinite", "form": "pair"}
SCORE = {**PAIR, "form": "score"}  # facts that most kernels of queries and keys, and of the score, have in common
KERNELS: dict[str, KernelInfo] = {}
"""Registered kernels by name. Importing the package `attnlens.kernels` registers the built-in ones, and Python imports
it before this module: no plug-in can be first."""

MODIFIERS: set[str] = set()
"""Names of ties, filters and hybrids, which kernels can't use; attnlens.kernels.modifiers registers them."""


def kernels() -> dict[str, KernelInfo]:
    """Return every kernel by name: the built-in ones, then those of other packages, in the order of registration."""
    load_plugins("attnlens.kernels")
    return dict(KERNELS)


def kernel(
    name: str, *, replace: bool = False, **facts: Any
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Register a function as the kernel `name`; `facts` are the other fields of KernelInfo.

    `replace`: replace a kernel that another module registered under that name; otherwise that is a UsageError.
    """

    def register(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        if name in MODIFIERS:
            raise UsageError(f"{name!r} is a tie, filter or hybrid, not a kernel.", "Choose another name.")
        if name in KERNELS and not replace:
            refuse_replacing("kernel", name, function, KERNELS[name].function)
        meaning = (function.__doc__ or name).splitlines()[0]
        KERNELS[name] = KernelInfo(name=name, meaning=meaning, function=function, **facts)
        return function

    return register
