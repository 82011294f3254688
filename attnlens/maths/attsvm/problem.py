"""The problem, its solution and the certificate of it, and the checks of their arguments."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from attnlens.errors import UnposedError, UsageError

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Shaped
    from torch import Tensor


def selection(
    tokens: Float[Tensor, "n tokens d"],
    queries: Float[Tensor, "n d_query"],
    chosen: Int[Tensor, " n"],
    allowed: Bool[Tensor, "n tokens"] | None = None,
    margins: Float[Tensor, " n"] | None = None,
) -> Problem:
    """(x_α − x_t)ᵀ W z ≥ b for every allowed t ≠ α: one token kept (Tarzanagh et al. 2023, Eq. Att-SVM).

    `margins` is b of each sample, 1 by default. A duplicate of the chosen token is a constraint that nothing meets.
    Raises UsageError for shapes or indices that don't fit, numbers that aren't finite, and a chosen token that is not
    allowed; UnposedError when no token is left to separate from.
    """
    tokens, queries = finite("tokens", tokens, 3), finite("queries", queries, 2)
    samples, length = tokens.shape[:2]
    seen = mask("allowed", allowed, samples, length)
    every = torch.arange(samples)
    chosen = indices("chosen tokens", chosen)
    if chosen.shape != (samples,) or queries.shape[0] != samples:
        raise UsageError(f"{samples} samples don't have one query and one chosen token each.", "Give one of each.")
    within = (chosen >= 0) & (chosen < length)
    if not within.all() or not seen[every, chosen].all():
        raise UsageError("A chosen token is none of the allowed ones.", "Choose among the tokens that the query sees.")
    rivals = seen.clone()
    rivals[every, chosen] = False
    row, rival = rivals.nonzero(as_tuple=True)
    bounds = torch.ones(samples).double() if margins is None else finite("margins", margins, 1)
    if bounds.shape != (samples,):
        raise UsageError(f"{len(bounds)} margins for {samples} samples.", "Give one margin a sample.")
    return posed(tokens[row, chosen[row]] - tokens[row, rival], queries, row, bounds[row])


def prompt(
    tokens: Float[Tensor, "n tokens d"], chosen: Int[Tensor, " n"], margins: Float[Tensor, " n"] | None = None
) -> Problem:
    """(k_α − k_t)ᵀ p ≥ b: the prompt p is W for the query 1 (Tarzanagh et al. 2023, Max-margin token selection).

    Raises what `selection` raises.
    """
    tokens = finite("tokens", tokens, 3)
    return selection(tokens, torch.ones(len(tokens), 1).double(), chosen, margins=margins)


def causal(
    tokens: Float[Tensor, "tokens d"],
    chosen: Int[Tensor, " tokens"],
    queries: Float[Tensor, "tokens d_query"] | None = None,
) -> Problem:
    """(x_{α(i)} − x_t)ᵀ W z_i ≥ 1 for every position i and t ≤ i, t ≠ α(i); z = x where no queries are given.

    Raises what `selection` raises; UnposedError for a sequence of one token.
    """
    tokens = finite("tokens", tokens, 2)
    length = len(tokens)
    sees = torch.ones(length, length, dtype=torch.bool).tril()
    return selection(tokens.expand(length, *tokens.shape), tokens if queries is None else queries, chosen, sees)


def selection_sets(
    tokens: Float[Tensor, "n tokens d"],
    queries: Float[Tensor, "n d_query"],
    sets: Bool[Tensor, "n tokens"],
    allowed: Bool[Tensor, "n tokens"] | None = None,
) -> Problem:
    """Several tokens kept: u W z = 0 inside O_i, ≥ 1 from O_i to the rest (Tarzanagh et al. 2023, Gen-SVM).

    Exact duplicates count as one token, which is kept if any of them is. Every constraint starts at one representative
    of O_i. Raises UsageError as `selection` does and for an empty O_i; UnposedError when every token is kept.
    """
    tokens, queries = finite("tokens", tokens, 3), finite("queries", queries, 2)
    seen = mask("allowed", allowed, *tokens.shape[:2])
    sets, first = merged(tokens, checked_sets(tokens, queries, sets, seen), seen)
    keeper = sets.int().argmax(-1)
    others = first.clone()
    others[torch.arange(len(tokens)), keeper] = False
    if not (others & ~sets).any():
        raise UnposedError("Every token is kept.", "Keep fewer tokens, so that there is something to separate.")
    row, other = others.nonzero(as_tuple=True)
    inside = sets[row, other]
    return posed(tokens[row, keeper[row]] - tokens[row, other], queries, row, (~inside).double(), inside)


def finite_part(
    tokens: Float[Tensor, "n tokens d"],
    queries: Float[Tensor, "n d_query"],
    weights: Float[Tensor, "n tokens"],
    sets: Bool[Tensor, "n tokens"],
) -> Problem:
    """(x_r − x_t)ᵀ W z = log(s_r/s_t) inside O_i: W_fin, the part that stays finite (Tarzanagh et al. 2023, Eq. 8).

    `weights` are the attention weights s, > 0 inside O_i; duplicates of a token share the mean of theirs. Raises
    UsageError as `selection_sets` does and for a weight of 0 inside O_i; UnposedError when every O_i is one token.
    """
    tokens, queries, weights = finite("tokens", tokens, 3), finite("queries", queries, 2), finite("weights", weights, 2)
    sets = checked_sets(tokens, queries, sets, torch.ones(tokens.shape[:2], dtype=torch.bool))
    if weights.shape != sets.shape or not (weights[sets] > 0).all():
        raise UsageError("A token that is kept has no positive weight.", "Give the attention weights, one a token.")
    sets, first = merged(tokens, sets, torch.ones_like(sets))
    same = equal_tokens(tokens).double()
    logs = ((same @ weights[..., None]).squeeze(-1) / same.sum(-1)).log()
    keeper = sets.int().argmax(-1)
    inside = sets & first
    inside[torch.arange(len(tokens)), keeper] = False
    row, other = inside.nonzero(as_tuple=True)
    ratios = logs[row, keeper[row]] - logs[row, other]
    equal = torch.ones(len(row), dtype=torch.bool)
    return posed(tokens[row, keeper[row]] - tokens[row, other], queries, row, ratios, equal)


def posed(
    differences: Float[Tensor, "constraints d"],
    queries: Float[Tensor, "queries d_query"],
    query_of: Int[Tensor, " constraints"],
    margins: Float[Tensor, " constraints"],
    equal: Bool[Tensor, " constraints"] | None = None,
) -> Problem:
    """The problem of these constraints, none of them an equality by default; raises UnposedError when there is none."""
    if not len(differences):
        raise UnposedError("There is no other token to separate from.", "Give sequences of at least two tokens.")
    free = torch.zeros(len(differences), dtype=torch.bool) if equal is None else equal
    return Problem(differences, queries, query_of, margins, free)


def finite(name: str, numbers: Shaped[Tensor, "*shape"], axes: int) -> Float[Tensor, "*shape"]:
    """The numbers in float64; raises UsageError for other than real tensors, other axes, no width, or NaN and ∞."""
    numbers = real(name, numbers)
    if numbers.ndim != axes:
        raise UsageError(f"The {name} have {numbers.ndim} axes, not {axes}.", "Give them as documented.")
    if axes > 1 and not numbers.shape[-1]:
        raise UsageError(f"The {name} have no dimension (d = 0).", "Give at least one.")
    if not numbers.isfinite().all():
        raise UsageError(f"The {name} hold numbers that aren't finite.", "Look for an overflow where they come from.")
    return numbers.detach().double()


def mask(name: str, given: Bool[Tensor, "n tokens"] | None, samples: int, length: int) -> Bool[Tensor, "n tokens"]:
    """The mask, or all true; raises UsageError when its shape differs."""
    if given is None:
        return torch.ones(samples, length, dtype=torch.bool)
    if real(f"flags `{name}`", given).shape != (samples, length):
        raise UsageError(f"`{name}` has shape {tuple(given.shape)}, not {(samples, length)}.", "Give one flag a token.")
    return given.bool()


def checked_sets(
    tokens: Float[Tensor, "n tokens d"],
    queries: Float[Tensor, "n d_query"],
    sets: Bool[Tensor, "n tokens"],
    seen: Bool[Tensor, "n tokens"],
) -> Bool[Tensor, "n tokens"]:
    """The sets O_i of one query each, none of them empty and all of them seen; raises UsageError otherwise."""
    sets = mask("sets", sets, *tokens.shape[:2])
    if len(queries) != len(tokens):
        raise UsageError(f"{len(queries)} queries for {len(tokens)} samples.", "Give one query a sample.")
    if not sets.any(-1).all() or (sets & ~seen).any():
        raise UsageError("A set of kept tokens is empty, or has one that its query doesn't see.", "Keep one it sees.")
    return sets


def merged(
    tokens: Float[Tensor, "n tokens d"], sets: Bool[Tensor, "n tokens"], seen: Bool[Tensor, "n tokens"]
) -> tuple[Bool[Tensor, "n tokens"], Bool[Tensor, "n tokens"]]:
    """The sets with every copy of a kept token, and which seen token is the first of its copies."""
    same = equal_tokens(tokens) & seen[:, :, None] & seen[:, None]
    first = seen & ~same.tril(-1).any(-1)
    return (same & sets[:, None]).any(-1), first


def equal_tokens(tokens: Float[Tensor, "n tokens d"]) -> Bool[Tensor, "n tokens tokens"]:
    """Which two tokens of a sample are equal in every number."""
    # Adding 0 makes −0 and 0 the same row; comparing pairs of rows outright would take n · T² · d bytes.
    kinds = torch.stack([(sample + 0.0).unique(dim=0, return_inverse=True)[1] for sample in tokens])
    return kinds[:, :, None] == kinds[:, None]


Edges = set[tuple[int, int]]


def next_token(sequences: Sequence[Sequence[int]], embeddings: Float[Tensor, "vocab d"]) -> Problem:
    """(e_i − e_j)ᵀ W e_k = 0 inside a cycle of k's graph, ≥ 1 along its other edges (Li et al. 2024, Graph-SVM).

    A sequence is its input tokens and then its label. The graph of a last input token k has an edge from the label to
    each input token of every sequence that ends in k; a cycle is a strongly connected component. Raises UsageError for
    a sequence of fewer than two tokens or an id outside the vocabulary; UnposedError when no graph has an edge.
    """
    embeddings = finite("embeddings", embeddings, 2)
    graphs = priorities(sequences, len(embeddings))
    rows: list[tuple[int, int, int, bool]] = []
    for query, edges in enumerate(graphs.values()):
        rows += [(query, *row) for row in constraints_of(edges, len(embeddings))]
    query_of, upper, lower, equal = torch.tensor(rows, dtype=torch.long).reshape(-1, 4).unbind(1)
    differences = embeddings[upper] - embeddings[lower]
    queries = embeddings[torch.tensor(list(graphs), dtype=torch.long)]
    return posed(differences, queries, query_of, 1.0 - equal.double(), equal.bool())


def priorities(sequences: Sequence[Sequence[int]], vocabulary: int) -> dict[int, Edges]:
    """The edges (label, input token) of every last input token, without loops; raises UsageError as `next_token`."""
    graphs: dict[int, Edges] = defaultdict(set)
    for sequence in sequences:
        if len(sequence) < 2 or not all(0 <= token < vocabulary for token in sequence):
            raise UsageError(
                f"A sequence is no input and label of {vocabulary} tokens: {str(list(sequence))[:40]}",
                "Give at least one input token and the label, all of them in the vocabulary.",
            )
        *inputs, label = sequence
        graphs[inputs[-1]] |= {(label, token) for token in inputs if token != label}
    return graphs


def constraints_of(edges: Edges, vocabulary: int) -> list[tuple[int, int, bool]]:
    """(upper, lower, equal): each component's tokens against its first, then the edges between components."""
    if not edges:
        return []
    upper, lower = np.array(sorted(edges)).T
    graph = coo_array((np.ones(len(upper)), (upper, lower)), shape=(vocabulary, vocabulary))
    component = connected_components(graph, connection="strong")[1]
    first = {component[token]: token for token in range(vocabulary - 1, -1, -1)}
    tied = [(int(first[component[t]]), t, True) for t in range(vocabulary) if first[component[t]] != t]
    return tied + [(int(i), int(j), False) for i, j in zip(upper, lower, strict=True) if component[i] != component[j]]


