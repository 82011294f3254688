"""Tests that equalities are eliminated without a change of the answer, and senseless arguments refused."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from attsvm_oracle import dense, oracle
from scipy.linalg import null_space
from scipy.optimize import linprog
from watch import unwatched

from attnlens.errors import UsageError
from attnlens.maths.attsvm import (
    Problem,
    causal,
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


def kept_half(seed: int, d: int, n: int = 16, length: int = 24, wide: int = 8) -> Problem:
    """Queries that keep half of their tokens: n (length/2 − 1) equalities."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(n, length, d, generator=generator).double()
    sets = torch.zeros(n, length, dtype=torch.bool)
    sets[:, : length // 2] = True
    return selection_sets(tokens, torch.randn(n, wide, generator=generator).double(), sets)


def feasible(problem: Problem) -> bool:
    """Whether a linear program finds a margin > 0 in the null space of the equalities, in a box of weights."""
    rows, equal = dense(problem), problem.equal.numpy()
    left = rows[~equal] @ null_space(rows[equal], rcond=1e-10)
    width = left.shape[1]
    best = linprog(
        np.append(np.zeros(width), -1.0), np.c_[-left, np.ones(len(left))], np.zeros(len(left)), bounds=(-1, 1)
    )
    assert best.status == 0
    return bool(-best.fun > 1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_many_equalities_leave_the_norm_of_a_general_solver(seed: int) -> None:
    problem = kept_half(seed, 50)
    answer = solve(problem)
    assert int(problem.equal.sum()) > frobenius.SMALL
    assert answer.status == "optimal"
    assert answer.norm == pytest.approx(oracle(problem), rel=1e-6)
    assert float(problem.scores(answer.W)[problem.equal].abs().max()) < 1e-9
    without = replace(problem, margins=problem.margins.clone(), equal=torch.zeros_like(problem.equal))
    assert abs(solve(without).norm / answer.norm - 1) > 1e-2


def test_no_step_solves_for_an_equality_again(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, widths, real = kept_half(0, 50), [], frobenius.exchange_signs

    def watched(gram: np.ndarray, bounds: np.ndarray, support: np.ndarray) -> np.ndarray | None:
        widths.append(len(gram))
        return real(gram, bounds, support)

    monkeypatch.setattr(frobenius, "exchange_signs", watched)
    assert solve(problem).status == "optimal"
    assert widths
    assert max(widths) <= int((~problem.equal).sum())


@pytest.mark.parametrize("d", [12, 21, 23, 25, 27, 30, 34])
def test_verdict_with_many_equalities_is_a_linear_programs(d: int) -> None:
    problem = kept_half(1, d)
    answer = solve(problem)
    assert answer.status == ("optimal" if feasible(problem) else "infeasible")
    if answer.status == "infeasible":
        reach = np.linalg.norm(dense(problem), axis=1)
        left = np.linalg.norm(answer.multipliers.numpy() @ dense(problem))
        assert left <= 1e-9 * (answer.multipliers.abs().numpy() @ reach)
        assert (answer.multipliers[~problem.equal] >= 0.0).all()
        assert float(answer.multipliers @ problem.margins) > 0.5


def test_verdicts_are_of_both_kinds() -> None:
    assert feasible(kept_half(1, 34))
    assert not feasible(kept_half(1, 12))


def test_many_equalities_have_their_own_margins_and_may_repeat() -> None:
    problem, generator = kept_half(2, 50), torch.Generator().manual_seed(0)
    drawn = torch.randn(len(problem.margins), generator=generator).double()
    problem = replace(problem, margins=torch.where(problem.equal, drawn, problem.margins))
    answer = solve(problem)
    assert answer.status == "optimal"
    assert answer.norm == pytest.approx(oracle(problem), rel=1e-6)
    twice = Problem(
        torch.cat([problem.differences, 2.0 * problem.differences]),
        problem.queries,
        problem.query_of.repeat(2),
        torch.cat([problem.margins, 2.0 * problem.margins]),
        problem.equal.repeat(2),
    )
    assert solve(twice).norm == pytest.approx(answer.norm, rel=1e-9)
    last = int(twice.equal.nonzero()[-1])
    contradictory = replace(twice, margins=twice.margins.clone())
    contradictory.margins[last] += 1.0
    refuted = solve(contradictory)
    assert refuted.status == "infeasible"
    assert float(refuted.multipliers @ contradictory.margins) > 0.0


def test_equalities_alone_are_the_least_squares_solution() -> None:
    problem = kept_half(3, 50)
    equal = problem.equal
    bounds = torch.randn(int(equal.sum()), generator=torch.Generator().manual_seed(1)).double()
    alone = Problem(problem.differences[equal], problem.queries, problem.query_of[equal], bounds, equal[equal])
    nearest = np.linalg.lstsq(dense(alone), bounds.numpy(), rcond=None)[0]
    assert solve(alone).W.flatten().numpy() == pytest.approx(nearest, abs=1e-9)


def test_step_limit_holds_with_many_equalities() -> None:
    answer = solve(kept_half(1, 30), limit=1)
    assert answer.status != "optimal"
    assert answer.iterations == 1


def test_a_head_poses_no_more_equalities_than_can_be_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(20, 6, generator=generator).double()
    scene = head.Scene(tokens, torch.randn(10, 6, generator=generator).double(), torch.zeros(10, 20).double())
    form = head.FactoredForm(0.1 * torch.eye(6).double(), torch.eye(6).double())
    whole = head.choose([scene], form, head.Softmax(), top_p=0.5)
    sizes = [int(kept.sum()) - 1 for kept in whole.sets]
    monkeypatch.setattr(head, "MOST_EQUALITIES", sum(sizes) - 1)
    fewer = head.choose([scene], form, head.Softmax(), top_p=0.5)
    assert len(fewer.sets) == len(whole.sets) - 1
    monkeypatch.setattr(head, "MOST_EQUALITIES", 0)
    assert len(head.choose([scene], form, head.Softmax(), top_p=0.5).sets) == 1


def sized(power: int) -> Problem:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(3, 4, 6, generator=generator).double() * 10.0**power
    return selection(tokens, torch.randn(3, 6, generator=generator).double(), torch.tensor([0, 1, 2]))


@pytest.mark.parametrize("power", [-200, -170, -160, 160, 170, 200])
def test_sizes_beyond_float64_are_refused_by_name(power: int) -> None:
    problem = sized(power)
    calls = [solve, separable, solve_nuclear, lambda it: soft_margin(it, 1.0), lambda it: certify(it, it.margins)]
    calls.append(lambda it: certify_nuclear(it, it.margins, torch.eye(6).double()))
    for call in calls:
        with pytest.raises(UsageError, match="difference of two tokens"):
            call(problem)


@pytest.mark.parametrize("power", [-49, -20, 20, 48])
def test_sizes_within_float64_are_scaled_back(power: int) -> None:
    answer = solve(sized(power))
    assert answer.status == "optimal"
    assert answer.norm * 10.0**power == pytest.approx(solve(sized(0)).norm, rel=1e-9)


def test_sizes_of_queries_and_margins_are_looked_at_too() -> None:
    problem = sized(0)
    with pytest.raises(UsageError, match="query"):
        solve(replace(problem, queries=problem.queries * 1e-180))
    with pytest.raises(UsageError, match="margin"):
        solve(replace(problem, margins=problem.margins * 1e180))
    with pytest.raises(UsageError, match="difference"):
        solve(replace(problem, differences=problem.differences * math.nan))


TOKENS, QUERIES, CHOSEN = torch.randn(2, 3, 4).double(), torch.randn(2, 4).double(), torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("tokens", "queries", "chosen"),
    [
        (TOKENS.numpy(), QUERIES, CHOSEN),
        (TOKENS, QUERIES.numpy(), CHOSEN),
        (TOKENS, QUERIES, CHOSEN.numpy()),
        (TOKENS, QUERIES, CHOSEN.double()),
        (TOKENS, QUERIES, CHOSEN.bool()),
        (TOKENS + 1j, QUERIES, CHOSEN),
        (TOKENS, QUERIES + 1j, CHOSEN),
        (TOKENS, QUERIES, [0, 1]),
    ],
)
@unwatched()
def test_other_than_real_tensors_are_refused(tokens: object, queries: object, chosen: object) -> None:
    with pytest.raises(UsageError):
        selection(tokens, queries, chosen)
    assert len(selection(TOKENS, QUERIES, CHOSEN.int()).margins) == 4


@unwatched()
def test_every_builder_refuses_numpy_tokens() -> None:
    with pytest.raises(UsageError, match="ndarray"):
        prompt(TOKENS.numpy(), CHOSEN)
    with pytest.raises(UsageError, match="ndarray"):
        causal(TOKENS[0].numpy(), torch.tensor([0, 0, 0]))
    with pytest.raises(UsageError, match="ndarray"):
        selection_sets(TOKENS, QUERIES, np.ones((2, 3), dtype=bool))


@pytest.mark.parametrize("wrong", [{"tolerance": 0.0}, {"tolerance": -1e-9}, {"tolerance": math.nan}, {"limit": 0}])
def test_tolerances_and_limits_that_make_no_sense_are_refused(wrong: dict) -> None:
    problem = sized(0)
    calls = [solve, solve_nuclear, lambda it, **options: soft_margin(it, 1.0, **options)]
    for call in calls:
        with pytest.raises(UsageError, match=next(iter(wrong))):
            call(problem, **wrong)
    with pytest.raises(UsageError, match="limit"):
        separable(problem, limit=0)


def test_nuclear_default_says_what_it_certifies() -> None:
    answer = solve_nuclear(sized(0))
    assert answer.gap <= 1e-4
    assert "1e-4" in solve_nuclear.__doc__
    assert solve_nuclear(sized(0), tolerance=1e-9).gap <= 1e-9
