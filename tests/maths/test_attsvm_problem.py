"""Tests that builders pose the constraints that the theorems state, and refuse what can't be posed."""

import itertools
import math

import pytest
import torch
from torch import Tensor
from watch import unwatched

from attnlens.errors import UnposedError, UsageError
from attnlens.maths.attsvm import Problem, causal, finite_part, next_token, prompt, selection, selection_sets, solve

TOKENS = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0)).double()
QUERIES = torch.randn(3, 2, generator=torch.Generator().manual_seed(1)).double()
CHOSEN = torch.tensor([1, 0, 4])


def posed(problem: Problem) -> set[tuple]:
    """The constraints as comparable rows (u, z, b, equality), in whatever order they come."""
    parts = zip(problem.differences, problem.paired_queries, problem.margins, problem.equal, strict=True)
    return {(*rounded(u), *rounded(z), round(float(b), 9), bool(equal)) for u, z, b, equal in parts}


def rounded(row: Tensor) -> tuple[float, ...]:
    return tuple(round(float(number), 9) for number in row)


def row(upper: Tensor, lower: Tensor, z: Tensor, bound: float = 1.0, equal: bool = False) -> tuple:
    return (*rounded(upper - lower), *rounded(z), round(float(bound), 9), equal)


def test_selection_is_the_definition() -> None:
    allowed = torch.tensor([[1, 1, 1, 0, 1], [1, 0, 0, 0, 0], [0, 1, 1, 1, 1]]).bool()
    margins = torch.tensor([1.0, 2.0, 0.5])
    expected = {
        row(TOKENS[i, CHOSEN[i]], TOKENS[i, t], QUERIES[i], margins[i])
        for i, t in itertools.product(range(3), range(5))
        if allowed[i, t] and t != CHOSEN[i]
    }
    problem = selection(TOKENS, QUERIES, CHOSEN, allowed, margins)
    assert posed(problem) == expected
    assert len(problem.margins) == 6
    assert posed(selection(TOKENS, QUERIES, CHOSEN)) != expected


def test_float32_is_posed_in_float64() -> None:
    problem = selection(TOKENS.float(), QUERIES.float(), CHOSEN)
    assert problem.differences.dtype == problem.queries.dtype == problem.margins.dtype == torch.float64


def test_prompt_is_selection_by_the_query_one() -> None:
    assert posed(prompt(TOKENS, CHOSEN)) == posed(selection(TOKENS, torch.ones(3, 1), CHOSEN))


def test_causal_sees_the_past_only() -> None:
    chosen = torch.tensor([0, 0, 1, 3, 2])
    tokens = TOKENS[0]
    expected = {
        row(tokens[chosen[i]], tokens[t], tokens[i]) for i in range(5) for t in range(i + 1) if t != int(chosen[i])
    }
    assert posed(causal(tokens, chosen)) == expected
    with pytest.raises(UsageError):
        causal(tokens, torch.tensor([0, 2, 0, 0, 0]))


def test_causal_takes_other_queries() -> None:
    problem = causal(TOKENS[0], torch.zeros(5, dtype=torch.long), torch.ones(5, 3))
    assert problem.queries.shape == (5, 3)
    assert len(problem.margins) == 1 + 2 + 3 + 4


SETS = torch.tensor([[1, 0, 1, 0, 0], [0, 1, 0, 0, 0], [0, 0, 1, 1, 1]]).bool()


def test_sets_are_equal_inside_and_above_the_rest() -> None:
    expected = set()
    for i, keeper in enumerate((0, 1, 2)):
        for t in range(5):
            if t != keeper:
                inside = bool(SETS[i, t])
                expected.add(row(TOKENS[i, keeper], TOKENS[i, t], QUERIES[i], 0.0 if inside else 1.0, inside))
    assert posed(selection_sets(TOKENS, QUERIES, SETS)) == expected


def test_sets_of_one_token_are_a_selection() -> None:
    alone = torch.nn.functional.one_hot(CHOSEN, 5).bool()
    assert posed(selection_sets(TOKENS, QUERIES, alone)) == posed(selection(TOKENS, QUERIES, CHOSEN))