if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Integer, Shaped
    from torch import Tensor

    Each = Float[Tensor, " constraints"]

MANY = 8
"""Constraints a query from which products are taken query by query."""


@dataclass(frozen=True)
class Problem:
    """Find the smallest W (d × d_query) with u_cᵀ W z_q(c) ≥ b_c, = b_c where `equal` (Tarzanagh et al. 2023, Eq. 2).

    u_c = x_α − x_t is a difference of two tokens, z_q(c) the query for which it counts. Everything is float64.
    """

    differences: Float[Tensor, "constraints d"]
    """u_c, one row a constraint."""
    queries: Float[Tensor, "queries d_query"]
    """z, one row a query."""
    query_of: Int[Tensor, " constraints"]
    """Which query a constraint belongs to."""
    margins: Float[Tensor, " constraints"]
    """b_c: 1, or a label margin, or the log-ratio of two weights."""
    equal: Bool[Tensor, " constraints"]
    """Whether the constraint is an equality (inside a set of tokens that are all kept)."""

    @property
    def paired_queries(self) -> Float[Tensor, "constraints d_query"]:
        """z of every constraint."""
        return self.queries[self.query_of]

    @cached_property
    def gram(self) -> Float[Tensor, "constraints constraints"]:
        """G = (UUᵀ)∘(ZZᵀ), the inner products of the constraints' u zᵀ; for small problems only."""
        u, z = self.differences, self.queries
        return (u @ u.mT) * (z @ z.mT)[self.query_of][:, self.query_of]

    @cached_property
    def counts(self) -> list[int] | None:
        """How many constraints each query has, where they stand in the order of the queries; None elsewhere."""
        if not bool((self.query_of.diff() >= 0).all()):
            return None
        counts: list[int] = self.query_of.bincount(minlength=len(self.queries)).tolist()
        return counts

    def scores(self, W: Float[Tensor, "d d_query"]) -> Float[Tensor, " constraints"]:
        """u_cᵀ W z_q(c), which is to be ≥ b_c."""
        return self.along(self.queries @ W.mT)

    def along(self, directions: Float[Tensor, "queries d"]) -> Float[Tensor, " constraints"]:
        """u_c · v_q(c): how far each constraint reaches along its query's direction."""
        if self.counts is None or len(self.query_of) < MANY * len(self.queries):
            return (self.differences * directions[self.query_of]).sum(-1)
        # A direction for every constraint would be as much memory as the differences.
        blocks = torch.split(self.differences, self.counts)
        return torch.cat([block @ direction for block, direction in zip(blocks, directions, strict=True)])

    def form(self, multipliers: Float[Tensor, " constraints"]) -> Float[Tensor, "d d_query"]:
        """W(λ) = Σ_c λ_c u_c z_q(c)ᵀ."""
        held = multipliers.nonzero().flatten()
        weighted = self.differences.new_zeros(len(self.queries), self.differences.shape[1])
        weighted.index_add_(0, self.query_of[held], multipliers[held, None] * self.differences[held])
        return weighted.mT @ self.queries


