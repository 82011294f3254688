"""Registers kernels by a decorator; what a kernel is, takes and can do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from attnlens.errors import UsageError
from attnlens.registry.analysis import is_built_in, refuse_replacing

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
