"""Tests that shares of visible scores are those of a dense least-squares fit, whatever the mask."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from heads import query_key, random
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlens.maths import linalg
from attnlens.maths.linalg.visible import distance_sums

N = 14
ALL = torch.ones(N, N, dtype=torch.bool)
PLACE = torch.arange(N)
MASKS = {
    **{"all": None, "causal": ALL.tril(), "window": ALL.tril().triu(-4), "local": ALL.tril(3).triu(-3)},
    "padded": ALL.tril() & (PLACE > 2) & (PLACE[:, None] > 2),
    "documents": ALL.tril() & (PLACE < 6).eq((PLACE < 6)[:, None]),
    "prefix": ALL.tril() | (PLACE < 5),
}


def by_hand(logits, visible, cross=False):
    """Key, position and content of one head, from the explicit design matrices."""
    rows, columns = np.nonzero(np.asarray(visible))
    scores = np.asarray(logits)[rows, columns]
    ones = [np.eye(max(*logits.shape) * 2)[index] for index in (rows, columns, rows - columns)]

    def left(*parts):
        design = np.hstack(parts)
        return np.sum((scores - design @ np.linalg.lstsq(design, scores, rcond=None)[0]) ** 2)

    whole, beside_keys = left(ones[0]), left(*ones[:2])
    beyond = beside_keys if cross else left(*ones)
    return np.array([whole - beside_keys, beside_keys - beyond, beyond]) / whole


def shares_of(qk):
    shares = linalg.visible_shares(qk)
    return torch.stack((shares.key, shares.position, shares.content))


def heads(mask=None, n=N, m=N, batch=(), kv_heads=2, **rest):
    allowed = None if mask is None else mask.expand(*batch, 1, n, m)
    query, key = random(*batch, 4, n, 5) + 0.4, random(*batch, kv_heads, m, 5, seed=1) + 0.2
    return query_key(query, key, "tokens", allowed=allowed, **rest)


@pytest.mark.parametrize("name", MASKS)
def test_shares_are_those_of_the_least_squares_fit_and_ranks_those_of_the_visible_scores(name):
    mask = MASKS[name]
    for rest in ({}, {"softcap": 1.0}, {"bias": 2 * random(4, N, N, seed=2)}):
        qk = heads(mask, **rest)
        ours = shares_of(qk)
        for head in range(4):
            expected = by_hand(qk.logits[head], ALL if mask is None else mask)
            np.testing.assert_allclose(ours[:, head], expected, atol=1e-11)
        torch.testing.assert_close(ours.sum(0), torch.ones(4).double(), rtol=0, atol=1e-13)
        assert (ours > 0.003).all()
    plain = heads(mask)
    shifted = heads(mask, bias=1e3 * random(1, N, 1, seed=3).expand(1, N, N))  # a term of the query alone
    torch.testing.assert_close(shares_of(shifted), shares_of(plain), rtol=0, atol=1e-9)
    torch.testing.assert_close(linalg.visible_scores(shifted), linalg.visible_scores(plain), rtol=0, atol=1e-10)
    assert mask is None or (shares_of(plain) - shares_of(heads())).abs().max() > 0.01, "the control: masks matter"
    visible = (ALL if mask is None else mask).double()
    for softcap in (None, 1.0):
        qk = heads(mask, softcap=softcap)
        scores = qk.logits * visible
        scores = (scores - scores.sum(-1, keepdim=True) / visible.sum(-1, keepdim=True).clamp(min=1)) * visible
        torch.testing.assert_close(linalg.visible_scores(qk), scores)
        energies = torch.linalg.svdvals(scores).square()
        passed = energies.cumsum(-1) / energies.sum(-1, keepdim=True)
        for share in (0.5, 0.9, 0.99):
            assert linalg.visible_rank(qk, share).tolist() == (1 + (passed < share).sum(-1)).tolist()


@given(st.integers(1, 9), st.floats(0.1, 1.0), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_any_mask_has_its_fit(n, share, seed):
    draw = torch.Generator().manual_seed(seed)
    visible = torch.rand(n, n, generator=draw) < share
    qk = query_key(random(1, n, 3, seed=seed), random(1, n, 3, seed=seed + 1), "tokens", allowed=visible[None])
    ours = shares_of(qk)[:, 0]
    if (visible.sum(-1) < 2).all():
        assert ours.isnan().all(), "no query compares two keys"
    else:
        np.testing.assert_allclose(ours, by_hand(qk.logits[0], visible), atol=1e-8)


def test_cross_attention_has_no_distances():
    hidden = torch.ones(12, 7, dtype=torch.bool)
    hidden[:5, 4:] = False
    for mask in (None, hidden):
        qk = heads(mask, n=12, m=7, part="cross")
        key, position, content = shares_of(qk)
        assert position.isnan().all()
        for head in range(4):
            expected = by_hand(qk.logits[head], torch.ones(12, 7) if mask is None else mask, cross=True)
            np.testing.assert_allclose([key[head], content[head]], expected[[0, 2]], atol=1e-11)


def test_every_head_and_sequence_has_its_own_mask():
    masks = torch.stack([MASKS["causal"], MASKS["window"], ALL, MASKS["padded"]])
    by_sequence = query_key(random(4, 2, N, 5), random(4, 2, N, 5, seed=1), "tokens", allowed=masks[:, None])
    by_head = query_key(random(2, 4, N, 5), random(2, 4, N, 5, seed=1), "tokens", allowed=masks.expand(2, 4, N, N))
    for qk, mask_of in ((by_sequence, lambda batch, _: masks[batch]), (by_head, lambda _, head: masks[head])):
        ours = shares_of(qk)
        for batch, head in np.ndindex(*qk.logits.shape[:2]):
            expected = by_hand(qk.logits[batch, head], mask_of(batch, head))
            np.testing.assert_allclose(ours[:, batch, head], expected, atol=1e-11)
    assert linalg.compares_all(by_head).tolist() == [[False, False, True, False]] * 2
    assert linalg.compares_all(by_sequence).tolist() == [[False] * 2, [False] * 2, [True] * 2, [False] * 2]


def test_planted_heads_have_the_planted_shares():
    distances = torch.arange(N)[:, None] - torch.arange(N)
    keys = random(N, seed=4).expand(N, N)
    previous = 5.0 * (distances == 1).double()
    bias = torch.stack((keys, previous, 0.5 * distances.double(), keys + 5 * random(N, N, seed=5)))
    zero = torch.zeros(4, N, 4)
    qk = query_key(zero, zero, "tokens", allowed=MASKS["causal"][None], bias=bias)
    by_key, before, linear, noisy = shares_of(qk).T
    torch.testing.assert_close(by_key, torch.tensor([1, 0, 0]).double(), rtol=0, atol=1e-12)
    assert before[2] < 1e-12
    assert before[1] > 0.6
    torch.testing.assert_close(linear, torch.tensor([1, 0, 0]).double(), rtol=0, atol=1e-12)  # m·(i − j) is m·i − m·j
    assert noisy[2] > 0.5


def test_without_visible_pairs_there_are_no_shares():
    query, alike = random(2, N, 4), random(2, 1, 4, seed=1).expand(2, N, 4)
    cases = ((alike, None), (alike, ALL.tril()[None]), (query, torch.eye(N).bool()[None]), (query, ~ALL[None]))
    without = [query_key(query, key, "tokens", allowed=allowed) for key, allowed in cases]
    for qk in (*without, query_key(query[:, :1], query[:, :1], "tokens")):
        assert shares_of(qk).isnan().all()
        assert (linalg.visible_scores(qk) == 0).all()
        assert linalg.visible_rank(qk, 0.9).isnan().all()


def test_sums_over_distances():
    for n, m in ((1, 1), (1, 4), (5, 1), (6, 6), (4, 9)):
        scores = random(2, n, m)
        sums = distance_sums(scores)
        for apart in range(-n + 1, m):  # key minus query
            torch.testing.assert_close(sums[:, apart % (n + m)], scores.diagonal(apart, -2, -1).sum(-1))
        torch.testing.assert_close(sums.sum(-1), scores.sum((-2, -1)))


@pytest.mark.parametrize("allowed", [None, MASKS["causal"], MASKS["window"]], ids=["all", "causal", "window"])
def test_the_weight_on_the_first_key_that_a_query_sees(allowed):
    qk = heads(allowed)
    visible = ALL if allowed is None else allowed
    rows = [row for row in range(N) if visible[row].sum() > 1]
    expected = qk.attention[:, rows, [int(visible[row].nonzero()[0]) for row in rows]].mean(-1)
    torch.testing.assert_close(linalg.first_weight(qk), expected)
    even = replace(qk, query=torch.zeros_like(qk.query))
    torch.testing.assert_close(linalg.even_weight(qk), linalg.first_weight(even))
    assert (linalg.first_weight(qk) - qk.attention[..., 0].mean(-1)).abs().max() > 1e-3 or allowed is None
