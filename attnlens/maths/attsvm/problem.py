"""Att-SVM problems, their solutions with certificates, and checks of arguments."""

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

    Each = Float[Tensor, " constraints"]
    Tokens = Float[Tensor, "n tokens d"]
    Queries = Float[Tensor, "n d_query"]
    Mask = Bool[Tensor, "n tokens"]
    Pairs = Int[Tensor, " pairs"]
    Chosen = Int[Tensor, " n"]
    Margins = Float[Tensor, " n"]
    BilinearForm = Float[Tensor, "d d_query"]

Status = Literal["optimal", "infeasible", "inaccurate"]
SHAPES = {"queries": "(samples, d)", "margins": "(samples,)", "weights": "(samples, tokens)", "embeddings": "(ids, d)"}
LEAST, MOST = 1e-50, 1e50  # Limits on sizes within which λ ~ b/‖u zᵀ‖² and ‖W‖² ~ b²/‖u zᵀ‖² do not overflow float64
PROOF = 1e-10
"""Largest ‖Σλ u zᵀ‖ / Σ|λ|‖u zᵀ‖ at which λ proves that no W exists, or none below 10¹⁰ times the data's scale."""
ROUNDING = 1e-10  # Largest violation, relative to |b| + ‖W‖‖u zᵀ‖, that counts as rounding
BLOCK = 4096  # Constraints whose components are computed at once
NEGLIGIBLE = 1e-9
"""Share of the largest λ‖u zᵀ‖ below which a constraint does not count as support: λ is only as accurate as the gap."""


@dataclass(frozen=True)
class Problem:
    """Problem of finding the W (d × d_query) of least norm with u_cᵀ W z_q(c) ≥ b_c (= b_c where `equal`), in float64.

    u_c = x_α − x_t is a difference of two tokens, and z_q(c) is the constraint's query (Tarzanagh et al. 2023, Eq. 2).
    """

    differences: Float[Tensor, "constraints d"]  # u_c, one row per constraint
    queries: Float[Tensor, "queries d_query"]  # z, one row per query
    query_of: Int[Tensor, " constraints"]  # Index of each constraint's query
    margins: Each  # b_c: 1, another margin, or the logarithm of the ratio of two weights
    equal: Bool[Tensor, " constraints"]  # True for equality constraints (inside a set of selected tokens)

    @property
    def paired_queries(self) -> Float[Tensor, "constraints d_query"]:
        """Query z of each constraint, one row per constraint."""
        return self.queries[self.query_of]

    @cached_property
    def gram(self) -> Float[Tensor, "constraints constraints"]:
        """Gram matrix G of the constraints' matrices u zᵀ, for small problems only."""
        u, z = self.differences, self.queries
        return (u @ u.mT) * (z @ z.mT)[self.query_of][:, self.query_of]

    def select(self, rows: Int[Tensor, " rows"]) -> Problem:
        """Return the problem with only the constraints at these indices."""
        differences, query_of = self.differences[rows], self.query_of[rows]
        return Problem(differences, self.queries, query_of, self.margins[rows], self.equal[rows])

    def scores(self, W: BilinearForm) -> Each:
        """Return the score u_cᵀ W z_q(c) of each constraint, which must be ≥ b_c (= b_c where `equal`)."""
        return self.components(self.queries @ W.mT)

    def violations(self, scores: Each) -> Each:
        """Return |score − b| of each equality and max(0, b − score) of each inequality."""
        short = self.margins - scores
        return torch.where(self.equal, short.abs(), short.clamp(min=0.0))

    def components(self, directions: Float[Tensor, "queries d"]) -> Each:
        """Return u_c · v_q(c) for each constraint c, where v_q is row q of `directions`."""
        # In blocks, because a direction per constraint would take as much memory as the differences.
        blocks = zip(torch.split(self.differences, BLOCK), torch.split(self.query_of, BLOCK), strict=True)
        return torch.cat([(block * directions[queries]).sum(-1) for block, queries in blocks])

    def form(self, multipliers: Each) -> BilinearForm:
        """Return W(λ) = Σ_c λ_c u_c z_q(c)ᵀ."""
        nonzero = multipliers.nonzero().flatten()
        weighted = self.differences.new_zeros(len(self.queries), self.differences.shape[1])
        weighted.index_add_(0, self.query_of[nonzero], multipliers[nonzero, None] * self.differences[nonzero])
        return weighted.mT @ self.queries


