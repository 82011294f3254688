"""Tests that problems have the constraints that the theorems state, and that invalid arguments are refused."""

import itertools
import math

import numpy as np
import pytest
import torch
from heads import random
from watch import unwatched

from attnlens.errors import UnposedError, UsageError
from attnlens.maths.attsvm import causal, finite_part, next_token, prompt, selection, selection_sets, solve

TOKENS, QUERIES, EMBEDDINGS = random(3, 5, 4), random(3, 2, seed=1), random(6, 7, seed=3)
CHOSEN, ZEROS = torch.tensor([1, 0, 4]), torch.zeros(3, dtype=torch.long)
SETS = torch.tensor([[1, 0, 1, 0, 0], [0, 1, 0, 0, 0], [0, 0, 1, 1, 1]]).bool()


def rounded(*rows):
    return tuple(round(float(number), 9) for row in rows for number in row)


def posed(problem):
    """The constraints as a set of rows (u, z, b, equality)."""
    parts = zip(problem.differences, problem.paired_queries, problem.margins, problem.equal, strict=True)
    return {(*rounded(u, z, [b]), bool(equal)) for u, z, b, equal in parts}


def row(upper, lower, z, bound=1.0, equal=False):
    return *rounded(upper - lower, z, [bound]), equal


def test_selection_is_the_definition():
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
    assert posed(selection(TOKENS, QUERIES, CHOSEN.int())) == posed(selection(TOKENS, QUERIES, CHOSEN))
    assert posed(prompt(TOKENS, CHOSEN)) == posed(selection(TOKENS, torch.ones(3, 1), CHOSEN))
    single = selection(TOKENS.float(), QUERIES.float(), CHOSEN)
    assert single.differences.dtype == single.queries.dtype == single.margins.dtype == torch.float64


def test_causal_sees_the_past_only():
    chosen, tokens = torch.tensor([0, 0, 1, 3, 2]), TOKENS[0]
    past = [(i, t) for i in range(5) for t in range(i + 1) if t != int(chosen[i])]
    assert posed(causal(tokens, chosen)) == {row(tokens[chosen[i]], tokens[t], tokens[i]) for i, t in past}
    other_queries = causal(tokens, torch.zeros(5, dtype=torch.long), torch.ones(5, 3))
    assert other_queries.queries.shape == (5, 3)
    assert len(other_queries.margins) == 1 + 2 + 3 + 4
    with pytest.raises(UsageError):
        causal(tokens, torch.tensor([0, 2, 0, 0, 0]))


def test_sets_are_equal_inside_and_above_the_rest():
    expected = {
        row(TOKENS[i, i], TOKENS[i, t], QUERIES[i], 0.0 if SETS[i, t] else 1.0, bool(SETS[i, t]))
        for i, t in itertools.product(range(3), range(5))
        if t != i  # the first token of each set is its representative
    }
    assert posed(selection_sets(TOKENS, QUERIES, SETS)) == expected
    alone = torch.nn.functional.one_hot(CHOSEN, 5).bool()
    assert posed(selection_sets(TOKENS, QUERIES, alone)) == posed(selection(TOKENS, QUERIES, CHOSEN))
    problem = selection_sets(TOKENS, random(3, 4), SETS)
    answer = solve(problem)
    scores = problem.scores(answer.W)
    assert answer.status == "optimal"
    assert float(scores[problem.equal].abs().max()) < 1e-9
    assert float(scores[~problem.equal].min()) > 1.0 - 1e-9


def test_copies_count_as_one_token():
    tokens = torch.cat([TOKENS, TOKENS[:, :2]], dim=1)
    # The copies come last; one of a selected token is selected with it, also where only the copy was named.
    for last in ([[1, 0], [0, 1], [0, 0]], [[0, 0], [0, 0], [0, 0]]):
        sets = torch.cat([SETS, torch.tensor(last).bool()], dim=1)
        assert posed(selection_sets(tokens, QUERIES, sets)) == posed(selection_sets(TOKENS, QUERIES, SETS))
    copy, first = (torch.zeros(3, length).bool() for length in (7, 5))
    copy[:, 5] = first[:, 0] = True
    assert posed(selection_sets(tokens, QUERIES, copy)) == posed(selection_sets(TOKENS, QUERIES, first))
    assert solve(selection(tokens, QUERIES, ZEROS)).status == "infeasible"
    tokens = TOKENS.clone()
    tokens[:, 0] = tokens[:, 4]
    assert len(selection_sets(tokens, QUERIES, first.roll(-1, 1), ~first).margins) == 9, "of hidden copies nothing"


def test_finite_part_reproduces_the_weights():
    weights = torch.rand(3, 5, generator=torch.Generator().manual_seed(2)).double() + 0.1
    answer = solve(finite_part(TOKENS, QUERIES, weights, SETS))
    logits = torch.einsum("ntd,de,ne->nt", TOKENS, answer.W, QUERIES).masked_fill(~SETS, -math.inf)
    expected = weights.masked_fill(~SETS, 0.0)
    assert answer.status == "optimal"
    assert torch.allclose(logits.softmax(-1), expected / expected.sum(-1, keepdim=True), atol=1e-9)
    assert not torch.allclose(logits.softmax(-1), SETS.double() / SETS.sum(-1, keepdim=True), atol=1e-2)
    tokens = torch.cat([TOKENS, TOKENS[:, :1]], dim=1)
    weights = torch.tensor([[0.2, 0.0, 0.5, 0.0, 0.0, 0.3]]).double().expand(3, 6)
    problem = finite_part(tokens, QUERIES, weights, weights > 0)
    assert problem.margins.tolist() == pytest.approx([math.log(0.25 / 0.5)] * 3), "copies share their mean"


