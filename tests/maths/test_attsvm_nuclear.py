"""Tests the nuclear-norm solver against golden instances, certificates and a conic solver."""

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import cvxpy
import pytest
import torch
from heads import random
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlens.maths import attsvm
from attnlens.maths.attsvm import Problem, certify_nuclear, nuclear, nuclear_rank, solve, solve_nuclear

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "attsvm_golden.json").read_text())
TIGHT = 1e-12


def golden(name):
    tokens, queries = (torch.tensor(GOLDEN[name][key], dtype=torch.float64) for key in "XZ")
    return attsvm.selection(tokens, queries, torch.tensor(GOLDEN[name]["best"]))


def separable(n=4, tokens=5, d=6, seed=0, **more):
    """A problem that some W, a random one, solves."""
    x, z, form = random(n, tokens, d, seed=seed), random(n, d, seed=seed + 1), random(d, d, seed=seed + 2)
    return attsvm.selection(x, z, torch.einsum("ntd,de,ne->nt", x, form, z).argmax(-1), **more)


def with_sets(seed=0):
    """Two tokens selected per query: equalities inside, inequalities outside."""
    sets = (torch.arange(4) < 2).expand(3, 4)
    return attsvm.selection_sets(random(3, 4, 6, seed=seed), random(3, 6, seed=seed + 1), sets)


def mixed(seed):
    """Margins of both signs and 0 at inequalities, a few equalities with b ≠ 0."""
    problem = separable(4, 5, 8, seed=20 + seed)
    margins = 1 + 0.5 * random(len(problem.margins), seed=seed).clamp(-1, 1)
    margins[::5], margins[1::5] = 0.0, -0.5
    equal = torch.zeros_like(problem.equal)
    equal[2::7] = True
    return replace(problem, margins=margins, equal=equal)


def free(u, z, query_of, margins):
    """A problem of inequalities only."""
    return Problem(u, z, torch.as_tensor(query_of), torch.tensor(margins).double(), torch.zeros(len(u)).bool())


def nuclear_norm(W):
    return float(torch.linalg.matrix_norm(W, "nuc"))


def oracle(problem):
    """‖W‖_* by a general convex solver, in its semidefinite form."""
    u, z, b = (part.numpy() for part in (problem.differences, problem.paired_queries, problem.margins))
    W, equal = cvxpy.Variable((u.shape[1], z.shape[1])), problem.equal.numpy()
    scores = cvxpy.sum(cvxpy.multiply(u @ W, z), axis=1)
    limits = [scores[~equal] >= b[~equal]] if (~equal).any() else []
    limits += [scores[equal] == b[equal]] if equal.any() else []
    return cvxpy.Problem(cvxpy.Minimize(cvxpy.normNuc(W)), limits).solve(solver=cvxpy.CLARABEL)


def assert_feasible(problem, W):
    slack, unit = problem.scores(W) - problem.margins, float(problem.margins.abs().max())
    assert float(slack[~problem.equal].min() if (~problem.equal).any() else 0.0) >= -1e-11 * unit
    assert float(slack[problem.equal].abs().max() if problem.equal.any() else 0.0) <= 1e-10 * unit


def test_golden_solutions():
    for name, case in GOLDEN.items():
        answer, frobenius = solve_nuclear(golden(name), tolerance=TIGHT), solve(golden(name))
        assert (answer.status, answer.residual) == ("optimal", None)
        assert answer.norm == pytest.approx(case["nuc_norm_of_nuc_solution"], rel=1e-6)
        expected = torch.tensor(case["sv_nuc"], dtype=torch.float64)
        values = torch.linalg.svdvals(answer.W)[: len(expected)]
        torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-6)
        assert nuclear_rank(answer.W) == (expected > 1e-4).sum()
        if "W_nuc" in case:
            torch.testing.assert_close(answer.W, torch.tensor(case["W_nuc"]).double(), rtol=1e-6, atol=1e-6)
        cosine = (answer.W * frobenius.W).sum() / (answer.W.norm() * frobenius.W.norm())
        assert float(cosine) == pytest.approx(case["corr_fro_nuc"], abs=1e-6)
        assert answer.kkt < 1e-12
        assert answer.least == pytest.approx(0.0, abs=1e-7)
        default = solve_nuclear(golden(name))
        assert default.gap <= 1e-4, "as the docstring states"
        assert default.norm / case["nuc_norm_of_nuc_solution"] - 1 <= default.gap + 1e-9
    assert "1e-4" in solve_nuclear.__doc__
    assert nuclear_rank(solve(golden("vis1")).W) == 2, "control: the Frobenius solution has another rank"