@dataclass(frozen=True)
class Solution:
    """Result of solving a Problem: W with the duality gap that `multipliers` prove, or a proof that no W exists."""

    status: Status
    """optimal: the gap is within the tolerance. infeasible: `multipliers` prove that no W exists. inaccurate: neither
    was reached within the iteration limit; `gap` is the gap reached."""
    multipliers: Each
    """λ, ≥ 0 at inequalities. If infeasible: Gordan's certificate Σλ u zᵀ ≈ 0, where Σλ over the inequalities is 1 (if
    all their λ are 0: Σ|λ| = 1)."""
    support: Bool[Tensor, " constraints"]  # Support constraints: λ > 0 (equalities: λ ≠ 0), beyond rounding
    iterations: int  # Number of working-set steps (Frobenius) or interior-point steps (nuclear)
    W: BilinearForm | None = None
    """W, scaled to meet its constraints if possible; None if infeasible, or if a nuclear W could not be corrected."""
    norm: float | None = None  # ‖W‖_F (nuclear problem: Σσ(W)); None if W is None; 1/norm is the max-margin if b = 1
    gap: float | None = None
    """Relative duality gap (P − D)/P of the squared norm (Frobenius) or the norm (nuclear), ≥ 0; ∞ if W violates
    constraints or could not be corrected; None if infeasible."""
    least: float | None = None
    """min over inequalities of u W z − b, before W is rescaled; None if infeasible or if there are no inequalities."""
    kkt: float | None = None
    """Largest relative violation of an optimality condition: constraints, complementarity or (nuclear) stationarity;
    None if W is None."""
    residual: float | None = None  # ‖Σλ u zᵀ‖ of Gordan's certificate, 0 in exact arithmetic; None unless infeasible


def selection(
    tokens: Tokens, queries: Queries, chosen: Chosen, allowed: Mask | None = None, margins: Margins | None = None
) -> Problem:
    """Build the problem (x_α − x_t)ᵀ W z ≥ b for every allowed t ≠ α (Tarzanagh et al. 2023, Eq. Att-SVM).

    `chosen` contains the index of the token α that each query selects, and `margins` the b of each sample, 1 by
    default. A duplicate of the chosen token gives a constraint that cannot be met if b > 0. Raises UsageError for
    mismatched shapes, invalid indices, numbers that are not finite, and a chosen token that is not allowed; raises
    UnposedError if no query sees a second token.
    """
    tokens, queries = as_finite("tokens", tokens, 3), as_finite("queries", queries, 2)
    samples, length = tokens.shape[:2]
    visible, chosen = as_mask("allowed", allowed, samples, length), require_real("chosen tokens", chosen)
    bounds = torch.ones(samples).double() if margins is None else as_finite("margins", margins, 1)
    integer = not chosen.is_floating_point() and chosen.dtype != torch.bool
    if not (integer and chosen.shape == bounds.shape == (samples,) and len(queries) == samples):
        raise UsageError(
            f"`queries`, `chosen` and `margins` must have one entry for each of the {samples} samples, and `chosen` "
            "must contain integers.",
            "Pass one query and one index of a token per sample; omit `margins` if all are 1.",
        )
    rows, within = torch.arange(samples), (chosen >= 0) & (chosen < length)
    if not within.all() or not visible[rows, chosen].all():
        raise UsageError("A chosen token is not among the allowed tokens.", "Choose tokens that the query sees.")
    rivals = visible.clone()
    rivals[rows, chosen] = False
    row, rival = rivals.nonzero(as_tuple=True)
    return build_problem(tokens[row, chosen[row]] - tokens[row, rival], queries, row, bounds[row])


