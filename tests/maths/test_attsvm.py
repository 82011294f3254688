"""Tests that the solved direction is the max-margin one, and that every claim about it is a proof."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import cvxpy
import numpy as np
import pytest
import torch
from attsvm_oracle import dense, oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from attnlens.errors import UnposedError, UsageError
from attnlens.maths.attsvm import Problem, certify, frobenius, prompt, selection, separable, soft_margin, solve

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "attsvm_golden.json").read_text())


def drawn(seed: int, n: int = 6, length: int = 8, d: int = 10) -> Problem:
    """A random selection problem; feasible for almost all data when d ≥ max(length − 1, n)."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(n, length, d, generator=generator).double()
    queries = torch.randn(n, d, generator=generator).double()
    return selection(tokens, queries, torch.randint(0, length, (n,), generator=generator))


def varied(seed: int) -> Problem:
    """The same with label margins and, for some constraints, equalities with b = 0 and b ≠ 0."""
    generator = torch.Generator().manual_seed(seed)
    problem = drawn(seed)
    count = len(problem.margins)
    margins = 0.2 + 2.0 * torch.rand(count, generator=generator).double()
    margins[torch.rand(count, generator=generator) < 0.1] = 0.0
    margins[torch.rand(count, generator=generator) < 0.1] = -0.5
    equal = torch.rand(count, generator=generator) < 0.25
    margins[equal & (torch.rand(count, generator=generator) < 0.5)] = 0.0
    return replace(problem, margins=margins, equal=equal)


def feasible(problem: Problem) -> bool:
    """Whether a linear program finds a W."""
    rows, bounds, equal = dense(problem), problem.margins.numpy(), problem.equal.numpy()
    found = linprog(
        np.zeros(rows.shape[1]),
        A_ub=-rows[~equal],
        b_ub=-bounds[~equal],
        A_eq=rows[equal] if equal.any() else None,
        b_eq=bounds[equal] if equal.any() else None,
        bounds=(None, None),
    )
    assert found.status in (0, 2)
    return found.status == 0


def golden(name: str) -> Problem:
    case = GOLDEN[name]
    return selection(torch.tensor(case["X"]), torch.tensor(case["Z"]), torch.tensor(case["best"]))


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_solution(name: str) -> None:
    case, answer = GOLDEN[name], solve(golden(name))
    assert answer.status == "optimal"
    assert answer.norm == pytest.approx(case["fro_norm"], abs=1e-6)
    assert int(answer.support.sum()) == case["support_constraints"]
    assert torch.linalg.svdvals(answer.W).numpy() == pytest.approx(np.array(case["sv_fro"]), abs=1e-6)
    assert float(golden(name).scores(answer.W).min()) == pytest.approx(case["min_margin"], abs=1e-9)
    if "W_fro" in case:
        assert answer.W.numpy() == pytest.approx(np.array(case["W_fro"]), abs=1e-6)


def test_another_choice_is_another_solution() -> None:
    case = GOLDEN["vis2"]
    other = solve(selection(torch.tensor(case["X"]), torch.tensor(case["Z"]), torch.tensor([1, 0])))
    assert other.status == "infeasible" or abs(other.norm - case["fro_norm"]) > 1e-2


TRIPLE = [[-0.1, 1.0], [1.0, 0.0], [0.0, 0.0]]
PAIRS = [[[0.0, 0.0], [1.0, 1.0]], [[0.0, 0.0], [1.0, -1.0]], [[0.0, 0.0], [0.5, 1.0]]]


@pytest.mark.parametrize(
    ("tokens", "chosen", "half"), [([TRIPLE], [0], 0.4950495), ([TRIPLE], [1], 0.5), (PAIRS, [1, 1, 1], 17 / 18)]
)
def test_golden_prompt(tokens: list, chosen: list[int], half: float) -> None:
    answer = solve(prompt(torch.tensor(tokens).double(), torch.tensor(chosen)))
    assert answer.norm**2 / 2 == pytest.approx(half, abs=1e-6)
    assert answer.W.shape == (2, 1)