Status = Literal["optimal", "infeasible", "inaccurate"]


@dataclass(frozen=True)
class Solution:
    """An answer to a Problem, and how far it can be trusted; recomputed from `multipliers`, whoever found them."""

    status: Status
    """optimal: the gap is within the tolerance; infeasible: `multipliers` prove that no W exists; inaccurate: neither
    was reached within the iteration limit, and `gap` says how far off W may be."""
    multipliers: Float[Tensor, " constraints"]
    """λ, ≥ 0 at inequalities. Infeasible: Gordan's certificate, Σλ = 1 over the inequalities and Σλ u zᵀ ≈ 0."""
    W: Float[Tensor, "d d_query"] | None
    """The solution, scaled so that its least margin is exactly met; None where there is none."""
    norm: float | None
    """‖W‖_F, or the nuclear norm Σσ(W) for the nuclear problem; the max-margin is 1/norm."""
    gap: float | None
    """Relative duality gap (P − D)/P of the squared norm (Frobenius) or the norm (nuclear), ≥ 0; None if infeasible."""
    least: float | None
    """min over inequalities of u W z − b, before W is rescaled; 0 at the optimum."""
    kkt: float | None
    """Largest violation of the optimality conditions, relative: complementarity, equalities, stationarity."""
    residual: float | None
    """‖Σλ u zᵀ‖ of a normalised certificate (infeasible only): 0 proves it."""
    support: Bool[Tensor, " constraints"]
    """Which constraints carry W: λ > 0 (equalities: λ ≠ 0), beyond rounding."""
    iterations: int
    """Steps of the outer loop."""


