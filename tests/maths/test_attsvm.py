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
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from attnlens.errors import UnposedError, UsageError
from attnlens.maths.attsvm import (
    Problem,
    certify,
    certify_nuclear,
    frobenius,
    head,
    prompt,
    selection,
    selection_sets,
    separable,
    soft_margin,
    solve,
    solve_nuclear,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "attsvm_golden.json").read_text())


def dense(problem: Problem) -> np.ndarray:
    """Every constraint's u zᵀ, flattened."""
    return (problem.differences[:, :, None] * problem.paired_queries[:, None]).flatten(1).numpy()


def oracle(problem: Problem) -> float:
    """‖W‖_F by a general convex solver."""
    rows, bounds, equal = dense(problem), problem.margins.numpy(), problem.equal.numpy()
    W = cvxpy.Variable(rows.shape[1])
    limits = [rows[~equal] @ W >= bounds[~equal]] if (~equal).any() else []
    limits += [rows[equal] @ W == bounds[equal]] if equal.any() else []
    exact = {f"tol_{kind}": 1e-12 for kind in ("gap_abs", "gap_rel", "feas")}
    cvxpy.Problem(cvxpy.Minimize(cvxpy.sum_squares(W)), limits).solve(solver=cvxpy.CLARABEL, **exact)
    return float(np.linalg.norm(W.value))