def prompt(tokens: Tokens, chosen: Chosen, margins: Margins | None = None) -> Problem:
    """Build the problem (k_α − k_t)ᵀ p ≥ b of a prompt p (Tarzanagh et al. 2023): a `selection` with the queries z = 1.

    `tokens` are the keys k; the other arguments are as in `selection`. Raises the same errors as `selection`.
    """
    tokens = as_finite("tokens", tokens, 3)
    return selection(tokens, torch.ones(len(tokens), 1).double(), chosen, margins=margins)


def causal(tokens: Float[Tensor, "n d"], chosen: Chosen, queries: Queries | None = None) -> Problem:
    """Build the problem (x_{α(i)} − x_t)ᵀ W z_i ≥ 1 for every position i and t ≤ i, t ≠ α(i); by default z = x.

    Raises the same errors as `selection`, including UnposedError for a sequence of one token.
    """
    tokens = as_finite("tokens", tokens, 2)
    length = len(tokens)
    past = torch.ones(length, length, dtype=torch.bool).tril()
    return selection(tokens.expand(length, *tokens.shape), tokens if queries is None else queries, chosen, past)


def selection_sets(tokens: Tokens, queries: Queries, sets: Mask, allowed: Mask | None = None) -> Problem:
    """Build the problem in which each query selects a set of tokens O_i (Tarzanagh et al. 2023, Gen-SVM).

    Each u is the first token of O_i minus another visible token. The constraints are uᵀ W z = 0 if the other token is
    in O_i, and uᵀ W z ≥ 1 otherwise. `sets` marks the tokens of O_i. Exact duplicates count as one token, which is
    selected if any copy is. Raises the UsageErrors of `selection`, and a UsageError for an empty O_i;
    raises UnposedError if every query selects all tokens that it sees.
    """
    tokens, queries, sets, visible = as_sets(tokens, queries, sets, allowed)
    sets, first = merge_duplicates(tokens, sets, visible)
    if not (first & ~sets).any():
        raise UnposedError(
            "Every query selects all tokens that it sees, so there is nothing to separate.", "Select fewer tokens."
        )
    row, representative, other = pair_with_representatives(sets, first)
    inside, differences = sets[row, other], tokens[row, representative] - tokens[row, other]
    return build_problem(differences, queries, row, (~inside).double(), inside)


def finite_part(tokens: Tokens, queries: Queries, weights: Float[Tensor, "n tokens"], sets: Mask) -> Problem:
    """Build the problem of W_fin, the part of W that stays finite in training.

    The constraints are (x_r − x_t)ᵀ W z = log(s_r/s_t) inside O_i, where r is the first token of O_i (Tarzanagh et al.
    2023, Eq. 8). `weights` are the attention weights s, which must be > 0 inside O_i; duplicates get the mean weight of
    all copies. Raises the UsageErrors of `selection_sets`, and a UsageError for a weight ≤ 0 inside O_i; raises
    UnposedError if no O_i contains two different tokens.
    """
    tokens, queries, sets, visible = as_sets(tokens, queries, sets, None)
    weights = as_finite("weights", weights, 2)
    if weights.shape != sets.shape or not (weights[sets] > 0).all():
        problem = "`weights` must contain one number per token, which must be positive for selected tokens."
        raise UsageError(problem, "Pass the attention weights of all tokens.")
    sets, first = merge_duplicates(tokens, sets, visible)
    same = find_equal_tokens(tokens).double()
    logs = ((same @ weights[..., None]).squeeze(-1) / same.sum(-1)).log()
    row, representative, other = pair_with_representatives(sets, sets & first)
    differences = tokens[row, representative] - tokens[row, other]
    ratios = logs[row, representative] - logs[row, other]
    return build_problem(differences, queries, row, ratios, torch.ones(len(row), dtype=torch.bool))


def pair_with_representatives(sets: Mask, candidates: Mask) -> tuple[Pairs, Pairs, Pairs]:
    """Pair the first token of each sample's O_i with every other candidate of the sample.

    Return three index tensors: each pair's sample, first token and candidate.
    """
    representative = sets.int().argmax(-1)
    others = candidates.clone()
    others[torch.arange(len(sets)), representative] = False
    row, other = others.nonzero(as_tuple=True)
    return row, representative[row], other


