"""Tests the spectra of weights and attention on planted heads, and their nulls."""

import pytest
import torch
from heads import close, dense, query_key, random, rotary

from attnlens.analyzers.registry import select_analyzers
from attnlens.analyzers.spectrum import TOKENS, WEIGHTS, measure_tokens, measure_weights
from attnlens.maths import linalg
from attnlens.maths.statistics import gaussian_null

CAUSAL = torch.ones(30, 30, dtype=torch.bool).tril()[None]


def effective_rank(sigma):
    p = sigma / sigma.sum(-1, keepdim=True)
    return (-(p * p.clamp(min=1e-300).log()).sum(-1)).exp()


def rank90(sigma):
    energies = sigma.square().cumsum(-1) / sigma.square().sum(-1, keepdim=True)
    return (energies < 0.9).sum(-1).double() + 1


def test_weights_have_the_spectrum_of_the_formed_matrix():
    heads = query_key(random(6, 30, 5), random(2, 30, 5, seed=1))
    sigma, readings = torch.linalg.svdvals(dense(heads))[:, :5], measure_weights(heads)
    close(readings["weights.singular_values"], sigma)
    close(readings["weights.stable_rank"], sigma.square().sum(-1) / sigma[:, 0].square())
    close(readings["weights.effective_rank"], effective_rank(sigma))
    close(readings["weights.rank90"], rank90(sigma))
    slip = measure_weights(query_key(heads.query, heads.key, key_of=(0, 1, 0, 1, 0, 1)))["weights.effective_rank"]
    assert not torch.allclose(slip, readings["weights.effective_rank"], rtol=1e-3)
    close(readings["weights.decay"], linalg.decay_rate(sigma))
    query, key = random(2, 30, 6), random(2, 30, 6, seed=1)
    turned, still = (measure_weights(query_key(query, key, rotation=turn)) for turn in (rotary(40, 6), None))
    smoother = turned["weights.singular_values"][:, 0] < still["weights.singular_values"][:, 0]
    assert smoother.all(), "a rotation smoothes the spectrum"


def test_random_factors_decay_as_their_null_and_planted_ones_faster():
    (analyzer,) = select_analyzers(["spectrum"], "weights")
    heads = query_key(random(8, 40, 16), random(8, 40, 16, seed=1))
    mean, sd = gaussian_null([analyzer], heads, draws=64)["weights.decay"]
    assert mean > 5 * sd > 0, "sorted singular values fall by themselves"
    assert ((measure_weights(heads)["weights.decay"] - mean).abs() < 4 * sd).all()
    planted = query_key(heads.query * torch.logspace(0, -1, 16, dtype=torch.float64), heads.key)
    assert (measure_weights(planted)["weights.decay"] > mean + 4 * sd).all()


def test_cross_attention_has_every_spectrum_and_logits_that_are_not_bilinear_are_formed():
    assert not any(info.self_only for info in (*WEIGHTS, *TOKENS))
    query, key = 2 * random(2, 30, 4), random(2, 30, 4, seed=1)
    for rest in ({"softcap": 0.2}, {"bias": 5 * random(1, 30, 30, seed=2)}):
        heads = query_key(query, key, "tokens", **rest)
        expected = rank90(torch.linalg.svdvals(heads.logits - heads.logits.mean(-1, keepdim=True)))
        close(measure_tokens(heads)["tokens.logit_rank90"], expected)
        assert (measure_tokens(query_key(query, key, "tokens"))["tokens.logit_rank90"] < expected).any()


@pytest.mark.parametrize("allowed", [None, CAUSAL], ids=["all", "causal"])
@pytest.mark.parametrize("sharpness", [0.3, 3.0, 300.0], ids=["soft", "sharp", "saturated"])
def test_attention_spectra_are_those_of_the_softmax(allowed, sharpness):
    heads = query_key(sharpness * random(4, 30, 6), random(2, 30, 6, seed=1), "tokens", allowed=allowed)
    visible = (torch.ones(1, 30, 30) if allowed is None else allowed).double()
    logits = dense(heads)
    attention = torch.softmax(logits.masked_fill(visible == 0, -torch.inf), -1)
    sigma, readings = torch.linalg.svdvals(attention), measure_tokens(heads)
    close(readings["tokens.effective_rank"], effective_rank(sigma), 1e-8)
    close(readings["tokens.rank90"], rank90(sigma))
    close(readings["tokens.singular_values"], sigma.cumsum(-1) / sigma.sum(-1, keepdim=True))
    close(readings["tokens.singular_values_energy"], sigma.square().cumsum(-1) / sigma.square().sum(-1, keepdim=True))
    close(readings["tokens.centred_effective_rank"], effective_rank(torch.linalg.svdvals(attention - 1 / 30)), 1e-8)
    seen = (logits - (logits * visible).sum(-1, keepdim=True) / visible.sum(-1, keepdim=True)) * visible
    close(readings["tokens.logit_rank90"], rank90(torch.linalg.svdvals(seen)))
    close(readings["tokens.max_weight"], attention.amax(-1).mean(-1))
    if allowed is not None:
        unmasked = measure_tokens(query_key(heads.query, heads.key, "tokens"))
        assert (unmasked["tokens.effective_rank"] - readings["tokens.effective_rank"]).abs().max() > 0.1


def test_extreme_heads_have_known_values_or_none():
    sink = torch.zeros(1, 12, 12, dtype=torch.float64)
    sink[:, 3] = 1e4
    eye, none = torch.eye(12, dtype=torch.float64)[None], None
    names = ("entropy", "max_weight", "effective_rank", "centred_effective_rank", "logit_rank90")
    for query, key, values in (
        (torch.zeros(1, 9, 4), random(1, 9, 4).float(), (1, 1 / 9, 1, none, none)),  # even attention
        (torch.ones_like(sink), sink, (0, 1, 1, ..., 1)),  # a sink
        (1e4 * eye, eye.roll(1, -1), (0, 1, 12, 11, 10)),  # a permutation
        (random(1, 1, 4), random(1, 1, 4, seed=1), (none, 1, 1, none, none)),  # one token
    ):
        readings = measure_tokens(query_key(query, key, "tokens"))
        for name, value in zip(names, values, strict=True):
            number = readings[f"tokens.{name}"].item()
            assert value is ... or (number != number if value is none else number == pytest.approx(value, abs=1e-9))
    assert readings["tokens.singular_values"].tolist() == [[1]]
