"""Ties of queries and keys, and filters of the visible keys, that combine with any kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attnlens.kernels.registry import MODIFIERS, Fit, KernelParameter, torch

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Shaped
    from torch import Tensor

    from attnlens.kernels.registry import Pairs
    from attnlens.records import Call


def _positive(core: Pairs) -> Pairs:
    """Compute Σ μ₊uuᵀ of the symmetric part of JLJ; NaN if JLJ is not finite, for which LAPACK would raise."""
    return positive_part((core + core.mT) / 2) if bool(core.isfinite().all()) else core * torch.nan


def positive_part(form: Pairs) -> Pairs:
    """Compute [X]₊ of a symmetric X: its negative eigenvalues are set to 0.

    The result has no usable gradient if several eigenvalues are equal, as they are at 0 if X has a small rank.
    """
    values, vectors = torch.linalg.eigh(form)
    positive: Tensor = (vectors * values.clamp_min(0)[..., None, :]) @ vectors.mT
    return positive


def _split_identified(log_k: Pairs) -> tuple[Pairs, Float[Tensor, "*batch 1 n"]]:
    """Split L into JLJ and c; LJ = JLJ + 1cᵀ is all of L that softmax sees (maths in `linalg.anatomy`)."""
    seen = log_k - log_k.mean(-1, keepdim=True)
    key = seen.mean(-2, keepdim=True)
    return seen - key, key


@dataclass(frozen=True)
class Modifier:
    """A tie, a filter or a hybrid, as shown by `attnlens list kernels`."""

    name: str  # on the command line
    formula: str  # effect on log k, or the condition for a query i to keep a key j
    meaning: str  # effect in plain words
    source: str  # paper that defines it
    parameters: tuple[KernelParameter, ...] = ()
    keeps: Callable[..., Bool[Tensor, "*shape"]] | None = None
    """Filters: maps (query positions, key positions, **parameters) to which keys are kept, with broadcasting."""
    reach: Callable[..., int] | None = None  # filters: largest |i − j| of a kept key, in tokens; None for any distance
    from_start: bool = False
    """Filters: whether positions count from the start of the text, and not only relative to each other."""
    part: Callable[[Pairs], Pairs] | None = None
    """Ties of whole sequences: maps log k of all pairs of tokens to the part kept, up to query-only terms."""
    caution: str = ""  # warning for readers of its numbers, one sentence


@dataclass(frozen=True)
class KeyFilter:
    """A filter with its parameters: the set M(x_q, S) of Tsai et al. 2019, section 2.2.4."""

    modifier: Modifier
    parameters: Mapping[str, int]

    def keeps(self, queries: Int[Tensor, "*batch q"], keys: Int[Tensor, "*batch k"]) -> Bool[Tensor, "*batch q k"]:
        """Return which keys at positions `keys` a query at `queries` keeps; causality is left to the mask."""
        assert self.modifier.keeps is not None  # noqa: S101  # a tie is not a filter
        return self.modifier.keeps(queries[..., None], keys[..., None, :], **self.parameters)

    @property
    def reach(self) -> int | None:
        """Largest |i − j| of a kept key, in tokens; None if keys at any distance may be kept."""
        return self.modifier.reach(**self.parameters) if self.modifier.reach is not None else None


def _whole(name: str, formula: str, meaning: str, source: str, combine: Callable[[Pairs, Tensor], Pairs]) -> Modifier:
    """Build a tie of whole sequences of bidirectional heads; `combine` maps JLJ and c to the part that is kept."""
    return Modifier(
        name,
        formula,
        f"{meaning}; bidirectional heads",
        source,
        part=lambda log_k: combine(*_split_identified(log_k)),
        caution="For analysis: it decomposes whole matrices of log k, in O(T²) memory.",
    )


def _by_name(*modifiers: Modifier) -> dict[str, Modifier]:
    return {modifier.name: modifier for modifier in modifiers}


PARTS = "Schoenberg 1938; Wright & Gonzalez 2021"
TIES = _by_name(
    Modifier(
        "symmetric",
        "(log k(q_i, k_j) + log k(q_j, k_i)) / 2",
        "the mean of log k and its transpose",
        "Tsai T.2",
        caution="Averaging log k and its transpose also halves the gate on keys, so its cost is not the cost of "
        "asymmetry alone; skewless measures that in bidirectional heads.",
    ),
    Modifier("tied-query", "log k(q_i, q_j)", "W_K = W_Q: keys are replaced by queries", "Tsai T.2"),
    Modifier("tied-key", "log k(k_i, k_j)", "W_Q = W_K: queries are replaced by keys", "Tsai T.2"),
    _whole(
        "skewless",
        "L − JAJ, L = log k of a sequence's n tokens, J = I − 11ᵀ/n, A = (L − Lᵀ)/2",
        "removes the asymmetry that no gate on queries or keys removes; keeps the gates",
        PARTS,
        lambda core, key: (core + core.mT) / 2 + key,
    ),
    _whole(
        "negativeless",
        "L − Σ μ₋uuᵀ, μ and u of JSJ, S = (L + Lᵀ)/2",
        "removes the negative part of the symmetric kernel; keeps skew part and gates",
        PARTS,
        lambda core, key: _positive(core) + (core - core.mT) / 2 + key,
    ),
    _whole(
        "mercer",
        "Σ μ₊uuᵀ + 1cᵀ, μ and u of JSJ, S = (L + Lᵀ)/2, c the centred column means of L",
        "the positive definite (Mercer) part of log k times the key gate",
        PARTS,
        lambda core, key: _positive(core) + key,
    ),
    _whole(
        "keyless",
        "L − 1cᵀ, c the centred column means of L",
        "removes the key gate: no key is favoured by all queries",
        "attnlens",
        lambda core, key: core,
    ),
)
"""Ties of queries and keys, for self-attention only."""

WIDTH = KernelParameter("width", "tokens on each side, itself included", int, low=1, high=2**31)
FILTERS = _by_name(
    Modifier(
        "window",
        "|i − j| < w",
        "the w nearest tokens, itself included",
        "Tsai 2.2.4; Beltagy 2020",
        (WIDTH,),
        lambda i, j, width: (i - j).abs() < width,
        lambda width: width - 1,
    ),
    Modifier(
        "sink-window",
        "j < sinks or |i − j| < w",
        "the first tokens and the w nearest",
        "Xiao et al. 2024",
        (replace(WIDTH, name="sinks", meaning="first tokens, visible to all"), WIDTH),
        lambda i, j, sinks, width: (j < sinks) | ((i - j).abs() < width),
        from_start=True,
    ),
    Modifier(
        "strided",
        "|i − j| < s or (i − j) mod s = 0",
        "the s nearest tokens and every s-th of the others",
        "Child et al. 2019; Tsai 2.2.4",
        (replace(WIDTH, name="stride", meaning="distance between kept tokens"),),
        lambda i, j, stride: ((i - j).abs() < stride) | ((i - j) % stride == 0),
    ),
)
"""Filters: which keys a query keeps, by position."""


LOLCATS = "Zhang et al. 2024 (LoLCATs)"
HYBRIDS = _by_name(
    *(
        replace(
            window,
            name=name,
            formula="a_ij ∝ γ·exp(s⟨q_i, k_j⟩ − max over near j' of s⟨q_i, k_j'⟩) "
            f"where {window.formula}, φ(q_i)φ(k_j) elsewhere",
            meaning=f"the model's own kernel among {window.meaning}, a kernel of positive features beyond them",
            source=source,
            caution="γ, one number per head, is 1 unless fitted or healed. If no key is beyond the window, the head is "
            "unchanged.",
        )
        for name, window, source in (
            ("hybrid", FILTERS["window"], LOLCATS),
            ("sink-hybrid", FILTERS["sink-window"], f"{LOLCATS}; Xiao et al. 2024"),
        )
    )
)
"""Hybrids: near keys, which a filter keeps, have the model's own kernel, and all other keys a kernel of features."""
MODIFIERS.update(TIES, FILTERS, HYBRIDS)

NEAR_WEIGHT = "near_log_weight"  # name of log γ, (heads,), among the fitted parameters of a hybrid


class NearFit:
    """A hybrid's fit: log γ, initially 0, together with the parameters that the fit of its far part chooses."""

    def __init__(self, far: Fit | None) -> None:
        self.far = far
        typed = {} if far is None else far.typed
        self.typed = {} if far is not None and not typed else {NEAR_WEIGHT: 0.0} | typed
        self.heads = 0

    def update(self, call: Call) -> None:
        """Add a batch."""
        self.heads = call.query.shape[1]
        if self.far is not None:
            self.far.update(call)

    def solve(self) -> dict[str, Shaped[Tensor, "heads ..."]]:
        """Return the parameters of the far part, and `near_log_weight`."""
        parameters = {} if self.far is None else self.far.solve()
        device = next(iter(parameters.values())).device if parameters else None
        return parameters | {NEAR_WEIGHT: torch.zeros(self.heads, device=device)}