def build_problem(
    differences: Float[Tensor, "constraints d"],
    queries: Float[Tensor, "queries d_query"],
    query_of: Int[Tensor, " constraints"],
    margins: Each,
    equal: Bool[Tensor, " constraints"] | None = None,
) -> Problem:
    """Build a problem from constraints, by default inequalities; raise UnposedError if there are no constraints."""
    if not len(differences):
        problem = "The problem has no constraints, because no token is compared with another token."
        raise UnposedError(problem, "Pass at least two tokens per sequence (for W_fin: per selected set).")
    equal = torch.zeros(len(differences), dtype=torch.bool) if equal is None else equal
    return Problem(differences, queries, query_of, margins, equal)


def merge_duplicates(tokens: Tokens, sets: Mask, visible: Mask) -> tuple[Mask, Mask]:
    """Return the sets extended to all visible copies of their tokens, and a mask of each visible token's first copy."""
    same = find_equal_tokens(tokens) & visible[:, :, None] & visible[:, None]
    first = visible & ~same.tril(-1).any(-1)
    return (same & sets[:, None]).any(-1), first


def find_equal_tokens(tokens: Tokens) -> Bool[Tensor, "n tokens tokens"]:
    """Return a mask of the pairs of tokens in each sample that are equal in every coordinate."""
    # Adding 0 turns −0 into 0. Rows are numbered by `unique`, because comparing all pairs takes n · T² · d bytes.
    kinds = torch.stack([(sample + 0.0).unique(dim=0, return_inverse=True)[1] for sample in tokens])
    return kinds[:, :, None] == kinds[:, None]


def next_token(sequences: Sequence[Sequence[int]], embeddings: Float[Tensor, "vocab d"]) -> Problem:
    """Build the problem (e_i − e_j)ᵀ W e_k = 0 in cycles of k's graph, and ≥ 1 along its other edges (Graph-SVM).

    e_i is the embedding of token i. A sequence consists of the ids of input tokens and, at the end, of a label (Li et
    al. 2024). For each sequence whose last input is k, k's graph has edges from the label to all inputs except the
    label; a cycle is a strongly connected component. Raises UsageError for sequences of fewer than two tokens, ids
    outside the vocabulary, and embeddings that are not finite; raises UnposedError if no graph has an edge.
    """
    embeddings = as_finite("embeddings", embeddings, 2)
    vocabulary, graphs = len(embeddings), defaultdict[int, set[tuple[int, int]]](set)
    for sequence in sequences:
        if len(sequence) < 2 or not all(0 <= token < vocabulary for token in sequence):
            raise UsageError(
                f"Each sequence must consist of input tokens followed by a label, with ids from 0 to {vocabulary - 1}; "
                f"got {str(list(sequence))[:40]}.",
                "Pass the ids of at least one input token and of the label.",
            )
        *inputs, label = sequence
        graphs[inputs[-1]] |= {(label, token) for token in inputs if token != label}
    rows = [torch.empty(0, 4, dtype=torch.long)]
    for query, edges in enumerate(graphs.values()):
        upper, lower = np.array(sorted(edges), dtype=np.int64).reshape(-1, 2).T
        graph = coo_array((np.ones(len(upper)), (upper, lower)), shape=(vocabulary, vocabulary))
        component = connected_components(graph, connection="strong")[1]
        first = np.unique(component, return_index=True)[1][component]  # the first token of each token's component
        tied, between = np.flatnonzero(first != np.arange(vocabulary)), component[upper] != component[lower]
        columns = np.r_[first[tied], upper[between]], np.r_[tied, lower[between]]
        equal = np.arange(len(columns[0])) < len(tied)
        rows.append(torch.from_numpy(np.stack([np.full(len(equal), query), *columns, equal], 1)).long())
    query_of, upper_of, lower_of, equal_of = torch.cat(rows).unbind(1)
    differences = embeddings[upper_of] - embeddings[lower_of]
    queries = embeddings[torch.tensor(list(graphs), dtype=torch.long)]
    return build_problem(differences, queries, query_of, 1.0 - equal_of.double(), equal_of.bool())