def test_solution_of_sets_keeps_each_set_together() -> None:
    problem = selection_sets(TOKENS, torch.randn(3, 4).double(), SETS)
    answer = solve(problem)
    scores = problem.scores(answer.W)
    assert answer.status == "optimal"
    assert float(scores[problem.equal].abs().max()) < 1e-9
    assert float(scores[~problem.equal].min()) > 1.0 - 1e-9


def test_copies_count_as_one_token() -> None:
    tokens = torch.cat([TOKENS, TOKENS[:, :2]], dim=1)
    # The copies come last; one of a kept token is kept with it, also where only the copy was named.
    for last in ([[1, 0], [0, 1], [0, 0]], [[0, 0], [0, 0], [0, 0]]):
        sets = torch.cat([SETS, torch.tensor(last).bool()], dim=1)
        assert posed(selection_sets(tokens, QUERIES, sets)) == posed(selection_sets(TOKENS, QUERIES, SETS))
    moved = torch.zeros_like(sets)
    moved[:, 5] = True
    assert posed(selection_sets(tokens, QUERIES, moved)) == posed(
        selection_sets(TOKENS, QUERIES, torch.eye(5)[[0, 0, 0]].bool())
    )
    assert solve(selection(tokens, QUERIES, torch.tensor([0, 0, 0]))).status == "infeasible"


def test_a_copy_that_is_not_allowed_is_not_there() -> None:
    tokens = TOKENS.clone()
    tokens[:, 0] = tokens[:, 4]
    allowed = torch.ones(3, 5).bool()
    allowed[:, 0] = False
    kept = torch.zeros(3, 5).bool()
    kept[:, 4] = True
    assert len(selection_sets(tokens, QUERIES, kept, allowed).margins) == 9


def test_finite_part_reproduces_the_weights() -> None:
    weights = torch.rand(3, 5, generator=torch.Generator().manual_seed(2)).double() + 0.1
    answer = solve(finite_part(TOKENS, QUERIES, weights, SETS))
    logits = torch.einsum("ntd,de,ne->nt", TOKENS, answer.W, QUERIES).masked_fill(~SETS, -math.inf)
    expected = weights.masked_fill(~SETS, 0.0)
    assert answer.status == "optimal"
    assert torch.allclose(logits.softmax(-1), expected / expected.sum(-1, keepdim=True), atol=1e-9)
    assert not torch.allclose(logits.softmax(-1), SETS.double() / SETS.sum(-1, keepdim=True), atol=1e-2)


def test_finite_part_of_copies_shares_their_mean() -> None:
    tokens = torch.cat([TOKENS, TOKENS[:, :1]], dim=1)
    sets = torch.tensor([[1, 0, 1, 0, 0, 1]]).bool().expand(3, 6)
    weights = torch.tensor([[0.2, 0.0, 0.5, 0.0, 0.0, 0.3]]).double().expand(3, 6)
    problem = finite_part(tokens, QUERIES, weights, sets)
    assert problem.margins.tolist() == pytest.approx([math.log(0.25 / 0.5)] * 3)


EMBEDDINGS = torch.randn(6, 7, generator=torch.Generator().manual_seed(3)).double()


def test_next_token_orders_what_follows() -> None:
    e = EMBEDDINGS
    # After 2: 0 comes before 1 and 2. After 3: 0 → 1 → 0 is a cycle, which comes before 3; 4 comes before 0.
    sequences = [[1, 2, 0], [0, 1, 3, 0], [0, 3, 1], [4, 0, 3, 4]]
    expected = {
        row(e[0], e[1], e[2]),
        row(e[0], e[2], e[2]),
        row(e[0], e[1], e[3], 0.0, True),
        row(e[0], e[3], e[3]),
        row(e[1], e[3], e[3]),
        row(e[4], e[0], e[3]),
        row(e[4], e[3], e[3]),
    }
    assert posed(next_token(sequences, e)) == expected


def test_next_token_in_a_circle_is_all_equal() -> None:
    problem = next_token([[1, 0, 2], [2, 0, 1], [1, 0, 0], [2, 1, 0, 1]], EMBEDDINGS)
    answer = solve(problem)
    assert problem.equal.tolist() == [True, True]
    assert answer.norm == 0.0