def drawn(seed: int, n: int = 6, length: int = 8, d: int = 10) -> Problem:
    """A random selection problem; feasible for almost all data when d ≥ max(length − 1, n)."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(n, length, d, generator=generator).double()
    queries = torch.randn(n, d, generator=generator).double()
    return selection(tokens, queries, torch.randint(0, length, (n,), generator=generator))


def varied(seed: int) -> Problem:
    """The same with label margins and, for some constraints, equalities with b = 0 and b ≠ 0."""
    generator, problem = torch.Generator().manual_seed(seed), drawn(seed)
    count = len(problem.margins)
    margins = 0.2 + 2.0 * torch.rand(count, generator=generator).double()
    margins[torch.rand(count, generator=generator) < 0.1] = 0.0
    margins[torch.rand(count, generator=generator) < 0.1] = -0.5
    equal = torch.rand(count, generator=generator) < 0.25
    margins[equal & (torch.rand(count, generator=generator) < 0.5)] = 0.0
    return replace(problem, margins=margins, equal=equal)


def half_sets(seed: int, d: int, n: int = 16, length: int = 24, wide: int = 8) -> Problem:
    """Queries that select half of their tokens: n (length/2 − 1) equalities."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(n, length, d, generator=generator).double()
    sets = (torch.arange(length) < length // 2).expand(n, length)
    return selection_sets(tokens, torch.randn(n, wide, generator=generator).double(), sets)


def feasible(problem: Problem) -> bool:
    """Whether a linear program finds a W."""
    rows, bounds, equal = dense(problem), problem.margins.numpy(), problem.equal.numpy()
    ties = {"A_eq": rows[equal], "b_eq": bounds[equal]} if equal.any() else {}
    answer = linprog(np.zeros(rows.shape[1]), -rows[~equal], -bounds[~equal], bounds=(None, None), **ties)
    assert answer.status in (0, 2)
    return answer.status == 0


def golden(name: str) -> Problem:
    return selection(*(torch.tensor(GOLDEN[name][part]) for part in ("X", "Z", "best")))


def close(ours: torch.Tensor, theirs: torch.Tensor, rtol: float = 1e-8, atol: float = 1e-9) -> bool:
    return torch.allclose(ours, theirs, rtol=rtol, atol=atol)


# --- the solution -----------------------------------------------------------------------------------------------------


def test_golden_solutions() -> None:
    for name, case in GOLDEN.items():
        answer = solve(golden(name))
        assert answer.status == "optimal"
        assert answer.norm == pytest.approx(case["fro_norm"], abs=1e-6)
        assert int(answer.support.sum()) == case["support_constraints"]
        assert torch.linalg.svdvals(answer.W).numpy() == pytest.approx(np.array(case["sv_fro"]), abs=1e-6)
        assert float(golden(name).scores(answer.W).min()) == pytest.approx(case["min_margin"], abs=1e-9)
        if "W_fro" in case:
            assert answer.W.numpy() == pytest.approx(np.array(case["W_fro"]), abs=1e-6)
    case = GOLDEN["vis2"]
    other = solve(selection(torch.tensor(case["X"]), torch.tensor(case["Z"]), torch.tensor([1, 0])))
    assert other.status == "infeasible" or abs(other.norm - case["fro_norm"]) > 1e-2, "control: another choice"


def test_golden_prompts() -> None:
    triple = [[[-0.1, 1.0], [1.0, 0.0], [0.0, 0.0]]]
    pairs = [[[0.0, 0.0], [1.0, 1.0]], [[0.0, 0.0], [1.0, -1.0]], [[0.0, 0.0], [0.5, 1.0]]]
    for tokens, chosen, half in ((triple, [0], 0.4950495), (triple, [1], 0.5), (pairs, [1, 1, 1], 17 / 18)):
        answer = solve(prompt(torch.tensor(tokens).double(), torch.tensor(chosen)))
        assert answer.norm**2 / 2 == pytest.approx(half, abs=1e-6)
        assert answer.W.shape == (2, 1)


def test_prompts_of_three_sequences_have_the_published_norm() -> None:
    """Tarzanagh et al. (NeurIPS 2023), several inputs: ½‖p‖² = 0.3131888; two coordinates alone give 0.3713783."""
    tokens = torch.randn(3, 7, 3, generator=torch.Generator().manual_seed(0)) * 0.2
    tokens[:, 0] += torch.tensor([1.0, 0.0, 0.0])
    tokens[:, 1:4] += torch.tensor([-1.0, 1.0, 0.0])
    tokens[:, 4:] += torch.tensor([-0.5, -0.5, 0.0])
    tokens[:, 0, -1], tokens[:, 1:, -1] = 1.0, 0.5
    norms = [solve(prompt(keys.double(), torch.zeros(3, dtype=torch.long))).norm for keys in (tokens, tokens[..., :2])]
    assert [0.5 * (norm or 0.0) ** 2 for norm in norms] == pytest.approx([0.3131888, 0.3713383], abs=1e-7)


POSED = {f"drawn {seed}": lambda seed=seed: drawn(seed) for seed in range(2)}
POSED |= {f"varied {seed}": lambda seed=seed: varied(seed) for seed in range(4)}


@pytest.mark.parametrize("pose", [*POSED.values(), lambda: drawn(2, n=30, length=12, d=20)], ids=[*POSED, "large"])
def test_norm_is_that_of_a_general_solver(pose) -> None:
    problem = pose()
    answer = solve(problem)
    assert answer.status == "optimal"
    assert max(answer.gap, answer.kkt) <= 1e-9
    assert answer.norm == pytest.approx(oracle(problem), rel=1e-6)
    assert (answer.multipliers[~problem.equal] >= 0.0).all()
    slack = problem.scores(answer.W) - problem.margins
    assert float(slack[~problem.equal].min()) >= -1e-9
    assert float(slack[problem.equal].abs().max() if problem.equal.any() else 0.0) <= 1e-9


def test_without_its_support_a_solution_is_shorter() -> None:
    """Control: the norm of the oracle is no accident."""
    problem = drawn(0)
    loose = solve(problem).support.logical_not().nonzero().flatten()
    assert solve(problem.select(loose)).norm < 0.99 * solve(problem).norm


def test_separability_is_that_of_a_linear_program() -> None:
    counts = {True: 0, False: 0}
    for seed in range(80):
        generator = np.random.default_rng(seed)
        problem = drawn(seed, *(int(generator.integers(low, high)) for low, high in ((1, 9), (2, 9), (1, 7))))
        answer = separable(problem)
        assert answer.verdict == feasible(problem), seed
        counts[answer.verdict] += 1
        if answer.verdict:
            assert answer.distance == pytest.approx(1 / solve(problem).norm, rel=1e-6)
        else:
            assert solve(problem).W is None
            assert (answer.multipliers >= 0.0).all()
            assert float(answer.multipliers.sum()) == pytest.approx(1.0)
            assert float(problem.form(answer.multipliers).norm()) <= 1e-9
            assert answer.distance <= 1e-9
    assert min(counts.values()) >= 15


def test_separability_with_equalities_is_that_of_a_linear_program() -> None:
    counts = {True: 0, False: 0}
    for seed in range(48):
        generator = torch.Generator().manual_seed(seed)
        problem = drawn(seed, n=4, length=6, d=3 if seed % 2 else 2)
        equal = torch.rand(len(problem.margins), generator=generator) < 0.15
        margins = torch.where(equal, (seed % 3 - 1.0) * torch.randn(len(equal), generator=generator).double(), 1.0)
        problem = replace(problem, equal=equal, margins=margins)
        answer = solve(problem)
        infeasible = answer.status == "infeasible"
        assert infeasible != feasible(problem), seed
        counts[infeasible] += 1
        if infeasible:
            assert float(answer.multipliers @ margins) > 1e-6
            assert answer.residual <= 1e-9
    assert min(counts.values()) >= 8


@settings(deadline=None, max_examples=30)
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


def test_unfinished_answers_are_inaccurate_with_a_gap() -> None:
    nothing = certify(drawn(0), torch.zeros(len(drawn(0).margins)).double())
    assert (nothing.status, nothing.gap) == ("inaccurate", math.inf), "an infinite primal value never closes the gap"
    stopped = solve(drawn(0, n=40, length=20, d=30), limit=1)
    assert (stopped.status, stopped.iterations) == ("inaccurate", 1)
    assert stopped.gap > 1e-9
    tied = solve(half_sets(1, 30), limit=1)
    assert tied.status != "optimal"
    assert tied.iterations == 1


# --- laws -------------------------------------------------------------------------------------------------------------


def test_rank_is_at_most_samples_and_dimensions() -> None:
    for n, d in ((2, 10), (3, 12), (6, 8), (12, 6)):
        values = torch.linalg.svdvals(solve(drawn(3, n=n, length=5, d=d)).W)
        assert int((values > 1e-9 * values[0]).sum()) == min(n, d)


def test_scaled_tokens_and_margins_scale_the_solution() -> None:
    for factor in (1e-3, 7.0, 1e5):
        scaled = solve(replace(drawn(1), differences=factor * drawn(1).differences)).W
        assert close(scaled * factor, solve(drawn(1)).W, 1e-9, 1e-12)
        assert not close(scaled, solve(drawn(1)).W, 1e-3)
    problem = varied(2)
    assert close(solve(replace(problem, margins=2.0 * problem.margins)).W, 2.0 * solve(problem).W)


def test_repeated_constraints_change_nothing_and_contradictory_ones_are_refuted() -> None:
    problem = drawn(4, n=4, length=20, d=8)
    for copies in (2, 5):
        again = problem.select(torch.arange(len(problem.margins)).repeat(copies))
        assert len(again.margins) > again.differences.shape[1] * again.queries.shape[1], "singular Gram matrices"
        assert solve(again).status == "optimal"
        assert close(solve(again).W, solve(problem).W)
    problem = varied(6)
    again = problem.select(torch.cat([torch.arange(len(problem.margins)), problem.equal.nonzero().squeeze(1)]))
    assert close(solve(again).W, solve(problem).W, 1e-7, 1e-8)
    again.margins[-1] += 1.0
    broken = solve(again)
    assert (broken.status, broken.W) == ("infeasible", None)
    assert broken.residual <= 1e-10


def test_solutions_known_in_closed_form() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens, query = (torch.randn(*shape, generator=generator).double() for shape in ((1, 6, 8), (1, 3)))
    first = torch.zeros(1, dtype=torch.long)
    alone = solve(selection(tokens, query, first)).W
    for n in (1, 5):
        answer = solve(selection(tokens.expand(n, 6, 8), query.expand(n, 3), first.expand(n)))
        assert close(answer.W, alone, 1e-9), "equal queries are one query"
        assert int(torch.linalg.matrix_rank(answer.W)) == 1
    u = tokens[0, 1] - tokens[0, 0]
    answer = solve(selection(tokens[:, :2], query, first + 1))
    assert close(answer.W, torch.outer(u, query[0]) / (u.square().sum() * query.square().sum()))
    line = torch.tensor([[[3.0], [1.0], [2.0]]])
    assert solve(selection(line, torch.tensor([[2.0]]), first)).norm == pytest.approx(0.5)
    assert solve(selection(line, torch.tensor([[2.0]]), first + 2)).status == "infeasible"
    nothing = solve(replace(drawn(0), margins=-torch.ones_like(drawn(0).margins)))
    assert (nothing.status, nothing.norm, nothing.gap) == ("optimal", 0.0, 0.0)


def test_duplicate_of_the_chosen_token_is_infeasible() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(2, 5, 4, generator=generator).double()
    tokens[1, 3] = tokens[1, 0]
    answer = solve(selection(tokens, torch.randn(2, 4, generator=generator).double(), torch.tensor([0, 0])))
    assert answer.status == "infeasible"
    assert answer.support.nonzero().tolist() == [[6]]


def test_problem_of_thousands_of_constraints() -> None:
    """Constraint generation: 8,128 constraints, of which a few hundred are ever looked at together."""
    answer = solve(drawn(0, n=64, length=128, d=32))
    assert answer.status == "optimal"
    assert answer.gap <= 1e-9
    assert int(answer.support.sum()) < 1000


# --- degenerate problems ----------------------------------------------------------------------------------------------


def shared(seed: int, queries: int = 3, scenes: int = 16, length: int = 12, d: int = 6) -> Problem:
    """Scenes of few distinct queries that all select the same token: far more constraints than dimensions."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(queries, 4, generator=generator, dtype=torch.float64)[torch.arange(scenes) % queries]
    tokens = torch.randn(scenes, length, d, generator=generator, dtype=torch.float64)
    tokens[:, 0] = 3.0 * torch.ones(d)
    tokens[::2, 1:4] = tokens[0, 1:4]  # repeated constraints, and sums of others besides
    return selection(tokens, z.abs(), torch.zeros(scenes, dtype=torch.long))


def refuse(*_: object) -> None:
    raise AssertionError("NNLS was called")


def test_degenerate_problems_are_solved_without_nnls(monkeypatch: pytest.MonkeyPatch) -> None:
    damped, nearest, calls = frobenius.damped_step, frobenius.solve_by_nnls, []
    monkeypatch.setattr(frobenius, "damped_step", lambda *args: calls.append(1) or damped(*args))
    monkeypatch.setattr(frobenius, "solve_by_nnls", refuse)
    for seed in range(3):
        problem = shared(seed)
        assert len(problem.margins) > 128 > np.linalg.matrix_rank(dense(problem))
        calls.clear()
        answer = solve(problem)
        assert calls
        assert answer.status == "optimal"
        reference = certify(problem, torch.from_numpy(nearest(dense(problem), np.ones(len(problem.margins)))))
        assert reference.status == "optimal"
        assert answer.norm == pytest.approx(reference.norm, rel=1e-9)
    problem = shared(0)
    away = replace(
        problem,
        differences=torch.cat([problem.differences[:-1], -problem.differences[:1]]),
        query_of=torch.cat([problem.query_of[:-1], problem.query_of[:1]]),
    )
    with pytest.raises(AssertionError, match="NNLS was called"):
        solve(away)
    monkeypatch.undo()
    assert solve(away).status == "infeasible"


def test_damped_step_never_raises_the_objective() -> None:
    rows = dense(shared(1))
    gram, bounds = rows @ rows.T, np.ones(len(rows))
    gram /= gram.diagonal().max()
    for damping in (1e-12, 1e-6, 1e-2, 1.0):
        loads, values = np.zeros(len(rows)), [0.0]
        for _ in range(30):
            loads, damping = frobenius.damped_step(gram, bounds, loads, damping)
            assert (loads >= 0.0).all()
            values.append(0.5 * loads @ gram @ loads - bounds @ loads)
        assert values[-1] < -0.1
        assert all(after <= before + 1e-12 * abs(before) for before, after in itertools.pairwise(values))


# --- many equalities --------------------------------------------------------------------------------------------------


def test_many_equalities_leave_the_norm_of_a_general_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, widths, exchange = half_sets(0, 50), [], frobenius.exchange_signs
    monkeypatch.setattr(
        frobenius, "exchange_signs", lambda gram, *rest: widths.append(len(gram)) or exchange(gram, *rest)
    )
    answer = solve(problem)
    assert 0 < max(widths) <= int((~problem.equal).sum()), "no step solves for an equality again"
    assert int(problem.equal.sum()) > frobenius.SMALL
    assert answer.status == "optimal"
    assert answer.norm == pytest.approx(oracle(problem), rel=1e-6)
    assert float(problem.scores(answer.W)[problem.equal].abs().max()) < 1e-9
    without = replace(problem, equal=torch.zeros_like(problem.equal))
    assert abs(solve(without).norm / answer.norm - 1) > 1e-2


def test_verdict_with_many_equalities_is_that_of_a_linear_program() -> None:
    for d in (12, 25, 34):
        problem = half_sets(1, d)
        answer = solve(problem)
        assert answer.status == ("optimal" if feasible(problem) else "infeasible")
        assert answer.status == {12: "infeasible", 34: "optimal"}.get(d, answer.status), "both verdicts occur"
        if answer.status == "infeasible":
            reach = np.linalg.norm(dense(problem), axis=1)
            left = np.linalg.norm(answer.multipliers.numpy() @ dense(problem))
            assert left <= 1e-9 * (answer.multipliers.abs().numpy() @ reach)
            assert (answer.multipliers[~problem.equal] >= 0.0).all()
            assert float(answer.multipliers @ problem.margins) > 0.5


def test_many_equalities_have_margins_and_may_repeat() -> None:
    problem, generator = half_sets(2, 50), torch.Generator().manual_seed(0)
    margins = torch.randn(len(problem.margins), generator=generator).double()
    problem = replace(problem, margins=torch.where(problem.equal, margins, problem.margins))
    answer = solve(problem)
    assert answer.status == "optimal"
    assert answer.norm == pytest.approx(oracle(problem), rel=1e-6)
    twice = problem.select(torch.arange(len(problem.margins)).repeat(2))
    for part in (twice.differences, twice.margins):
        part[len(problem.margins) :] *= 2.0
    assert solve(twice).norm == pytest.approx(answer.norm, rel=1e-9)
    twice.margins[int(twice.equal.nonzero()[-1])] += 1.0
    refuted = solve(twice)
    assert refuted.status == "infeasible"
    assert float(refuted.multipliers @ twice.margins) > 0.0


def test_equalities_alone_are_the_least_squares_solution() -> None:
    problem = half_sets(3, 50)
    alone = problem.select(problem.equal.nonzero().flatten())
    bounds = torch.randn(len(alone.margins), generator=torch.Generator().manual_seed(1)).double()
    alone = replace(alone, margins=bounds)
    nearest = np.linalg.lstsq(dense(alone), bounds.numpy(), rcond=None)[0]
    assert solve(alone).W.flatten().numpy() == pytest.approx(nearest, abs=1e-9)


def test_a_head_poses_no_more_equalities_than_can_be_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(20, 6, generator=generator).double()
    scene = head.Scene(tokens, torch.randn(10, 6, generator=generator).double(), torch.zeros(10, 20).double())
    form = head.FactoredForm(0.1 * torch.eye(6).double(), torch.eye(6).double())
    whole = head.choose([scene], form, head.Softmax(), top_p=0.5).sets
    equalities = sum(int(tokens.sum()) - 1 for tokens in whole)
    for most, count in ((equalities, len(whole)), (equalities - 1, len(whole) - 1), (0, 1)):
        monkeypatch.setattr(head, "MOST_EQUALITIES", most)
        assert len(head.choose([scene], form, head.Softmax(), top_p=0.5).sets) == count


# --- soft margins -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "C"), [(0, 0.01), (1, 1.0), (2, 30.0), (3, 1.0), (4, 30.0), (5, 0.01)])
def test_soft_margin_is_that_of_a_general_solver(seed: int, C: float) -> None:
    problem = drawn(seed, d=(10, 2, 3)[seed % 3])
    W = cvxpy.Variable(problem.differences.shape[1] * problem.queries.shape[1])
    loss = cvxpy.sum(cvxpy.pos(problem.margins.numpy() - dense(problem) @ W))
    best = cvxpy.Problem(cvxpy.Minimize(0.5 * cvxpy.sum_squares(W) + C * loss)).solve(solver=cvxpy.CLARABEL)
    answer = soft_margin(problem, C)
    assert answer.gap <= 1e-9
    assert 0.5 * float(answer.W.square().sum()) + C * answer.slack == pytest.approx(best, rel=1e-6)
    assert float(answer.multipliers.min()) >= 0.0
    assert float(answer.multipliers.max()) <= C


def test_soft_margin_counts_violations() -> None:
    hard, soft = solve(drawn(0)), soft_margin(drawn(0), 100.0)
    assert close(soft.W, hard.W, 1e-7, 1e-8), "of a separable problem it is the hard one"
    assert soft.violated == 0.0
    assert soft_margin(drawn(0), 1e-3).violated > 0.0
    tokens = torch.tensor([[[3.0], [1.0], [2.0], [-1.0]]])
    between = soft_margin(selection(tokens, torch.tensor([[1.0]]), torch.tensor([2])), 1e4)
    # u = −1, 1 and 3: (1 + W) + (1 − W) + 0 = 2 for every W from 1/3 to 1, and more elsewhere.
    assert between.slack == pytest.approx(2.0, abs=1e-3)
    assert 0 < between.violated < 1


# --- refusals ---------------------------------------------------------------------------------------------------------


def sized(power: int) -> Problem:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(3, 4, 6, generator=generator).double() * 10.0**power
    return selection(tokens, torch.randn(3, 6, generator=generator).double(), torch.tensor([0, 1, 2]))


SOLVERS = [solve, separable, solve_nuclear, lambda it: soft_margin(it, 1.0), lambda it: certify(it, it.margins)]
SOLVERS.append(lambda it: certify_nuclear(it, it.margins, torch.eye(6).double()))


def test_sizes_beyond_float64_are_refused_by_name_and_others_scaled_back() -> None:
    problem = sized(0)
    for power, call in itertools.product((-200, -170, -160, 160, 170, 200), SOLVERS):
        with pytest.raises(UsageError, match="difference of two tokens"):
            call(sized(power))
    for word, wrong in (
        ("query", {"queries": problem.queries * 1e-180}),
        ("margin", {"margins": problem.margins * 1e180}),
        ("difference", {"differences": problem.differences * math.nan}),
    ):
        with pytest.raises(UsageError, match=word):
            solve(replace(problem, **wrong))
    for power in (-49, -20, 20, 48):
        answer = solve(sized(power))
        assert answer.status == "optimal"
        assert answer.norm * 10.0**power == pytest.approx(solve(problem).norm, rel=1e-9)


def test_senseless_arguments_are_refused() -> None:
    problem = drawn(0)
    for wrong in ({"tolerance": 0.0}, {"tolerance": -1e-9}, {"tolerance": math.nan}, {"limit": 0}):
        for call in (solve, solve_nuclear, lambda it, **options: soft_margin(it, 1.0, **options)):
            with pytest.raises(UsageError, match=next(iter(wrong))):
                call(problem, **wrong)
    with pytest.raises(UsageError, match="limit"):
        separable(problem, limit=0)
    for C in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(UsageError):
            soft_margin(problem, C)
    for multipliers in (torch.zeros(3), torch.full((42,), math.nan)):
        with pytest.raises(UsageError):
            certify(problem, multipliers)
    empty = problem.select(torch.zeros(0, dtype=torch.long))
    for call in (solve, separable, solve_nuclear, lambda it: soft_margin(it, 1.0)):
        with pytest.raises(UnposedError):
            call(empty)