@pytest.mark.parametrize("seed", range(8))
def test_norm_is_a_general_solvers(seed: int) -> None:
    for problem in (drawn(seed), varied(seed), drawn(seed, n=30, length=12, d=20)):
        answer = solve(problem)
        assert answer.status == "optimal"
        assert answer.gap <= 1e-9
        assert answer.kkt <= 1e-9
        assert answer.norm == pytest.approx(oracle(problem), rel=1e-6)
        assert (answer.multipliers[~problem.equal] >= 0.0).all()
        slack = problem.scores(answer.W) - problem.margins
        assert float(slack[~problem.equal].min()) >= -1e-9
        assert float(slack[problem.equal].abs().max() if problem.equal.any() else 0.0) <= 1e-9


def test_every_constraint_needs_to_be_in() -> None:
    """Control: without the support, the solution is shorter, so that the oracle's norm is no accident."""
    problem = drawn(0)
    loose = solve(problem).support.logical_not()
    fewer = Problem(
        problem.differences[loose],
        problem.queries,
        problem.query_of[loose],
        problem.margins[loose],
        problem.equal[loose],
    )
    assert solve(fewer).norm < 0.99 * solve(problem).norm


def test_separability_is_a_linear_programs() -> None:
    counts = {True: 0, False: 0}
    for seed in range(240):
        generator = np.random.default_rng(seed)
        problem = drawn(seed, *(int(generator.integers(low, high)) for low, high in ((1, 9), (2, 9), (1, 7))))
        verdict = separable(problem)
        assert verdict.verdict == feasible(problem)
        counts[verdict.verdict] += 1
        if not verdict.verdict:
            assert solve(problem).W is None
            assert (verdict.multipliers >= 0.0).all()
            assert float(verdict.multipliers.sum()) == pytest.approx(1.0)
            assert float(problem.form(verdict.multipliers).norm()) <= 1e-9
            assert verdict.distance <= 1e-9
    assert min(counts.values()) >= 60


def test_separability_with_equalities_is_a_linear_programs() -> None:
    counts = {True: 0, False: 0}
    for seed in range(120):
        generator = torch.Generator().manual_seed(seed)
        problem = drawn(seed, n=4, length=6, d=3 if seed % 2 else 2)
        equal = torch.rand(len(problem.margins), generator=generator) < 0.15
        margins = torch.where(equal, (seed % 3 - 1.0) * torch.randn(len(equal), generator=generator).double(), 1.0)
        problem = replace(problem, equal=equal, margins=margins)
        answer = solve(problem)
        assert (answer.status == "infeasible") != feasible(problem)
        counts[answer.status == "infeasible"] += 1
        if answer.status == "infeasible":
            assert float(answer.multipliers @ margins) > 1e-6
            assert answer.residual <= 1e-9
    assert min(counts.values()) >= 20


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 40), st.floats(0.0, 10.0), st.integers(0, 1000))
def test_gap_is_a_bound_for_any_multipliers(seed: int, strength: float, noise: int) -> None:
    problem = (drawn, varied)[seed % 2](seed)
    best = solve(problem)
    off = torch.randn(len(best.multipliers), generator=torch.Generator().manual_seed(noise)).double()
    answer = certify(problem, best.multipliers + strength * off * best.multipliers.abs().mean())
    assert answer.status != "infeasible"
    if answer.gap < math.inf:
        assert answer.norm >= best.norm * (1.0 - 1e-9)
        assert answer.norm**2 * (1.0 - answer.gap) <= best.norm**2 * (1.0 + 1e-9)
    assert strength < 0.1 or answer.status == "inaccurate"


