"""Tests the nuclear-norm solver against golden instances, certificates and a conic solver."""

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import cvxpy
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlens.errors import AttnlensError
from attnlens.maths import attsvm
from attnlens.maths.attsvm import Problem, certify_nuclear, nuclear, nuclear_rank, solve, solve_nuclear

GOLDEN = Path(__file__).parents[1] / "data" / "attsvm_golden.json"
GOLDENS = json.loads(GOLDEN.read_text())
TIGHT = 1e-12


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def golden(name):
    facts = GOLDENS[name]
    tokens, queries = (torch.tensor(facts[key], dtype=torch.float64) for key in "XZ")
    return attsvm.selection(tokens, queries, torch.tensor(facts["best"]))


def separable(n=4, tokens=5, d=6, seed=0, **more):
    """A problem that some W, a random one, solves."""
    x, z, form = random(n, tokens, d, seed=seed), random(n, d, seed=seed + 1), random(d, d, seed=seed + 2)
    chosen = torch.einsum("ntd,de,ne->nt", x, form, z).argmax(-1)
    return attsvm.selection(x, z, chosen, **more)


def with_sets(seed=0):
    """Two tokens kept per query: equalities inside, inequalities outside."""
    sets = torch.zeros(3, 4, dtype=torch.bool)
    sets[:, :2] = True
    return attsvm.selection_sets(random(3, 4, 6, seed=seed), random(3, 6, seed=seed + 1), sets)


def mixed(seed):
    """Margins of both signs and 0 at inequalities, a few equalities with b ≠ 0."""
    problem = separable(4, 5, 8, seed=20 + seed)
    margins = 1 + 0.5 * random(len(problem.margins), seed=seed).clamp(-1, 1)
    margins[::5], margins[1::5] = 0.0, -0.5
    equal = torch.zeros_like(problem.equal)
    equal[2::7] = True
    return replace(problem, margins=margins, equal=equal)


def nuclear_norm(W):
    return float(torch.linalg.matrix_norm(W, "nuc"))


def oracle(problem):
    """‖W‖_* by a general convex solver, in its semidefinite form."""
    u, z, b = (part.numpy() for part in (problem.differences, problem.paired_queries, problem.margins))
    W, equal = cvxpy.Variable((u.shape[1], z.shape[1])), problem.equal.numpy()
    scores = cvxpy.sum(cvxpy.multiply(u @ W, z), axis=1)
    limits = [scores[~equal] >= b[~equal]] if (~equal).any() else []
    limits += [scores[equal] == b[equal]] if equal.any() else []
    posed = cvxpy.Problem(cvxpy.Minimize(cvxpy.normNuc(W)), limits)
    posed.solve(solver=cvxpy.CLARABEL)
    return posed.value


def assert_feasible(problem, W):
    slack = problem.scores(W) - problem.margins
    unit = float(problem.margins.abs().max())
    assert float(slack[~problem.equal].min() if (~problem.equal).any() else 0.0) >= -1e-11 * unit
    assert float(slack[problem.equal].abs().max() if problem.equal.any() else 0.0) <= 1e-10 * unit


# --- the published instances ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GOLDENS)
def test_golden_instances_are_met(name):
    facts, problem = GOLDENS[name], golden(name)
    found, frobenius = solve_nuclear(problem, tolerance=TIGHT), solve(problem)
    assert (found.status, found.residual) == ("optimal", None)
    assert found.norm == pytest.approx(facts["nuc_norm_of_nuc_solution"], rel=1e-6)
    values = torch.linalg.svdvals(found.W)
    expected = torch.tensor(facts["sv_nuc"], dtype=torch.float64)
    torch.testing.assert_close(values[: len(expected)], expected, rtol=1e-6, atol=1e-6)
    if "W_nuc" in facts:
        torch.testing.assert_close(found.W, torch.tensor(facts["W_nuc"]).double(), rtol=1e-6, atol=1e-6)
    cosine = (found.W * frobenius.W).sum() / (found.W.norm() * frobenius.W.norm())
    assert float(cosine) == pytest.approx(facts["corr_fro_nuc"], abs=1e-6)
    assert found.kkt < 1e-12
    assert found.least == pytest.approx(0.0, abs=1e-7)


@pytest.mark.parametrize("name", GOLDENS)
def test_the_default_tolerance_holds_its_gap(name):
    found = solve_nuclear(golden(name))
    assert found.gap <= 1e-4
    assert found.norm / GOLDENS[name]["nuc_norm_of_nuc_solution"] - 1 <= found.gap + 1e-9


def test_the_rank_is_the_golden_one_and_not_that_of_the_frobenius_solution():
    for name, facts in GOLDENS.items():
        problem = golden(name)
        assert nuclear_rank(solve_nuclear(problem, TIGHT).W) == sum(value > 1e-4 for value in facts["sv_nuc"])
    assert nuclear_rank(solve(golden("vis1")).W) == 2


