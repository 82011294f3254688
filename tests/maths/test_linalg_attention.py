"""Tests the measures of attention and scores of tokens against dense computations."""

import math

import numpy as np
import pytest
import torch
from heads import query_key, random
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlens.maths import linalg


def close(ours, theirs, tolerance=1e-11):
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max()))


def attention_by_hand(heads):
    """Entropy and largest weight, row by row."""
    logits = heads.scale * heads.query @ heads.key[:, list(heads.key_of)].mT
    means = torch.zeros(2, *logits.shape[:2], dtype=torch.float64)
    for batch, head in np.ndindex(*logits.shape[:2]):
        entropies, largest = [], []
        for i, row in enumerate(logits[batch, head]):
            scores = row if heads.allowed is None else row[heads.allowed[batch, 0, i]]
            sink = [] if heads.sinks is None else [heads.sinks[head]]
            p = torch.softmax(torch.cat((scores, torch.tensor(sink, dtype=torch.float64))), 0)
            if len(p) > 1:
                entropies.append(-(p * p.log()).sum() / math.log(len(p)))
            if len(scores):
                largest.append(p[: len(scores)].max())
        means[:, batch, head] = torch.stack([torch.stack(entropies).mean(), torch.stack(largest).mean()])
    return means


CAUSAL = torch.ones(8, 8, dtype=torch.bool).tril()
HOLED = CAUSAL & torch.tensor([row != 3 for row in range(8)])[:, None]