LEAST, MOST = 1e-50, 1e50
"""Sizes between which λ ~ b/‖u zᵀ‖² and ‖W‖² ~ b²/‖u zᵀ‖² stay within float64."""


def real(name: str, given: object) -> Shaped[Tensor, "*shape"]:
    """A tensor of real numbers; raises UsageError for anything else."""
    if not isinstance(given, torch.Tensor):
        raise UsageError(
            f"The {name} are {type(given).__name__}, not a torch tensor.", "Wrap them: torch.as_tensor(…)."
        )
    if given.is_complex():
        raise UsageError(f"The {name} are complex numbers.", "Give real ones, for example their real parts.")
    return given


def indices(name: str, given: object) -> Integer[Tensor, "*shape"]:
    """A tensor of whole numbers; raises UsageError for anything else."""
    numbers = real(name, given)
    if numbers.is_floating_point() or numbers.dtype == torch.bool:
        raise UsageError(f"The {name} have dtype {numbers.dtype}, but are indices.", "Give integers, as .long() does.")
    return numbers


def bounded(tolerance: float, limit: int = 1) -> None:
    """Raises UsageError unless the tolerance is positive and the limit at least 1."""
    if not tolerance > 0.0:
        raise UsageError(f"The tolerance is {tolerance}, but must be positive.", "Give a relative gap such as 1e-9.")
    if limit < 1:
        raise UsageError(f"The limit is {limit}, but one step is the least.", "Give a limit of at least 1.")