def test_a_rank_counts_what_exceeds_its_share():
    matrix = torch.diag(torch.tensor([2.0, 3e-5, 1e-5], dtype=torch.float64))
    assert [nuclear_rank(matrix), nuclear_rank(matrix, 1e-4), nuclear_rank(matrix, 1e-6)] == [2, 1, 3]
    assert nuclear_rank(torch.zeros(3, 2).double()) == 0


# --- a general convex solver ----------------------------------------------------------------------------------------

CASES = {
    **{f"{seed}": lambda seed=seed: separable(seed=10 * seed) for seed in range(8)},
    "wide": lambda: separable(2, 4, 12, seed=5),
    "tall": lambda: separable(9, 3, 3, seed=7),
    "two tokens": lambda: separable(5, 2, 4, seed=8),
    "label margins": lambda: separable(seed=3, margins=torch.tensor([0.5, 1.0, 2.0, 4.0]).double()),
    **{f"sets {seed}": lambda seed=seed: with_sets(10 * seed) for seed in range(4)},
    **{f"mixed {seed}": lambda seed=seed: mixed(seed) for seed in range(4)},
    "causal": lambda: attsvm.causal(random(6, 7, seed=4), torch.tensor([0, 1, 0, 2, 4, 1])),
}


@pytest.mark.parametrize("case", CASES)
def test_the_norm_is_that_of_a_general_solver(case):
    problem = CASES[case]()
    found = solve_nuclear(problem, tolerance=1e-10)
    assert found.status == "optimal"
    assert_feasible(problem, found.W)
    assert nuclear_norm(found.W) == pytest.approx(found.norm, rel=1e-12)
    assert found.norm == pytest.approx(oracle(problem), rel=1e-6)


def test_equalities_alone_are_the_finite_part():
    sets = torch.tensor([[True, True, True, False], [False, True, True, False]])
    weights = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.0, 0.9, 0.1, 0.0]]).double()
    problem = attsvm.finite_part(random(2, 4, 5), random(2, 5, seed=1), weights, sets)
    assert problem.equal.all()
    found = solve_nuclear(problem, tolerance=1e-10)
    assert_feasible(problem, found.W)
    assert (found.status, found.least) == ("optimal", None)
    assert found.norm == pytest.approx(oracle(problem), rel=1e-6)


def test_repeated_equalities_change_nothing():
    once = with_sets(2)
    rows = torch.cat([torch.arange(len(once.margins)), once.equal.nonzero().flatten()])
    assert solve_nuclear(once.select(rows), 1e-8).norm == pytest.approx(solve_nuclear(once, 1e-8).norm, rel=1e-7)


@pytest.mark.parametrize("problem", [separable(10, 12, 8, seed=1), separable(6, 30, 9, seed=2)], ids=["square", "long"])
def test_a_working_set_finds_what_all_constraints_together_give(problem, monkeypatch):
    monkeypatch.setattr(nuclear, "SMALL", len(problem.margins))
    together = solve_nuclear(problem, tolerance=1e-9)
    monkeypatch.setattr(nuclear, "SMALL", 5)
    asked = []
    of_all = nuclear.solve_working_set
    monkeypatch.setattr(nuclear, "solve_working_set", lambda *given: asked.append(len(given[1])) or of_all(*given))
    grown = solve_nuclear(problem, tolerance=1e-9)
    assert (together.status, grown.status) == ("optimal", "optimal")
    assert grown.norm == pytest.approx(together.norm, rel=2e-9)
    assert len(asked) > 1
    assert max(asked) < len(problem.margins)
    assert_feasible(problem, grown.W)


# --- what a certificate promises ------------------------------------------------------------------------------------


@cache
def solved(sets):
    problem = with_sets(1) if sets else separable(seed=1)
    return problem, solve_nuclear(problem, tolerance=1e-10)


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10**6), noise=st.sampled_from([1e-9, 1e-3, 0.3, 3.0, 1e3]), sets=st.booleans())
def test_no_multipliers_and_no_form_certify_more_than_the_optimum(seed, noise, sets):
    problem, best = solved(sets)
    multipliers = best.multipliers + noise * random(len(best.multipliers), seed=seed)
    found = certify_nuclear(problem, multipliers, best.W + noise * random(*best.W.shape, seed=seed + 1))
    if found.W is None:
        assert (found.status, found.norm, found.gap) == ("inaccurate", None, math.inf)
        assert noise >= 0.3
        return
    assert_feasible(problem, found.W)
    assert found.norm >= best.norm * (1 - 1e-9)
    assert found.norm * (1 - found.gap) <= best.norm * (1 + 1e-9)
    assert 0 <= found.gap <= 1