@pytest.mark.parametrize("allowed", [None, CAUSAL, HOLED], ids=["all", "causal", "an empty row"])
def test_entropy_and_largest_weight_row_by_row(allowed):
    mask = None if allowed is None else allowed.expand(2, 1, 8, 8)
    for sinks in (None, torch.tensor([0.5, 2.0, -1.0])):
        heads = query_key(random(2, 3, 8, 4), random(2, 3, 8, 4, seed=1), "tokens", allowed=mask, sinks=sinks)
        entropy, largest = attention_by_hand(heads)
        torch.testing.assert_close(linalg.entropy(heads), entropy, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(linalg.max_weight(heads), largest, rtol=1e-6, atol=1e-6)
        if allowed is not None:
            unmasked = query_key(heads.query, heads.key, "tokens", sinks=sinks)
            assert (linalg.entropy(unmasked) - entropy).abs().max() > 0.01, "control: a dropped mask shows"


def test_hidden_keys_have_no_weight_and_even_attention_is_centred_to_zero():
    shut = query_key(random(2, 3, 4), random(2, 3, 4), "tokens", allowed=torch.zeros(1, 3, 3, dtype=torch.bool))
    assert linalg.max_weight(shut).isnan().all()
    assert (linalg.remove_row_sums(torch.full((5, 7), 1 / 7, dtype=torch.float64)) == 0).all()
    attention = torch.softmax(random(5, 7), -1)
    close(linalg.remove_row_sums(attention), attention - torch.ones(5, 7).double() / 7)


def anatomy_by_hand(logits):
    n = logits.shape[-1]
    j = torch.eye(n, dtype=torch.float64) - 1 / n
    even, odd = j @ (logits + logits.mT) @ j / 2, j @ (logits - logits.mT) @ j / 2
    mu = torch.linalg.eigvalsh(even)
    columns = logits.mean(-2) - logits.mean((-2, -1), keepdim=True)[..., 0]
    of_mu = [part.square().sum(-1) for part in (mu.clamp(min=0), mu.clamp(max=0))]
    parts = torch.stack([*of_mu, odd.square().sum((-2, -1)), n * columns.square().sum(-1)])
    return parts / (logits @ j).square().sum((-2, -1))


def shares_of(heads):
    parts = linalg.anatomy(heads)
    return torch.stack((parts.positive, parts.negative, parts.skew, parts.key))


@pytest.mark.parametrize("n", [5, 8, 9, 30])
def test_anatomy_is_that_of_the_formed_logits(n):
    for softcap in (None, 1.5):
        heads = query_key(random(2, 4, n, 4) + 0.5, random(2, 2, n, 4, seed=1), "tokens", softcap=softcap)
        ours = shares_of(heads)
        close(ours, anatomy_by_hand(heads.logits), 1e-11)
        close(linalg.visible_shares(heads).key, ours[3], 1e-9)
        assert (ours.sum(0) - 1).abs().max() < 1e-10
        assert (ours > 0.001).all()


@given(st.integers(3, 40), st.integers(1, 6), st.integers(-8, 8), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_shares_sum_to_one_whatever_the_tokens(n, size, exponent, seed):
    query, key = random(1, n, size, seed=seed), random(1, n, size, seed=seed + 1)
    key[:, 0] *= 10.0**exponent  # a sink, or a token that nobody sees
    key[:, -1], query[:, -1] = key[:, 0], query[:, 0]  # a duplicate
    shares = shares_of(query_key(query, key, "tokens"))
    assert (shares.sum(0) - 1).abs().max() < 1e-10
    assert (shares >= 0).all()


def test_anatomy_of_mercer_skew_and_key_independent_forms():
    for n in (6, 30):
        factor = random(2, n, 4)
        parts = linalg.anatomy(query_key(factor, factor, "tokens"))
        assert max(parts.skew.max(), parts.negative.max()) < 1e-24
        assert (parts.positive > 0.5).all()
        control = linalg.anatomy(query_key(factor, factor.roll(1, -1), "tokens"))
        assert control.skew.min() > 0.01
        assert control.negative.min() > 0.001
    turn, factor = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64), random(1, 12, 2)
    factor = factor - factor.mean(-2, keepdim=True)
    assert linalg.anatomy(query_key(factor, factor @ turn, "tokens")).skew.item() == pytest.approx(1, abs=1e-12)
    for query, key in (
        (random(2, 20, 4), random(2, 1, 4, seed=1).expand(2, 20, 4)),
        (random(2, 1, 4), random(2, 1, 4)),
        (torch.zeros(2, 9, 4), random(2, 9, 4).float()),
    ):
        assert shares_of(query_key(query, key, "tokens")).isnan().all()


def test_a_gate_on_queries_changes_nothing_and_one_on_keys_only_the_key_share():
    heads = query_key(random(1, 10, 6), random(1, 10, 6, seed=1), "tokens")
    gate = random(1, 10, seed=2)
    plain = shares_of(heads)
    queries, keys = (
        shares_of(query_key(heads.query, heads.key, "tokens", bias=bias.expand(1, 10, 10)))
        for bias in (gate[..., None], gate[:, None])
    )
    close(queries, plain, 1e-10)
    assert (keys[3] - plain[3]).abs() > 1e-3
    close(keys[:3] / keys[:3].sum(0), plain[:3] / plain[:3].sum(0), 1e-10)


def verdict_by_hand(logits):
    kernel = (logits - logits.mean(-1, keepdim=True) + logits.mean(-2)[..., None]).exp()
    kernel = (kernel + kernel.mT) / 2
    scale = kernel.diagonal(dim1=-2, dim2=-1).rsqrt()
    values = torch.linalg.eigvalsh(kernel * scale[..., None] * scale[..., None, :])
    return torch.where(values[..., 0] >= -1e-12, 1.0, 0.0).double()


def test_verdicts_are_those_of_the_eigenvalues():
    for n in (1, 2, 20, 150):
        factor = random(3, 2, n, 6)
        mercer = 0.3 * factor @ factor.mT
        mixed = torch.cat((mercer, mercer + 0.02 * random(3, 2, n, n), 0.3 * random(3, 2, n, n)))
        verdicts = linalg.definite(mixed)
        assert torch.equal(verdicts, verdict_by_hand(mixed))
        assert (verdicts[:3] == 1).all()
        assert n < 20 or (verdicts[6:] == 0).all()


def test_late_witnesses_large_logits_duplicates_and_kernels_without_a_witness_have_their_verdict():
    angles = torch.tensor([0.0, 0.5, 1.0, 1.4], dtype=torch.float64)
    kernel = (angles[:, None] - angles).cos()
    assert linalg.definite(kernel.log()[None]).item() == 1
    kernel[0, 2] = kernel[2, 0] = 0.4
    assert kernel.max() <= 1
    assert torch.linalg.eigvalsh(kernel)[0] < -0.01
    assert linalg.definite(kernel.log()[None]).item() == 0, "Cholesky detects it without a witness"
    factor = random(1, 200, 6)
    logits = 0.3 * factor @ factor.mT
    logits[0, 190, 195] = logits[0, 195, 190] = logits[0].max() + 1
    assert linalg.definite(logits).item() == 0, "a witness outside the first glance counts"
    factor = 40 * random(1, 30, 6).repeat(1, 2, 1)
    logits = factor @ factor.mT
    assert logits.max() > 5000
    assert linalg.definite(logits).item() == 1
    assert linalg.definite(logits + 1e4 * (random(1, 60, 60) > 2)).item() == 0


def test_at_the_border_no_verdict_is_given():
    angles = torch.tensor([0.0, 0.35, 0.7], dtype=torch.float64)
    kernel = (angles[:, None] - angles).cos()
    least = torch.linalg.eigh(kernel).eigenvectors[:, 0]
    tolerance = torch.finfo(torch.float64).eps * 3 * kernel.sum(-1).max()
    shifted = [kernel - times * tolerance * torch.outer(least, least) for times in (0.0, 2.5, 20.0)]
    verdicts = linalg.definite(torch.stack(shifted).log())
    torch.testing.assert_close(verdicts, torch.tensor([1, math.nan, 0]).double(), equal_nan=True)