def as_finite(name: str, numbers: Shaped[Tensor, "*shape"], axes: int) -> Float[Tensor, "*shape"]:
    """Return the numbers in float64; raise UsageError if they are not real or not finite, or if the shape is wrong."""
    numbers = require_real(name, numbers)
    if numbers.ndim != axes or (axes > 1 and not numbers.shape[-1]):
        needed = "1 dimension" if axes == 1 else f"{axes} dimensions, of which the last must not be empty"
        raise UsageError(
            f"`{name}` has shape {tuple(numbers.shape)}, but needs {needed}.",
            f"Reshape `{name}` to {SHAPES.get(name, '(samples, tokens, d)' if axes == 3 else '(tokens, d)')}.",
        )
    if not numbers.isfinite().all():
        raise UsageError(f"The {name} contain NaN or Inf.", f"Check the code that computes the {name} for overflow.")
    return numbers.detach().double()


def as_mask(name: str, mask: Mask | None, samples: int, length: int) -> Mask:
    """Return the mask as booleans, all True for None; raise UsageError unless its shape is (samples, length)."""
    if mask is None:
        return torch.ones(samples, length, dtype=torch.bool)
    if require_real(f"flags `{name}`", mask).shape != (samples, length):
        problem = f"`{name}` has shape {tuple(mask.shape)}, not {(samples, length)}."
        raise UsageError(problem, "Pass one flag per sample and token.")
    return mask.bool()


def as_sets(tokens: Tokens, queries: Queries, sets: Mask, allowed: Mask | None) -> tuple[Tokens, Queries, Mask, Mask]:
    """Return float64 tokens and queries, and masks of O_i and of visible tokens; raise UsageError if one is invalid."""
    tokens, queries = as_finite("tokens", tokens, 3), as_finite("queries", queries, 2)
    visible, sets = (as_mask(*mask, *tokens.shape[:2]) for mask in (("allowed", allowed), ("sets", sets)))
    if len(queries) != len(tokens):
        raise UsageError(f"There are {len(queries)} queries for {len(tokens)} samples.", "Pass one query per sample.")
    if not sets.any(-1).all() or (sets & ~visible).any():
        raise UsageError(
            "A set of selected tokens is empty, or contains a token that its query does not see.",
            "Select at least one token per query, and only tokens that the query sees.",
        )
    return tokens, queries, sets, visible


def require_real(name: str, tensor: object) -> Shaped[Tensor, "*shape"]:
    """Return a tensor of real numbers unchanged; raise UsageError for anything else."""
    if not isinstance(tensor, torch.Tensor) or tensor.is_complex():
        kind = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        remedy = "Convert a list with torch.as_tensor, and a complex tensor with .real."
        raise UsageError(f"The {name} must be a tensor of real numbers, not {kind}.", remedy)
    return tensor


def check_solvable(problem: Problem, tolerance: float, limit: int = 1) -> None:
    """Raise an error if a problem cannot be solved: UnposedError for a problem without constraints, else UsageError.

    UsageErrors are raised for a tolerance ≤ 0, a limit < 1, and a nonzero difference, query or margin whose largest
    |entry| lies outside [1e-50, 1e50], because products could overflow.
    """
    if not tolerance > 0.0:
        raise UsageError(f"The tolerance must be positive, not {tolerance}.", "Pass a relative gap such as 1e-9.")
    if limit < 1:
        raise UsageError(f"The step limit must be at least 1, not {limit}.", "Pass limit=1 or more.")
    if not len(problem.margins):
        raise UnposedError("The problem has no constraints.", "Pass sequences of at least two tokens.")
    pairs, queries, margins = problem.differences, problem.queries, problem.margins[:, None]
    for name, rows in (("difference of two tokens", pairs), ("query", queries), ("margin", margins)):
        sizes = rows.abs().amax(-1)
        extreme = sizes[(sizes != 0.0) & ~((sizes >= LEAST) & (sizes <= MOST))]
        if len(extreme):
            raise UsageError(
                f"The largest entry of a {name} is {float(extreme[0]):.0e}; its powers overflow or underflow float64.",
                f"Scale the tokens, queries and margins to between {LEAST:.0e} and {MOST:.0e}.",
            )