def test_multipliers_below_zero_would_certify_too_much_and_are_dropped():
    """The control: with every constraint an equality the norm is larger, and its λ would claim that larger norm."""
    problem = separable(seed=1)
    best, tied = (solve_nuclear(replace(problem, equal=e), 1e-10) for e in (problem.equal, ~problem.equal))
    claim = float(problem.margins @ tied.multipliers / torch.linalg.matrix_norm(problem.form(tied.multipliers), 2))
    assert claim > best.norm * 1.02
    assert (tied.multipliers < 0).any()
    found = certify_nuclear(problem, tied.multipliers, tied.W)
    assert found.norm * (1 - found.gap) <= best.norm


def test_multipliers_of_the_optimum_have_operator_norm_one_and_pay_for_the_whole_norm():
    problem = separable(seed=4)
    found = solve_nuclear(problem, TIGHT)
    form = problem.form(found.multipliers)
    assert float(torch.linalg.matrix_norm(form, 2)) == pytest.approx(1.0, rel=1e-12)
    assert float(found.multipliers.sum()) == pytest.approx(found.norm, rel=1e-10)
    left, _, right = torch.linalg.svd(found.W)
    rank = nuclear_rank(found.W)
    # the subgradient: M = U Vᵀ on W's range, and no more than 1 off it
    torch.testing.assert_close(left[:, :rank].mT @ form @ right[:rank].mT, torch.eye(rank).double(), atol=1e-9, rtol=0)


def test_the_support_carries_the_solution_and_the_rest_is_idle():
    problem = separable(6, 8, 6, seed=6)
    found = solve_nuclear(problem, TIGHT)
    carrying = found.support.nonzero().flatten()
    assert 0 < len(carrying) < len(problem.margins)
    torch.testing.assert_close(problem.scores(found.W)[carrying], problem.margins[carrying], atol=1e-9, rtol=0)
    alone = solve_nuclear(problem.select(carrying), TIGHT)
    assert alone.norm == pytest.approx(found.norm, rel=1e-9)
    fewer = solve_nuclear(problem.select(carrying[1:]), TIGHT)
    assert fewer.norm < found.norm * (1 - 1e-6)


def test_too_few_steps_are_inaccurate_and_say_how_far_off():
    problem = separable(seed=2)
    best = solve_nuclear(problem, TIGHT)
    gaps = []
    for limit in (2, 4, 6):
        found = solve_nuclear(problem, tolerance=1e-8, limit=limit)
        assert (found.status, found.iterations) == ("inaccurate", limit)
        gaps.append(found.gap)
        if found.norm is not None:
            assert found.norm * (1 - found.gap) <= best.norm <= found.norm * (1 + 1e-12)
    assert gaps[0] > gaps[1] > gaps[2] > 1e-8


# --- no solution, and none needed -----------------------------------------------------------------------------------


def contradictory():
    """u and −u for the same query."""
    u, free = random(1, 5), torch.zeros(2, dtype=torch.bool)
    return Problem(torch.cat([u, -u]), random(1, 5, seed=1), torch.zeros(2, dtype=torch.long), free + 1.0, free)


def duplicate():
    tokens = random(2, 4, 5)
    tokens[0, 1] = tokens[0, 0]
    return attsvm.selection(tokens, random(2, 5, seed=1), torch.tensor([0, 0]))


@pytest.mark.parametrize("pose", [contradictory, duplicate])
def test_an_infeasible_problem_returns_its_proof_and_no_form(pose):
    problem = replace(pose(), margins=pose().margins.double())
    found = solve_nuclear(problem)
    assert (found.status, found.W, found.norm, found.gap) == ("infeasible", None, None, None)
    assert float(found.multipliers.min()) >= 0
    assert float(found.multipliers.sum()) == pytest.approx(1.0)
    assert float(problem.form(found.multipliers).norm()) <= 1e-9


def test_no_constraint_is_an_error():
    nothing = separable().select(torch.zeros(0, dtype=torch.long))
    with pytest.raises(AttnlensError):
        solve_nuclear(nothing)


def test_margins_of_zero_ask_for_nothing():
    problem = separable()
    found = solve_nuclear(replace(problem, margins=torch.zeros_like(problem.margins)))
    assert (found.norm, found.gap, found.status) == (0.0, 0.0, "optimal")


# --- against the Frobenius norm -------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 5), tokens=st.integers(2, 5), d=st.integers(2, 8))
def test_each_solution_is_least_in_its_own_norm(seed, n, tokens, d):
    problem = separable(n, tokens, d, seed=seed)
    ours, other = solve_nuclear(problem, 1e-9), solve(problem)
    assert ours.norm <= nuclear_norm(other.W) * (1 + 1e-8)
    assert float(ours.W.norm()) >= other.norm * (1 - 1e-8)
    assert other.norm <= ours.norm * (1 + 1e-8) <= math.sqrt(min(n, d)) * other.norm * (1 + 2e-8)
    assert nuclear_rank(ours.W) <= min(n, d)


