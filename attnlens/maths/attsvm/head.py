"""The selection problem of an attention head, and the comparison of the head with its SVM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from attnlens.errors import UnposedError
from attnlens.maths.attsvm.frobenius import solve
from attnlens.maths.attsvm.nuclear import row_basis
from attnlens.maths.attsvm.problem import build_problem

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from attnlens.maths.attsvm.problem import Problem, Solution

    Scores = Float[Tensor, "queries keys"]
    Flags = Bool[Tensor, "queries keys"]

TIE = 1e-6
"""Scores are tied if they differ by at most this share of a query's largest |score|, about 10 roundings in float32."""
MOST_CONSTRAINTS = 2**15  # Most constraints of a problem: 100 MB of differences if d is 384
MOST_EQUALITIES = 2**11
"""Largest number of equalities in a problem: factoring their Gram matrix takes 32 MB and a fraction of a second."""
TOLERANCE = 1e-8  # Relative duality gap of a head's SVM; the relative error of its norm is at most half of the gap
SPAN = 1e-6  # Relative singular value below which differences of tokens are rounding of float32 inputs


@dataclass(frozen=True)
class FactoredForm:
    """The form M = L Rᵀ, stored as its factors; token x has the score xᵀ M z for query z."""

    left: Float[Tensor, "d rank"]  # L, on the keys' side
    right: Float[Tensor, "d_query rank"]  # R, on the queries' side, including the scale

    def scores(self, tokens: Float[Tensor, "keys d"], queries: Float[Tensor, "queries d_query"]) -> Scores:
        """Return the score xᵀ M z of every query z and token x."""
        return (queries @ self.right) @ (tokens @ self.left).mT

    def rotate_randomly(self, seed: int) -> FactoredForm:
        """Return O₁ M O₂ᵀ for Haar-random orthogonal O₁ and O₂: M's singular values with random singular vectors."""
        generator, factors = torch.Generator().manual_seed(seed), []
        for factor in (self.left, self.right):
            frame, core = torch.linalg.qr(factor)
            frame, upper = torch.linalg.qr(torch.randn(frame.shape, generator=generator, dtype=torch.float64))
            # Q is uniform (Haar) only if the diagonal of R is positive.
            factors.append((frame * upper.diagonal().sign()) @ core)
        return FactoredForm(*factors)


@dataclass(frozen=True)
class Scene:
    """Tokens and queries of one sequence, and the number of copies of each token that a query can see."""

    tokens: Float[Tensor, "keys d"]  # Tokens x from which queries select
    queries: Float[Tensor, "queries d_query"]  # Queries z, which select tokens
    log_copies: Scores
    """Log of the number of copies of a token that a query can see, stored at the first copy; −∞ at other copies and at
    hidden tokens."""

    @property
    def visible(self) -> Flags:
        """Mask of the tokens that each query can select; only the first of several copies counts."""
        return self.log_copies > -torch.inf


@dataclass(frozen=True)
class Softmax:
    """The softcap and the sink of the head's softmax; neither changes how tokens rank by weight."""

    softcap: float | None = None  # Scores become softcap · tanh(score / softcap); None: they are not capped
    sink: float | None = None  # Logit that takes weight without a token; None: there is no sink

    def cap_scores(self, scores: Scores) -> Scores:
        """Return the scores after softcapping, as the softmax uses them."""
        return scores if self.softcap is None else self.softcap * (scores / self.softcap).tanh()


@dataclass(frozen=True)
class Selections:
    """Queries of several scenes, and the tokens that each query selects."""

    scene: Int[Tensor, " queries"]  # Index of each query's scene
    position: Int[Tensor, " queries"]  # Index of the query in its scene
    sets: tuple[Bool[Tensor, " keys"], ...]  # Mask of O_i, the tokens that each query selects
    log_odds: Float[Tensor, " queries"]  # log(p_max/(1 − p_max)), accurate even if p_max is near 1
    tied: int  # Number of queries left out because the scores of a selected and another token are equal
    decided: float  # Share of queries with p_max ≥ ½ among those that see a token, averaged over scenes; NaN if none do

    @property
    def rows(self) -> Iterator[tuple[int, int, Bool[Tensor, " keys"]]]:
        """Scene, position and selected tokens O_i of each query, as an iterator."""
        return zip(self.scene.tolist(), self.position.tolist(), self.sets, strict=True)