def ordinary(problem: Problem) -> None:
    """Raises UsageError where squares and products of a problem's numbers would leave float64.

    Each difference, query and margin that isn't zero must have its largest |number| in [1e-50, 1e50].
    """
    every = {
        "difference of two tokens": problem.differences,
        "query": problem.queries,
        "margin": problem.margins[:, None],
    }
    for name, rows in every.items():
        if not rows.numel():
            continue
        sizes = rows.abs().amax(-1)
        odd = sizes[(sizes != 0.0) & ~((sizes >= LEAST) & (sizes <= MOST))]
        if len(odd):
            raise UsageError(
                f"A {name} has size {float(odd[0]):.0e}, whose powers leave float64.",
                f"Scale the tokens, queries and margins to between {LEAST:.0e} and {MOST:.0e}.",
            )


PROOF = 1e-10
"""‖Σλ u zᵀ‖ / Σ|λ|‖u zᵀ‖ up to which λ proves that there is no W: any W would be 10¹⁰ times the constraints' scale."""
ROUNDING = 1e-10
"""Violation of a constraint, against |b| + ‖W‖‖u zᵀ‖, that float64 leaves where no scaling can remove it."""
NEGLIGIBLE = 1e-9
"""Share of the largest λ‖u zᵀ‖ below which a constraint carries nothing."""


def certified(problem: Problem, multipliers: Each, tolerance: float = 1e-9, iterations: int = 0) -> Solution:
    """The answer that λ proves: D = (Σλb)²/(2‖W(λ)‖²) ≤ ½‖W*‖² ≤ P, the value of W(λ) scaled until it is feasible.

    Negative λ at inequalities are set to 0, so that D is a true bound for any λ. Where equalities with b ≠ 0 forbid
    scaling, or where b ≤ 0, what rounding leaves of a violation r is charged to P as Σ|λ|r, its first-order price, and
    more than rounding is `inaccurate` with an infinite gap. The gap is (P − D)/P. λ itself is scaled so that
    Σλb = ‖W(λ)‖². Raises UsageError when λ has another length or isn't finite, for a tolerance ≤ 0, and for sizes
    outside [1e-50, 1e50], at which rounding to 0 or ∞ would pass for a proof.
    """
    bounded(tolerance)
    ordinary(problem)
    if multipliers.shape != problem.margins.shape or not multipliers.isfinite().all():
        raise UsageError("The multipliers are not one finite number a constraint.", "Give λ of this problem.")
    free, bounds = problem.equal, problem.margins
    multipliers = torch.where(free, multipliers.double(), multipliers.double().clamp(min=0.0))
    W = problem.form(multipliers)
    norm, value = float(W.norm()), float(multipliers @ bounds)
    reach: Each = problem.differences.norm(dim=-1) * problem.paired_queries.norm(dim=-1)  # ‖u zᵀ‖
    weight = float(multipliers.abs() @ reach)
    if value > PROOF * float(multipliers.abs() @ bounds.abs()) and norm <= PROOF * weight:
        return refuted(multipliers, free, norm, iterations)
    factor = value / norm**2 if value > 0.0 and norm > 0.0 else 0.0
    return judged(problem, multipliers * factor, W * factor, reach, tolerance, iterations)