def test_no_multipliers_prove_nothing() -> None:
    """Control: an infinite primal value never passes for a closed gap."""
    problem = drawn(0)
    answer = certify(problem, torch.zeros(len(problem.margins)).double())
    assert answer.status == "inaccurate"
    assert answer.gap == math.inf


def test_step_limit_is_inaccurate_with_a_gap() -> None:
    answer = solve(drawn(0, n=40, length=20, d=30), limit=1)
    assert answer.status == "inaccurate"
    assert answer.gap > 1e-9
    assert answer.iterations == 1


@pytest.mark.parametrize(("n", "d"), [(2, 10), (3, 12), (6, 8), (12, 6)])
def test_rank_is_at_most_samples_and_dimensions(n: int, d: int) -> None:
    answer = solve(drawn(3, n=n, length=5, d=d))
    values = torch.linalg.svdvals(answer.W)
    assert int((values > 1e-9 * values[0]).sum()) == min(n, d)


@pytest.mark.parametrize("factor", [1e-3, 7.0, 1e5])
def test_tokens_scaled_scale_the_solution_back(factor: float) -> None:
    problem = drawn(1)
    scaled = solve(replace(problem, differences=factor * problem.differences))
    assert torch.allclose(scaled.W * factor, solve(problem).W, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(scaled.W, solve(problem).W, rtol=1e-3)


def test_margins_scaled_scale_the_solution() -> None:
    problem = varied(2)
    doubled = solve(replace(problem, margins=2.0 * problem.margins))
    assert torch.allclose(doubled.W, 2.0 * solve(problem).W, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("copies", [2, 5])
def test_repeated_constraints_change_nothing(copies: int) -> None:
    """Singular Gram matrices: every constraint several times, and more of them than dimensions."""
    problem = drawn(4, n=4, length=20, d=8)
    again = Problem(
        problem.differences.repeat(copies, 1),
        problem.queries,
        problem.query_of.repeat(copies),
        problem.margins.repeat(copies),
        problem.equal.repeat(copies),
    )
    answer, single = solve(again), solve(problem)
    assert answer.status == single.status == "optimal"
    assert len(again.margins) > again.differences.shape[1] * again.queries.shape[1]
    assert torch.allclose(answer.W, single.W, rtol=1e-8, atol=1e-9)


def test_repeated_equalities_change_nothing_and_contradictory_ones_are_refuted() -> None:
    problem = varied(6)
    tied = problem.equal.nonzero().squeeze(1)
    join = torch.cat([torch.arange(len(problem.margins)), tied])
    again = Problem(
        problem.differences[join], problem.queries, problem.query_of[join], problem.margins[join], problem.equal[join]
    )
    assert torch.allclose(solve(again).W, solve(problem).W, rtol=1e-7, atol=1e-8)
    margins = again.margins.clone()
    margins[-1] += 1.0
    broken = solve(replace(again, margins=margins))
    assert broken.status == "infeasible"
    assert broken.W is None
    assert broken.residual <= 1e-10


@pytest.mark.parametrize("n", [1, 5])
def test_equal_queries_are_one_query(n: int) -> None:
    tokens = torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(0)).double()
    query = torch.randn(1, 3, generator=torch.Generator().manual_seed(1)).double()
    answer = solve(selection(tokens.expand(n, 6, 8), query.expand(n, 3), torch.zeros(n, dtype=torch.long)))
    alone = solve(selection(tokens, query, torch.zeros(1, dtype=torch.long)))
    assert torch.allclose(answer.W, alone.W, rtol=1e-9)
    assert int(torch.linalg.matrix_rank(answer.W)) == 1


def test_two_tokens_have_their_closed_form() -> None:
    tokens, query = torch.randn(1, 2, 4).double(), torch.randn(1, 3).double()
    u = tokens[0, 1] - tokens[0, 0]
    answer = solve(selection(tokens, query, torch.tensor([1])))
    assert torch.allclose(answer.W, torch.outer(u, query[0]) / (u.square().sum() * query.square().sum()))


def test_one_dimension() -> None:
    tokens = torch.tensor([[[3.0], [1.0], [2.0]]])
    assert solve(selection(tokens, torch.tensor([[2.0]]), torch.tensor([0]))).norm == pytest.approx(0.5)
    assert solve(selection(tokens, torch.tensor([[2.0]]), torch.tensor([2]))).status == "infeasible"


def test_duplicate_of_the_chosen_token_is_infeasible() -> None:
    tokens = torch.randn(2, 5, 4).double()
    tokens[1, 3] = tokens[1, 0]
    problem = selection(tokens, torch.randn(2, 4).double(), torch.tensor([0, 0]))
    answer = solve(problem)
    assert answer.status == "infeasible"
    assert answer.support.nonzero().tolist() == [[6]]


def test_nothing_asked_is_met_by_zero() -> None:
    problem = drawn(0)
    answer = solve(replace(problem, margins=-torch.ones_like(problem.margins)))
    assert (answer.status, answer.norm, answer.gap) == ("optimal", 0.0, 0.0)


def test_problem_of_thousands_of_constraints() -> None:
    """Constraint generation: 8,128 constraints, of which a few hundred are ever looked at together."""
    problem = drawn(0, n=64, length=128, d=32)
    answer = solve(problem)
    assert answer.status == "optimal"
    assert answer.gap <= 1e-9
    assert int(answer.support.sum()) < 1000


@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.full((42,), math.nan)])
def test_multipliers_of_another_problem_are_refused(wrong: torch.Tensor) -> None:
    with pytest.raises(UsageError):
        certify(drawn(0), wrong)