def test_rank_counts_values_above_a_share_of_the_largest():
    matrix = torch.diag(torch.tensor([2.0, 3e-5, 1e-5], dtype=torch.float64))
    assert [nuclear_rank(matrix), nuclear_rank(matrix, 1e-4), nuclear_rank(matrix, 1e-6)] == [2, 1, 3]
    assert nuclear_rank(torch.zeros(3, 2).double()) == 0


CASES = {
    **{f"{seed}": lambda seed=seed: separable(seed=10 * seed) for seed in range(3)},
    "wide": lambda: separable(2, 4, 12, seed=5),
    "tall": lambda: separable(9, 3, 3, seed=7),
    "two tokens": lambda: separable(5, 2, 4, seed=8),
    "label margins": lambda: separable(seed=3, margins=torch.tensor([0.5, 1.0, 2.0, 4.0]).double()),
    **{f"sets {seed}": lambda seed=seed: with_sets(10 * seed) for seed in range(2)},
    **{f"mixed {seed}": lambda seed=seed: mixed(seed) for seed in range(3)},
    "causal": lambda: attsvm.causal(random(6, 7, seed=4), torch.tensor([0, 1, 0, 2, 4, 1])),
}


@pytest.mark.parametrize("case", CASES)
def test_norm_is_that_of_a_general_solver(case):
    problem = CASES[case]()
    answer = solve_nuclear(problem, tolerance=1e-10)
    assert answer.status == "optimal"
    assert_feasible(problem, answer.W)
    assert nuclear_norm(answer.W) == pytest.approx(answer.norm, rel=1e-12)
    assert answer.norm == pytest.approx(oracle(problem), rel=1e-6)


def test_equalities_alone_and_repeated():
    sets = torch.tensor([[True, True, True, False], [False, True, True, False]])
    weights = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.0, 0.9, 0.1, 0.0]]).double()
    problem = attsvm.finite_part(random(2, 4, 5), random(2, 5, seed=1), weights, sets)
    assert problem.equal.all()
    answer = solve_nuclear(problem, tolerance=1e-10)
    assert_feasible(problem, answer.W)
    assert (answer.status, answer.least) == ("optimal", None)
    assert answer.norm == pytest.approx(oracle(problem), rel=1e-6)
    once = with_sets(2)
    rows = torch.cat([torch.arange(len(once.margins)), once.equal.nonzero().flatten()])
    assert solve_nuclear(once.select(rows), 1e-8).norm == pytest.approx(solve_nuclear(once, 1e-8).norm, rel=1e-7)


@pytest.mark.parametrize("sizes", [(10, 12, 8, 1), (6, 30, 9, 2)], ids=["square", "long"])
def test_a_working_set_finds_what_all_constraints_together_give(sizes, monkeypatch):
    problem, steps, step = separable(*sizes), [], nuclear.solve_working_set
    monkeypatch.setattr(nuclear, "SMALL", len(problem.margins))
    together = solve_nuclear(problem, tolerance=1e-9)
    monkeypatch.setattr(nuclear, "SMALL", 5)
    monkeypatch.setattr(nuclear, "solve_working_set", lambda *args: steps.append(len(args[1])) or step(*args))
    grown = solve_nuclear(problem, tolerance=1e-9)
    assert (together.status, grown.status) == ("optimal", "optimal")
    assert grown.norm == pytest.approx(together.norm, rel=2e-9)
    assert len(steps) > 1
    assert max(steps) < len(problem.margins)
    assert_feasible(problem, grown.W)


# --- certificates -----------------------------------------------------------------------------------------------------


@cache
def solved(sets):
    problem = with_sets(1) if sets else separable(seed=1)
    return problem, solve_nuclear(problem, tolerance=1e-10)


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10**6), noise=st.sampled_from([1e-9, 1e-3, 0.3, 3.0, 1e3]), sets=st.booleans())
def test_no_multipliers_and_no_form_certify_more_than_the_optimum(seed, noise, sets):
    problem, best = solved(sets)
    multipliers = best.multipliers + noise * random(len(best.multipliers), seed=seed)
    answer = certify_nuclear(problem, multipliers, best.W + noise * random(*best.W.shape, seed=seed + 1))
    if answer.W is None:
        assert (answer.status, answer.norm, answer.gap) == ("inaccurate", None, math.inf)
        assert noise >= 0.3
        return
    assert_feasible(problem, answer.W)
    assert answer.norm >= best.norm * (1 - 1e-9)
    assert answer.norm * (1 - answer.gap) <= best.norm * (1 + 1e-9)
    assert 0 <= answer.gap <= 1