def refuted(multipliers: Each, free: Bool[Tensor, " constraints"], norm: float, iterations: int) -> Solution:
    """No W exists (Gordan): the multipliers with Σλ = 1 over the inequalities, or Σ|λ| = 1 where all are equalities."""
    total = float(multipliers[~free].sum()) or float(multipliers.abs().sum())
    return Solution(
        status="infeasible",
        multipliers=multipliers / total,
        W=None,
        norm=None,
        gap=None,
        least=None,
        kkt=None,
        residual=norm / total,
        support=carried(multipliers.abs()),
        iterations=iterations,
    )


def carried(loads: Each) -> Bool[Tensor, " constraints"]:
    """Which loads are more than rounding of the largest."""
    return loads > NEGLIGIBLE * loads.max()


def judged(
    problem: Problem, multipliers: Each, W: Float[Tensor, "d d_query"], reach: Each, tolerance: float, iterations: int
) -> Solution:
    """The Solution of λ at its dual optimum along the ray, W = W(λ)."""
    free, bounds = problem.equal, problem.margins
    norm, scores = float(W.norm()), problem.scores(W)
    price = multipliers.abs()
    factor = feasible_scale(scores, bounds, free)
    slack = violations(factor * scores, bounds, free)
    span = bounds.abs() + factor * norm * reach
    broken = bool((slack > ROUNDING * span).any())
    primal = math.inf if broken else 0.5 * (factor * norm) ** 2 + float(price @ slack)
    gap = max((primal - 0.5 * norm**2) / primal, 0.0) if 0.0 < primal < math.inf else primal
    status: Status = "optimal" if gap <= tolerance else "inaccurate"
    return Solution(
        status=status,
        multipliers=multipliers,
        W=W * factor,
        norm=norm * factor,
        gap=gap,
        least=None if free.all() else float((scores - bounds)[~free].min()),
        kkt=optimality(scores, bounds, free, price, norm, reach),
        residual=None,
        support=carried(price * reach),
        iterations=iterations,
    )


def feasible_scale(scores: Each, bounds: Each, free: Bool[Tensor, " constraints"]) -> float:
    """The least t with t · score ≥ b wherever b > 0; 1 where there is none or an equality with b ≠ 0 fixes it."""
    positive = ~free & (bounds > 0.0)
    if not positive.any() or (bounds[free] != 0.0).any() or not (scores[positive] > 0.0).all():
        return 1.0
    return float((bounds[positive] / scores[positive]).max())


def violations(scores: Each, bounds: Each, free: Bool[Tensor, " constraints"]) -> Each:
    """How far each constraint is broken: |score − b| at equalities, b − score where positive elsewhere."""
    short = bounds - scores
    return torch.where(free, short.abs(), short.clamp(min=0.0))


def optimality(
    scores: Each, bounds: Each, free: Bool[Tensor, " constraints"], price: Each, norm: float, reach: Each
) -> float:
    """The larger of violation against |b| + ‖W‖‖u zᵀ‖ and λ|score − b| against ‖W‖²; W = W(λ) by construction."""
    span = bounds.abs() + norm * reach
    broken = float((violations(scores, bounds, free) / span.clamp(min=torch.finfo(torch.float64).tiny)).max())
    return max(broken, float((price * (scores - bounds).abs()).max()) / norm**2) if norm > 0.0 else broken