def test_empty_problem_is_refused() -> None:
    problem = drawn(0)
    none = Problem(
        problem.differences[:0], problem.queries, problem.query_of[:0], problem.margins[:0], problem.equal[:0]
    )
    for ask in (solve, separable, lambda empty: soft_margin(empty, 1.0)):
        with pytest.raises(UnposedError):
            ask(none)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("C", [0.01, 1.0, 30.0])
def test_soft_margin_is_a_general_solvers(seed: int, C: float) -> None:
    problem = drawn(seed, d=(10, 2, 3)[seed % 3])
    W = cvxpy.Variable(problem.differences.shape[1] * problem.queries.shape[1])
    loss = cvxpy.sum(cvxpy.pos(problem.margins.numpy() - dense(problem) @ W))
    best = cvxpy.Problem(cvxpy.Minimize(0.5 * cvxpy.sum_squares(W) + C * loss)).solve(solver=cvxpy.CLARABEL)
    answer = soft_margin(problem, C)
    assert answer.gap <= 1e-9
    assert 0.5 * float(answer.W.square().sum()) + C * answer.slack == pytest.approx(best, rel=1e-6)
    assert float(answer.multipliers.min()) >= 0.0
    assert float(answer.multipliers.max()) <= C


def test_soft_margin_of_a_separable_problem_is_the_hard_one() -> None:
    problem = drawn(0)
    hard, soft = solve(problem), soft_margin(problem, 100.0)
    assert torch.allclose(soft.W, hard.W, rtol=1e-7, atol=1e-8)
    assert soft.violated == 0.0
    assert soft_margin(problem, 1e-3).violated > 0.0


def test_soft_margin_tells_how_far_from_separable() -> None:
    tokens, query = torch.tensor([[[3.0], [1.0], [2.0], [-1.0]]]), torch.tensor([[1.0]])
    between = soft_margin(selection(tokens, query, torch.tensor([2])), 1e4)
    # u = −1, 1 and 3: (1 + W) + (1 − W) + 0 = 2 for every W from 1/3 to 1, and more elsewhere.
    assert between.slack == pytest.approx(2.0, abs=1e-3)
    assert 0 < between.violated < 1