def test_negative_multipliers_would_certify_too_much_and_are_dropped():
    """The control: with every constraint an equality the norm is larger, and its λ would claim that larger norm."""
    problem = separable(seed=1)
    best, tied = (solve_nuclear(replace(problem, equal=e), 1e-10) for e in (problem.equal, ~problem.equal))
    claim = float(problem.margins @ tied.multipliers / torch.linalg.matrix_norm(problem.form(tied.multipliers), 2))
    assert claim > best.norm * 1.02
    assert (tied.multipliers < 0).any()
    answer = certify_nuclear(problem, tied.multipliers, tied.W)
    assert answer.norm * (1 - answer.gap) <= best.norm


def test_multipliers_of_the_optimum_are_a_subgradient_that_pays_for_the_whole_norm():
    problem = separable(seed=4)
    answer = solve_nuclear(problem, TIGHT)
    form, rank = problem.form(answer.multipliers), nuclear_rank(answer.W)
    assert float(torch.linalg.matrix_norm(form, 2)) == pytest.approx(1.0, rel=1e-12)
    assert float(answer.multipliers.sum()) == pytest.approx(answer.norm, rel=1e-10)
    left, _, right = torch.linalg.svd(answer.W)  # M = U Vᵀ on W's range, and no more than 1 off it
    torch.testing.assert_close(left[:, :rank].mT @ form @ right[:rank].mT, torch.eye(rank).double(), atol=1e-9, rtol=0)


def test_the_support_carries_the_solution():
    problem = separable(6, 8, 6, seed=6)
    answer = solve_nuclear(problem, TIGHT)
    support = answer.support.nonzero().flatten()
    assert 0 < len(support) < len(problem.margins)
    torch.testing.assert_close(problem.scores(answer.W)[support], problem.margins[support], atol=1e-9, rtol=0)
    assert solve_nuclear(problem.select(support), TIGHT).norm == pytest.approx(answer.norm, rel=1e-9)
    assert solve_nuclear(problem.select(support[1:]), TIGHT).norm < answer.norm * (1 - 1e-6)


def test_too_few_steps_are_inaccurate_and_report_their_gap():
    problem, gaps = separable(seed=2), []
    best = solve_nuclear(problem, TIGHT)
    for limit in (2, 4, 6):
        answer = solve_nuclear(problem, tolerance=1e-8, limit=limit)
        assert (answer.status, answer.iterations) == ("inaccurate", limit)
        gaps.append(answer.gap)
        if answer.norm is not None:
            assert answer.norm * (1 - answer.gap) <= best.norm <= answer.norm * (1 + 1e-12)
    assert gaps[0] > gaps[1] > gaps[2] > 1e-8


def test_an_infeasible_problem_returns_its_proof_and_no_form():
    u, tokens = random(1, 5), random(2, 4, 5)
    tokens[0, 1] = tokens[0, 0]
    contradictory = free(torch.cat([u, -u]), random(1, 5, seed=1), [0, 0], [1.0, 1.0])
    duplicate = attsvm.selection(tokens, random(2, 5, seed=1), torch.tensor([0, 0]))
    for problem in (contradictory, duplicate):
        answer = solve_nuclear(problem)
        assert (answer.status, answer.W, answer.norm, answer.gap) == ("infeasible", None, None, None)
        assert float(answer.multipliers.min()) >= 0
        assert float(answer.multipliers.sum()) == pytest.approx(1.0)
        assert float(problem.form(answer.multipliers).norm()) <= 1e-9


# --- laws -------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 5), tokens=st.integers(2, 5), d=st.integers(2, 8))
def test_each_solution_is_least_in_its_own_norm(seed, n, tokens, d):
    problem = separable(n, tokens, d, seed=seed)
    ours, other = solve_nuclear(problem, 1e-9), solve(problem)
    assert ours.norm <= nuclear_norm(other.W) * (1 + 1e-8)
    assert float(ours.W.norm()) >= other.norm * (1 - 1e-8)
    assert other.norm <= ours.norm * (1 + 1e-8) <= math.sqrt(min(n, d)) * other.norm * (1 + 2e-8)
    assert nuclear_rank(ours.W) <= min(n, d)