def test_next_token_repeated_changes_nothing() -> None:
    sequences = [[1, 2, 0], [0, 1, 3, 0]]
    assert len(next_token(sequences * 3, EMBEDDINGS).margins) == len(next_token(sequences, EMBEDDINGS).margins)


def nan(numbers: Tensor) -> Tensor:
    spoiled = numbers.clone()
    spoiled.view(-1)[3] = math.nan
    return spoiled


ONES = torch.ones(3, 5)
REFUSED = {
    "nan token": (lambda: selection(nan(TOKENS), QUERIES, CHOSEN), "tokens"),
    "nan query": (lambda: selection(TOKENS, nan(QUERIES), CHOSEN), "queries"),
    "infinite margin": (lambda: selection(TOKENS, QUERIES, CHOSEN, margins=torch.tensor([1, math.inf, 1])), "margins"),
    "nan weight": (lambda: finite_part(TOKENS, QUERIES, nan(ONES), SETS), "weights"),
    "nan embedding": (lambda: next_token([[0, 1, 2]], nan(EMBEDDINGS)), "embeddings"),
    "no dimension": (lambda: selection(TOKENS[..., :0], QUERIES, CHOSEN), "the last non-empty"),
    "no query dimension": (lambda: selection(TOKENS, QUERIES[:, :0], CHOSEN), "the last non-empty"),
    "two axes": (lambda: selection(TOKENS[0], QUERIES, CHOSEN), "needs 3 dimensions"),
    "too few queries": (lambda: selection(TOKENS, QUERIES[:2], CHOSEN), "one query"),
    "too few margins": (lambda: selection(TOKENS, QUERIES, CHOSEN, margins=torch.ones(2)), "margins"),
    "no such token": (lambda: selection(TOKENS, QUERIES, torch.tensor([0, 5, 0])), "allowed"),
    "hidden token": (lambda: selection(TOKENS, QUERIES, CHOSEN, torch.eye(5)[:3].bool()), "allowed"),
    "mask of another shape": (lambda: selection(TOKENS, QUERIES, CHOSEN, ONES[:, :4].bool()), "shape"),
    "empty set": (lambda: selection_sets(TOKENS, QUERIES, SETS & (torch.arange(3) > 0)[:, None]), "empty"),
    "weightless token": (lambda: finite_part(TOKENS, QUERIES, torch.zeros(3, 5), SETS), "weight"),
    "no such id": (lambda: next_token([[0, 6]], EMBEDDINGS), "6"),
    "no label": (lambda: next_token([[0]], EMBEDDINGS), "label"),
}


@pytest.mark.parametrize("case", REFUSED)
@unwatched()
def test_nonsense_is_refused_by_name(case: str) -> None:
    call, word = REFUSED[case]
    with pytest.raises(UsageError) as refusal:
        call()
    assert word in refusal.value.problem
    assert refusal.value.remedy


UNPOSED = {
    "one token": lambda: selection(TOKENS[:, :1], QUERIES, torch.zeros(3, dtype=torch.long)),
    "causal, one token": lambda: causal(TOKENS[0, :1], torch.zeros(1, dtype=torch.long)),
    "all kept": lambda: selection_sets(TOKENS, QUERIES, ONES.bool()),
    "all copies": lambda: selection_sets(TOKENS[:, :1].expand(3, 5, 4), QUERIES, SETS),
    "one kept": lambda: finite_part(TOKENS, QUERIES, ONES, torch.eye(5)[:3].bool()),
    "no sequence": lambda: next_token([], EMBEDDINGS),
    "no other token": lambda: next_token([[1, 1, 1]], EMBEDDINGS),
    "no sample": lambda: selection(TOKENS[:0], QUERIES[:0], CHOSEN[:0]),
}


@pytest.mark.parametrize("case", UNPOSED)
def test_nothing_to_separate_has_its_own_error(case: str) -> None:
    with pytest.raises(UnposedError):
        UNPOSED[case]()