def test_next_token_orders_what_follows():
    e = EMBEDDINGS
    # After 2: 0 comes before 1 and 2. After 3: 0 → 1 → 0 is a cycle, which comes before 3; 4 comes before 0.
    sequences = [[1, 2, 0], [0, 1, 3, 0], [0, 3, 1], [4, 0, 3, 4]]
    above = {row(e[a], e[b], e[z]) for a, b, z in ((0, 1, 2), (0, 2, 2), (0, 3, 3), (1, 3, 3), (4, 0, 3), (4, 3, 3))}
    assert posed(next_token(sequences, e)) == above | {row(e[0], e[1], e[3], 0.0, True)}
    assert len(next_token(sequences * 3, e).margins) == len(next_token(sequences, e).margins)
    circle = next_token([[1, 0, 2], [2, 0, 1], [1, 0, 0], [2, 1, 0, 1]], e)
    assert circle.equal.tolist() == [True, True]
    assert solve(circle).norm == 0.0


def nan(numbers):
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
    "no dimension": (lambda: selection(TOKENS[..., :0], QUERIES, CHOSEN), "of which the last must not be empty"),
    "no query dimension": (lambda: selection(TOKENS, QUERIES[:, :0], CHOSEN), "of which the last must not be empty"),
    "two axes": (lambda: selection(TOKENS[0], QUERIES, CHOSEN), "needs 3 dimensions"),
    "too few queries": (lambda: selection(TOKENS, QUERIES[:2], CHOSEN), "one entry for each of the 3 samples"),
    "too few margins": (lambda: selection(TOKENS, QUERIES, CHOSEN, margins=torch.ones(2)), "margins"),
    "no such token": (lambda: selection(TOKENS, QUERIES, torch.tensor([0, 5, 0])), "allowed"),
    "hidden token": (lambda: selection(TOKENS, QUERIES, CHOSEN, torch.eye(5)[:3].bool()), "allowed"),
    "mask of another shape": (lambda: selection(TOKENS, QUERIES, CHOSEN, ONES[:, :4].bool()), "shape"),
    "empty set": (lambda: selection_sets(TOKENS, QUERIES, SETS & (torch.arange(3) > 0)[:, None]), "empty"),
    "weightless token": (lambda: finite_part(TOKENS, QUERIES, torch.zeros(3, 5), SETS), "weight"),
    "no such id": (lambda: next_token([[0, 6]], EMBEDDINGS), "6"),
    "no label": (lambda: next_token([[0]], EMBEDDINGS), "label"),
    "array of tokens": (lambda: selection(TOKENS.numpy(), QUERIES, CHOSEN), "ndarray"),
    "array of queries": (lambda: selection(TOKENS, QUERIES.numpy(), CHOSEN), "ndarray"),
    "array of indices": (lambda: selection(TOKENS, QUERIES, CHOSEN.numpy()), "ndarray"),
    "list of indices": (lambda: selection(TOKENS, QUERIES, [0, 1, 2]), "list"),
    "float indices": (lambda: selection(TOKENS, QUERIES, CHOSEN.double()), "chosen"),
    "bool indices": (lambda: selection(TOKENS, QUERIES, CHOSEN.bool()), "chosen"),
    "complex tokens": (lambda: selection(TOKENS + 1j, QUERIES, CHOSEN), "complex"),
    "complex queries": (lambda: selection(TOKENS, QUERIES + 1j, CHOSEN), "complex"),
    "prompt of an array": (lambda: prompt(TOKENS.numpy(), CHOSEN), "ndarray"),
    "causal array": (lambda: causal(TOKENS[0].numpy(), torch.zeros(5).long()), "ndarray"),
    "array of sets": (lambda: selection_sets(TOKENS, QUERIES, np.ones((3, 5), dtype=bool)), "ndarray"),
}


UNPOSED = {
    "one token": lambda: selection(TOKENS[:, :1], QUERIES, ZEROS),
    "causal, one token": lambda: causal(TOKENS[0, :1], ZEROS[:1]),
    "all selected": lambda: selection_sets(TOKENS, QUERIES, ONES.bool()),
    "all copies": lambda: selection_sets(TOKENS[:, :1].expand(3, 5, 4), QUERIES, SETS),
    "one selected": lambda: finite_part(TOKENS, QUERIES, ONES, torch.eye(5)[:3].bool()),
    "no sequence": lambda: next_token([], EMBEDDINGS),
    "no other token": lambda: next_token([[1, 1, 1]], EMBEDDINGS),
    "no sample": lambda: selection(TOKENS[:0], QUERIES[:0], CHOSEN[:0]),
}


@unwatched()
def test_nonsense_is_refused_by_name_and_nothing_to_separate_has_its_own_error():
    for case, (call, word) in REFUSED.items():
        with pytest.raises(UsageError) as refusal:
            call()
        assert word in refusal.value.problem, case
        assert refusal.value.remedy, case
    for call in UNPOSED.values():
        with pytest.raises(UnposedError):
            call()