@pytest.mark.parametrize("C", [0.0, -1.0, math.inf, math.nan])
def test_soft_margin_needs_a_price(C: float) -> None:
    with pytest.raises(UsageError):
        soft_margin(drawn(0), C)


def test_prompts_of_three_sequences_read_the_published_norm() -> None:
    """Tarzanagh et al. (NeurIPS 2023), several inputs: ½‖p‖² = 0.3131888; two coordinates alone read 0.3713783."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(3, 7, 3, generator=generator) * 0.2
    tokens[:, 0] += torch.tensor([1.0, 0.0, 0.0])
    tokens[:, 1:4] += torch.tensor([-1.0, 1.0, 0.0])
    tokens[:, 4:] += torch.tensor([-0.5, -0.5, 0.0])
    tokens[:, 0, -1], tokens[:, 1:, -1] = 1.0, 0.5
    chosen = torch.zeros(3, dtype=torch.long)
    norms = [solve(prompt(keys, chosen)).norm for keys in (tokens.double(), tokens[..., :2].double())]
    assert [0.5 * (norm or 0.0) ** 2 for norm in norms] == pytest.approx([0.3131888, 0.3713383], abs=1e-7)


def shared(seed: int, queries: int = 3, scenes: int = 16, length: int = 12, d: int = 6) -> Problem:
    """Scenes of few distinct queries that all keep the same token: far more constraints than dimensions."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(queries, 4, generator=generator, dtype=torch.float64)[torch.arange(scenes) % queries]
    tokens = torch.randn(scenes, length, d, generator=generator, dtype=torch.float64)
    tokens[:, 0] = 3.0 * torch.ones(d)
    tokens[::2, 1:4] = tokens[0, 1:4]  # repeated constraints, and sums of others besides
    return selection(tokens, z.abs(), torch.zeros(scenes, dtype=torch.long))


def refuse(*_: object) -> None:
    raise AssertionError("NNLS was asked")


@pytest.mark.parametrize("seed", range(6))
def test_degenerate_problem_is_solved_without_nnls(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = shared(seed)
    rank = np.linalg.matrix_rank(dense(problem))
    assert len(problem.margins) > 128 > rank
    asked = []
    damped, nearest = frobenius.damped_step, frobenius.solve_by_nnls
    monkeypatch.setattr(frobenius, "damped_step", lambda *given: asked.append(1) or damped(*given))
    monkeypatch.setattr(frobenius, "solve_by_nnls", refuse)
    answer = solve(problem)
    assert asked
    assert answer.status == "optimal"
    reference = certify(problem, torch.from_numpy(nearest(dense(problem), np.ones(len(problem.margins)))))
    assert reference.status == "optimal"
    assert answer.norm == pytest.approx(reference.norm, rel=1e-9)


def test_contradictory_problem_still_needs_nnls(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = shared(0)
    away = replace(problem, differences=torch.cat([problem.differences[:-1], -problem.differences[:1]]))
    away = replace(away, query_of=torch.cat([problem.query_of[:-1], problem.query_of[:1]]))
    assert solve(away).status == "infeasible"
    monkeypatch.setattr(frobenius, "solve_by_nnls", refuse)
    with pytest.raises(AssertionError, match="NNLS was asked"):
        solve(away)


@pytest.mark.parametrize("damping", [1e-12, 1e-6, 1e-2, 1.0])
def test_damped_step_never_raises_the_objective(damping: float) -> None:
    rows = dense(shared(1))
    gram, bounds = rows @ rows.T, np.ones(len(rows))
    gram /= gram.diagonal().max()
    loads = np.zeros(len(rows))
    values = [0.0]
    for _ in range(30):
        loads, damping = frobenius.damped_step(gram, bounds, loads, damping)
        assert (loads >= 0.0).all()
        values.append(0.5 * loads @ gram @ loads - bounds @ loads)
    assert values[-1] < -0.1
    assert all(after <= before + 1e-12 * abs(before) for before, after in itertools.pairwise(values))