@dataclass(frozen=True)
class HeadProblem:
    """The selection problem of a head, and the head's form in the problem's coordinates."""

    problem: Problem  # The problem; its queries are coordinates in an orthonormal basis of their span
    form: FactoredForm  # Form of the head in these coordinates
    token_of: Int[Tensor, " constraints"]  # Index, in its scene, of the token t in each constraint (x_α − x_t)ᵀ W z ≥ 1


def count_copies(tokens: Float[Tensor, "keys d"], allowed: Flags) -> Int[Tensor, "queries keys"]:
    """Return how many copies of each token each query sees, stored at the first visible copy; other entries are 0."""
    if not len(tokens):
        return allowed.int()
    kind = torch.unique(tokens, dim=0, return_inverse=True)[1]
    if int(kind.max()) + 1 == len(tokens):
        return allowed.int()
    same, visible = (kind[:, None] == kind).double(), allowed.double()
    earlier = visible @ same.triu(1)
    counts: Tensor = (visible @ same).masked_fill(~allowed | (earlier > 0), 0.0).int()
    return counts


def choose(
    scenes: Sequence[Scene], form: FactoredForm, softmax: Softmax, most: int = 64, top_p: float | None = None
) -> Selections:
    """Choose queries and the tokens that each selects; return up to `most` queries, those with the largest p_max.

    A query selects the token with the largest score, whose weight is p_max, or, with `top_p`, the fewest tokens with at
    least this share of the weight. A query is omitted if it selects all visible tokens, or if it sees less than half as
    many tokens as another query of its sequence (early in a causal sequence, p_max is near 1 because there are few
    tokens). A query is omitted and counted as a tie if scores of a selected and an unselected token are equal within
    TIE. Fewer are chosen if there would be more than MOST_CONSTRAINTS constraints or MOST_EQUALITIES equalities.
    """
    longest = max((len(scene.tokens) for scene in scenes), default=1)
    most = max(1, min(most, MOST_CONSTRAINTS // max(longest, 1)))
    odds_of_scenes, places, sets = [torch.empty(0, dtype=torch.float64)], list[tuple[int, int]](), list["Tensor"]()
    tied, decided = 0, list[float]()
    for number, scene in enumerate(scenes):
        scores, visible = form.scores(scene.tokens, scene.queries), scene.visible
        visible_counts = visible.sum(-1)
        log_weights = softmax.cap_scores(scores) + scene.log_copies
        masked = scores.masked_fill(~visible, -torch.inf)
        chosen = _select_tokens(masked, log_weights, softmax, top_p)
        gap = masked.masked_fill(~chosen, torch.inf).amin(-1) - masked.masked_fill(chosen, -torch.inf).amax(-1)
        eligible = gap.isfinite() & (2 * visible_counts >= visible_counts.max())
        clear = gap > TIE * scores.abs().amax(-1)  # strict: if all scores are zero, nothing is selected
        odds = log_odds(masked, log_weights, softmax)
        positions = (eligible & clear).nonzero().flatten()
        positions = positions[odds[positions].argsort(descending=True, stable=True)][:most]
        tied += int((eligible & ~clear).sum())
        decided.append(share_decided(odds))
        odds_of_scenes.append(odds[positions])
        places += [(number, position) for position in positions.tolist()]
        sets += list(chosen[positions])
    all_odds = torch.cat(odds_of_scenes)
    order = all_odds.argsort(descending=True, stable=True)[:most]
    equalities = torch.tensor([int(sets[index].sum()) - 1 for index in order.tolist()]).cumsum(0)
    order = order[: max(1, int((equalities <= MOST_EQUALITIES).sum()))]
    scene_of, position = torch.tensor(places, dtype=torch.long).reshape(-1, 2)[order].unbind(1)
    return Selections(
        scene=scene_of,
        position=position,
        sets=tuple(sets[index] for index in order.tolist()),
        log_odds=all_odds[order],
        tied=tied,
        decided=float(torch.tensor(decided, dtype=torch.float64).nanmean()),
    )


def share_decided(odds: Float[Tensor, " queries"]) -> float:
    """Return the share of queries with log-odds ≥ 0 (p_max ≥ ½) among those that see a token; NaN if none does."""
    return float((odds[~odds.isnan()] >= 0).double().mean())


def log_odds(masked: Scores, log_weights: Scores, softmax: Softmax) -> Float[Tensor, " queries"]:
    """Return log(p_max/(1 − p_max)) for every query, without cancellation; NaN if no token is visible.

    p_max is the weight of the token with the largest score. `masked` contains the scores, and `log_weights` the softmax
    logits plus the logarithms of the numbers of copies. Both are −∞ for hidden tokens. Without a sink, the result is +∞
    if a single token is visible.
    """
    best = masked.argmax(-1, keepdim=True)
    best_logit = log_weights.gather(-1, best).squeeze(-1)
    others = log_weights.scatter(-1, best, -torch.inf).logsumexp(-1)
    if softmax.sink is not None:
        others = others.logaddexp(others.new_tensor(softmax.sink))
        return torch.where(best_logit == -torch.inf, torch.nan, best_logit - others)
    return best_logit - others


def pose(scenes: Sequence[Scene], form: FactoredForm, chosen: Selections) -> HeadProblem:
    """Build the problem whose solutions W select the same tokens as the head: Gen-SVM of Tarzanagh et al. 2023.

    O_i are the tokens that query i selects. Each u is the first token of O_i minus another visible token. The
    constraints are uᵀ W z = 0 if the other token is in O_i, and uᵀ W z ≥ 1 otherwise. Raises UnposedError if no query
    was chosen.
    """
    differences, others, inside, query_of = list["Tensor"](), list["Tensor"](), list["Tensor"](), list["Tensor"]()
    queries = []
    for row, (number, position, selected) in enumerate(chosen.rows):
        scene = scenes[number]
        representative = int(selected.int().argmax())
        rivals = scene.visible[position]
        rivals[representative] = False
        others.append(rivals.nonzero().flatten())
        differences.append(scene.tokens[representative] - scene.tokens[others[-1]])
        inside.append(selected[others[-1]])
        query_of.append(torch.full_like(others[-1], row))
        queries.append(scene.queries[position])
    if not queries:
        raise UnposedError("No query selects a token.", "Pass sequences of at least two different tokens.")
    z, equal = torch.stack(queries), torch.cat(inside)
    basis = row_basis(z)
    problem = build_problem(torch.cat(differences), z @ basis, torch.cat(query_of), (~equal).double(), equal)
    return HeadProblem(problem, FactoredForm(form.left, basis.mT @ form.right), torch.cat(others))


def _select_tokens(masked: Scores, log_weights: Scores, softmax: Softmax, top_p: float | None) -> Flags:
    if top_p is None:
        order = masked.argmax(-1, keepdim=True)
        selected = torch.ones_like(order, dtype=torch.bool)
    else:
        order = masked.argsort(dim=-1, descending=True, stable=True)
        total = log_weights.logsumexp(-1, keepdim=True)
        if softmax.sink is not None:
            total = total.logaddexp(total.new_tensor(softmax.sink))
        shares = (log_weights - total).exp().nan_to_num(nan=0.0).gather(-1, order)
        selected = shares.cumsum(-1) - shares < top_p
    return torch.zeros_like(masked, dtype=torch.bool).scatter(-1, order, selected) & (masked > -torch.inf)


@dataclass(frozen=True)
class Nearness:
    """Comparison of a head's form M with the max-margin form for the same selections; M's scale affects only `norm`."""

    chosen: Selections  # The queries of the problem and the tokens that they select
    posed: HeadProblem  # The selection problem
    solution: Solution  # The certified solution W_mm of the problem
    best: float  # 1/‖W_mm‖_F, the best possible margin: the largest minimum margin of any form of unit norm
    norm: float
    """‖ΠM‖_F, where Π projects onto the spans of the token differences and of the queries. If sets of several tokens
    are selected, M − W_fin replaces M here, in `margins` and in `svm_cosine`."""
    margins: Float[Tensor, " queries"]  # Least (score_α − score_t)/`norm` of each query over the tokens t outside O_i
    svm_cosine: float  # ⟨M, W_mm⟩/(‖ΠM‖‖W_mm‖) in [−1, 1]

    @property
    def shares(self) -> Float[Tensor, " queries"]:
        """Margins divided by `best`. Their minimum (efficiency) is ≤ 1, and 1 only if ΠM has the direction of W_mm."""
        return self.margins / self.best


def compare_with_svm(scenes: Sequence[Scene], form: FactoredForm, chosen: Selections) -> Nearness | str:
    """Compare a head with the SVM of its selections, or return the reason why they cannot be compared.

    `scenes` are the scenes from which the queries were chosen, or some with the same scores. If sets of several tokens
    are selected, M − W_fin is compared with the SVM instead of M; W_fin is the form of least norm that has M's score
    differences inside the sets. Trained forms tend to W_fin + R · W_mm with growing R, so only M − W_fin can meet the
    equalities.
    """
    try:
        posed = pose(scenes, form, chosen)
    except UnposedError:
        if chosen.tied:
            return f"the largest scores are tied in all {chosen.tied} queries that see different tokens"
        return "no query sees two different tokens"
    solution = solve(posed.problem, tolerance=TOLERANCE)
    if solution.status == "infeasible":
        return "no form gives the selected tokens equal scores and separates them from the others"
    if solution.status == "inaccurate" or solution.norm is None:
        return f"the SVM was not solved: relative duality gap {solution.gap:.0e}"
    problem, form = posed.problem, posed.form
    gaps = problem.components((problem.queries @ form.right) @ form.left.mT)  # u_cᵀ M z_q(c)
    whole = projected_norm(problem, form)
    squared = whole**2
    if bool(problem.equal.any()):
        # W_fin solves the problem with only the equalities and the head's score differences: u W z = u M z.
        equalities = problem.equal.nonzero().flatten()
        finite = solve(replace(problem.select(equalities), margins=gaps[equalities]), tolerance=TOLERANCE)
        if finite.W is None:
            return "no form reproduces the head's score differences among the selected tokens"
        gaps = gaps - problem.scores(finite.W)
        squared -= float(finite.W.square().sum())
    # Strict: if M equals W_fin, rounding leaves at most this norm.
    if not squared > (SPAN * whole) ** 2:
        return "the head's form does not distinguish the tokens of these sequences"
    free, size = ~problem.equal, squared**0.5
    least = gaps.new_full((len(problem.queries),), torch.inf)
    least = least.scatter_reduce(0, problem.query_of[free], gaps[free], "amin") / size
    cosine = float(solution.multipliers[free] @ gaps[free]) / (size * solution.norm)
    return Nearness(chosen, posed, solution, 1 / solution.norm, size, least, cosine)


def projected_norm(problem: Problem, form: FactoredForm) -> float:
    """Return ‖ΠM‖_F, where Π projects onto span(U) ⊗ span(Z), the spans of the token differences and of the queries.

    The queries are already coordinates in span(Z).
    """
    left = row_span(problem.differences).mT @ form.left
    return float((left @ form.right.mT).norm())


def row_span(rows: Float[Tensor, "rows d"]) -> Float[Tensor, "d rank"]:
    """Return an orthonormal basis of the rows' span, from rowsᵀ rows; singular values below SPAN · σ₁ count as 0."""
    values, vectors = torch.linalg.eigh(rows.mT @ rows)
    basis: Tensor = vectors[:, values > SPAN**2 * values[-1:]]  # strict: equal tokens span nothing
    return basis