def certify(problem: Problem, multipliers: Each, tolerance: float = 1e-9, iterations: int = 0) -> Solution:
    """Return W(λ), scaled to meet the constraints, as a solution with the duality gap that λ proves.

    The gap is (P − D)/P, where P is ½‖W‖² of the scaled W(λ), and D = (Σλb)²/(2‖W(λ)‖²) ≤ min ½‖W‖² ≤ P. Negative λ of
    inequalities are set to 0, so that D is a bound for any λ. Scaling cannot remove violations r of constraints with b
    ≤ 0 or equalities with b ≠ 0. If every r is within rounding, Σ|λ|r, the first-order cost of removing them, is added
    to P; otherwise the result is `inaccurate` with an infinite gap. λ is scaled so that Σλb = ‖W(λ)‖². If λ proves that
    no W exists, the result is `infeasible`, without W. Raises UsageError if λ has the wrong length or is not finite,
    and the same errors as `solve`.
    """
    check_solvable(problem, tolerance)
    if multipliers.shape != problem.margins.shape or not multipliers.isfinite().all():
        remedy = "Pass the multipliers of a solution of this problem."
        raise UsageError("The multipliers must be one finite number per constraint.", remedy)
    bounds = problem.margins
    multipliers = torch.where(problem.equal, multipliers.double(), multipliers.double().clamp(min=0.0))
    W = problem.form(multipliers)
    norm, value = float(W.norm()), float(multipliers @ bounds)
    lengths: Each = problem.differences.norm(dim=-1) * problem.paired_queries.norm(dim=-1)  # ‖u zᵀ‖
    if value > PROOF * float(multipliers.abs() @ bounds.abs()) and norm <= PROOF * float(multipliers.abs() @ lengths):
        # Gordan's certificate: Σλ = 1 over the inequalities, or Σ|λ| = 1 if no inequality has λ > 0.
        total = float(multipliers[~problem.equal].sum()) or float(multipliers.abs().sum())
        support = multipliers.abs() > NEGLIGIBLE * multipliers.abs().max()
        return Solution("infeasible", multipliers / total, support, iterations, residual=norm / total)
    factor = value / norm**2 if value > 0.0 and norm > 0.0 else 0.0
    # The multiple of λ that maximises the dual, and its W = W(λ).
    multipliers, W = multipliers * factor, W * factor
    norm, scores, price = float(W.norm()), problem.scores(W), multipliers.abs()
    factor = feasible_scale(problem, scores)
    slack = problem.violations(factor * scores)
    infeasible = bool((slack > ROUNDING * (bounds.abs() + factor * norm * lengths)).any())
    primal = math.inf if infeasible else 0.5 * (factor * norm) ** 2 + float(price @ slack)
    gap = max((primal - 0.5 * norm**2) / primal, 0.0) if 0.0 < primal < math.inf else primal
    # The optimality conditions besides W = W(λ) are feasibility and complementarity, λ|score − b|/‖W‖² = 0.
    # `tiny` avoids 0/0.
    span = (bounds.abs() + norm * lengths).clamp(min=torch.finfo(torch.float64).tiny)
    kkt = float((problem.violations(scores) / span).max())
    if norm > 0.0:
        kkt = max(kkt, float((price * (scores - bounds).abs()).max()) / norm**2)
    status: Status = "optimal" if gap <= tolerance else "inaccurate"
    support = price * lengths > NEGLIGIBLE * (price * lengths).max()
    least = None if problem.equal.all() else float((scores - bounds)[~problem.equal].min())
    W, norm = W * factor, norm * factor
    return Solution(status, multipliers, support, iterations, W=W, norm=norm, gap=gap, least=least, kkt=kkt)


def feasible_scale(problem: Problem, scores: Each) -> float:
    """Return the least t with t · score ≥ b at all inequalities with b > 0.

    Return 1 if there are no such inequalities, if no such t exists, or if an equality with b ≠ 0 fixes t.
    """
    bounds, positive = problem.margins, ~problem.equal & (problem.margins > 0.0)
    if not positive.any() or (bounds[problem.equal] != 0.0).any() or not (scores[positive] > 0.0).all():
        return 1.0
    return float((bounds[positive] / scores[positive]).max())