def test_the_two_norms_are_told_apart():
    problem = separable(6, 8, 10, seed=3)
    ours, other = solve_nuclear(problem, 1e-9), solve(problem)
    assert ours.norm < 0.98 * nuclear_norm(other.W)
    assert float(ours.W.norm()) > 1.02 * other.norm


def test_with_one_query_both_norms_agree():
    problem = attsvm.prompt(random(3, 4, 6), torch.tensor([0, 1, 2]))
    ours, other = solve_nuclear(problem, TIGHT), solve(problem)
    assert ours.norm == pytest.approx(other.norm, rel=1e-9)
    torch.testing.assert_close(ours.W, other.W, rtol=1e-7, atol=1e-8)
    assert nuclear_rank(ours.W) == 1


def test_equal_queries_are_one_query():
    problem = attsvm.selection(random(3, 4, 6), random(1, 6, seed=1).expand(3, 6), torch.tensor([0, 1, 2]))
    found = solve_nuclear(problem, 1e-9)
    assert nuclear_rank(found.W) == 1
    assert found.norm == pytest.approx(solve(problem).norm, rel=1e-7)


def test_one_constraint_has_its_closed_form():
    u, z = random(1, 5), random(1, 3, seed=1)
    flag = torch.zeros(1, dtype=torch.bool)
    found = solve_nuclear(Problem(u, z, torch.zeros(1, dtype=torch.long), torch.tensor([2.0]).double(), flag), TIGHT)
    torch.testing.assert_close(found.W, 2 * u.mT @ z / (u.square().sum() * z.square().sum()))
    assert found.norm == pytest.approx(2 / float(u.norm() * z.norm()), rel=1e-12)


# --- laws -----------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=10)
@given(powers=st.tuples(*[st.floats(-4, 4)] * 3))
def test_the_norm_scales_as_the_margins_over_tokens_and_queries(powers):
    u, z, b = (10.0**power for power in powers)
    problem = separable(seed=5)
    scaled = replace(
        problem, differences=u * problem.differences, queries=z * problem.queries, margins=b * problem.margins
    )
    one, other = solve_nuclear(problem, 1e-9), solve_nuclear(scaled, 1e-9)
    assert other.norm == pytest.approx(one.norm * b / (u * z), rel=1e-8)
    assert torch.equal(one.support, other.support)


def test_turning_tokens_and_queries_turns_the_form():
    problem = separable(seed=7)
    left, right = (torch.linalg.qr(random(6, 6, seed=seed)).Q for seed in (1, 2))
    turned = replace(problem, differences=problem.differences @ left.mT, queries=problem.queries @ right.mT)
    one, other = solve_nuclear(problem, TIGHT), solve_nuclear(turned, TIGHT)
    torch.testing.assert_close(other.W, left @ one.W @ right.mT, rtol=1e-7, atol=1e-8)


def test_dimensions_that_no_token_uses_cost_nothing():
    problem = separable(seed=8)
    left, right = (torch.linalg.qr(random(40, 6, seed=seed)).Q for seed in (1, 2))
    wide = replace(problem, differences=problem.differences @ left.mT, queries=problem.queries @ right.mT)
    one, other = solve_nuclear(problem, 1e-9), solve_nuclear(wide, 1e-9)
    assert other.W.shape == (40, 40)
    assert nuclear.row_basis(wide.differences).shape == (40, 6)
    assert other.norm == pytest.approx(one.norm, rel=1e-8)


def test_order_of_constraints_does_not_matter():
    problem = separable(5, 6, 5, seed=9)
    order = torch.randperm(len(problem.margins), generator=torch.Generator().manual_seed(0))
    one, other = solve_nuclear(problem, 1e-9), solve_nuclear(problem.select(order), 1e-9)
    assert other.norm == pytest.approx(one.norm, rel=1e-8)
    assert torch.equal(one.support[order], other.support)


def test_the_oracle_is_read_right():
    """A control: for diagonal constraints e_i W e_i ≥ b_i the least nuclear norm is Σ b."""
    eye, flag = torch.eye(3).double(), torch.zeros(3, dtype=torch.bool)
    problem = Problem(eye, eye, torch.arange(3), torch.tensor([1.0, 2.0, 3.0]).double(), flag)
    assert oracle(problem) == pytest.approx(6.0, rel=1e-7)
    found = solve_nuclear(problem, 1e-9)
    assert found.norm == pytest.approx(6.0, rel=1e-9)
    np.testing.assert_allclose(found.W.numpy(), np.diag([1.0, 2.0, 3.0]), atol=1e-6)