def test_the_two_norms_agree_for_one_query_and_differ_for_several():
    problem = separable(6, 8, 10, seed=3)
    ours, other = solve_nuclear(problem, 1e-9), solve(problem)
    assert ours.norm < 0.98 * nuclear_norm(other.W)
    assert float(ours.W.norm()) > 1.02 * other.norm
    problem = attsvm.prompt(random(3, 4, 6), torch.tensor([0, 1, 2]))
    ours, other = solve_nuclear(problem, TIGHT), solve(problem)
    assert ours.norm == pytest.approx(other.norm, rel=1e-9)
    torch.testing.assert_close(ours.W, other.W, rtol=1e-7, atol=1e-8)
    assert nuclear_rank(ours.W) == 1
    problem = attsvm.selection(random(3, 4, 6), random(1, 6, seed=1).expand(3, 6), torch.tensor([0, 1, 2]))
    equal_queries = solve_nuclear(problem, 1e-9)
    assert nuclear_rank(equal_queries.W) == 1
    assert equal_queries.norm == pytest.approx(solve(problem).norm, rel=1e-7)


def test_solutions_known_in_closed_form():
    u, z, eye = random(1, 5), random(1, 3, seed=1), torch.eye(3).double()
    answer = solve_nuclear(free(u, z, [0], [2.0]), TIGHT)
    torch.testing.assert_close(answer.W, 2 * u.mT @ z / (u.square().sum() * z.square().sum()))
    assert answer.norm == pytest.approx(2 / float(u.norm() * z.norm()), rel=1e-12)
    diagonal = free(eye, eye, [0, 1, 2], [1.0, 2.0, 3.0])  # of e_i W e_i ≥ b_i the least norm is Σ b
    assert oracle(diagonal) == pytest.approx(6.0, rel=1e-7), "control: the oracle"
    answer = solve_nuclear(diagonal, 1e-9)
    assert answer.norm == pytest.approx(6.0, rel=1e-9)
    torch.testing.assert_close(answer.W, torch.diag(diagonal.margins), rtol=0, atol=1e-6)
    problem = separable()
    nothing = solve_nuclear(replace(problem, margins=torch.zeros_like(problem.margins)))
    assert (nothing.norm, nothing.gap, nothing.status) == (0.0, 0.0, "optimal")


@settings(deadline=None, max_examples=10)
@given(powers=st.tuples(*[st.floats(-4, 4)] * 3))
def test_the_norm_scales_as_the_margins_over_tokens_and_queries(powers):
    u, z, b = (10.0**power for power in powers)
    one = separable(seed=5)
    other = replace(one, differences=u * one.differences, queries=z * one.queries, margins=b * one.margins)
    plain, scaled = solve_nuclear(one, 1e-9), solve_nuclear(other, 1e-9)
    assert scaled.norm == pytest.approx(plain.norm * b / (u * z), rel=1e-8)
    assert torch.equal(plain.support, scaled.support)


def test_bases_unused_dimensions_and_order_do_not_matter():
    for size, seed in ((6, 7), (40, 8)):
        problem = separable(seed=seed)
        left, right = (torch.linalg.qr(random(size, 6, seed=seed)).Q for seed in (1, 2))
        turned = replace(problem, differences=problem.differences @ left.mT, queries=problem.queries @ right.mT)
        one, other = solve_nuclear(problem, TIGHT), solve_nuclear(turned, TIGHT)
        torch.testing.assert_close(other.W, left @ one.W @ right.mT, rtol=1e-7, atol=1e-8)
        assert other.norm == pytest.approx(one.norm, rel=1e-8)
        assert nuclear.row_basis(turned.differences).shape == (size, 6)
    problem = separable(5, 6, 5, seed=9)
    order = torch.randperm(len(problem.margins), generator=torch.Generator().manual_seed(0))
    one, other = solve_nuclear(problem, 1e-9), solve_nuclear(problem.select(order), 1e-9)
    assert other.norm == pytest.approx(one.norm, rel=1e-8)
    assert torch.equal(one.support[order], other.support)
