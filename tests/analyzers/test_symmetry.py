"""Tests symmetry, definiteness and shares of scores on planted heads."""

import pytest
import torch
from heads import dense, query_key, random, rotary

from attnlens.analyzers.symmetry import TOKENS, WEIGHTS, measure_tokens, measure_weights


def close(ours, theirs, atol=1e-12):
    torch.testing.assert_close(ours, torch.as_tensor(theirs).to(ours).expand_as(ours), rtol=1e-9, atol=atol)


def test_cross_attention_has_only_measures_of_different_tokens_and_hidden_pairs_leave_no_kernel_shares():
    heads = query_key(random(3, 20, 4), random(3, 12, 4, seed=1), part="cross")
    assert list(measure_weights(heads)) == ["weights.norm"] == [info.name for info in WEIGHTS if not info.self_only]
    close(measure_weights(heads)["weights.norm"], torch.linalg.matrix_norm(dense(heads)))
    tokens = measure_tokens(query_key(heads.query, heads.key, "tokens", part="cross"))
    names = [f"tokens.{name}" for name in ("share_key", "share_content", "share_first", "first_if_even")]
    assert list(tokens) == names == [info.name for info in TOKENS if not info.self_only]
    masks = torch.stack((torch.ones(20, 20).tril(), torch.ones(20, 20))).bool()[:, None]
    readings = measure_tokens(query_key(random(2, 3, 20, 4), random(2, 3, 20, 4, seed=1), "tokens", allowed=masks))
    of_all = [info.name for info in TOKENS if info.identified == "all pairs"]
    assert of_all == [f"tokens.{name}" for name in ("share_positive", "share_negative", "share_skew", "definite")]
    for info in TOKENS:
        finite = readings[info.name].isfinite()
        assert finite.all(-1).tolist() == finite.any(-1).tolist() == [info.name not in of_all, True]


def test_causal_scores_of_a_key_or_a_distance_have_their_shares():
    mask, place = torch.ones(1, 20, 20).tril().bool(), torch.arange(20).double()
    heads = query_key(random(2, 20, 4), random(2, 20, 4, seed=1), "tokens", allowed=mask)
    tokens = measure_tokens(heads)
    close(tokens["tokens.share_first"], heads.attention[..., 1:, 0].mean(-1))
    close(tokens["tokens.first_if_even"], (1 / (place[1:] + 1)).mean())
    turn, by_key = torch.stack((place.cos(), place.sin()), -1)[None], (torch.ones(1, 20, 1).double(), random(1, 20, 1))
    for sides, name, least in ((by_key, "share_key", 1.0), ((turn, turn), "share_position", 0.5)):
        shares = measure_tokens(query_key(*sides, "tokens", allowed=mask))
        assert (shares[f"tokens.{name}"] >= least - 1e-9).all()
        assert shares["tokens.share_content"].max() < 1e-20
    assert (tokens["tokens.share_content"] > 0.1).all(), "the control"


@pytest.mark.parametrize("rotation", [None, rotary(6, 4)], ids=["still", "rotated"])
def test_a_planted_symmetric_grouped_model_has_symmetry_1_and_mispaired_it_has_not(rotation):
    """W_Q of head h is a multiple of W_K of key head h // group."""
    key = random(2, 24, 4)
    query = key.repeat_interleave(3, 0) * (1 + torch.arange(6).double())[:, None, None]
    right = measure_weights(query_key(query, key, rotation=rotation))["weights.symmetry"]
    torch.testing.assert_close(right, torch.ones(6, dtype=torch.float64), rtol=0, atol=1e-13)
    slip = query_key(query, key, key_of=tuple(head % 2 for head in range(6)), rotation=rotation)
    wrong = measure_weights(slip)["weights.symmetry"]
    mispaired = torch.tensor([head % 2 != head // 3 for head in range(6)])
    assert mispaired.sum() == 2
    assert (wrong[mispaired] < 0.5).all()
    close(wrong[~mispaired], right[~mispaired])


def test_equal_negated_and_skew_factors_have_the_extreme_values():
    factor = random(2, 20, 4)
    turn = torch.tensor([[0.0, 1, 0, 0], [-1, 0, 0, 0], [0, 0, 0, 2], [0, 0, -2, 0]], dtype=torch.float64)
    skew, equal, negated = (measure_weights(query_key(query, factor)) for query in (factor @ turn, factor, -factor))
    close(skew["weights.symmetry"], -1.0)
    assert skew["weights.positivity"].abs().max() < 1e-12
    for readings, values in ((equal, (1, 1, 1, 4, 0)), (negated, (1, -1, -1, 0, 4))):
        names = ("symmetry", "positivity", "definiteness", "inertia_positive", "inertia_negative")
        for name, value in zip(names, values, strict=True):
            close(readings[f"weights.{name}"], float(value), atol=1e-10)
    embedded = random(50, 20, seed=2)
    same, other = (embedded @ factor, embedded @ random(2, 20, 4, seed=3))
    for key, definite in ((same, 1), (-same, 0), (other, 0)):
        tokens = measure_tokens(query_key(same, key, "tokens"))
        positive, negative, skew = (tokens[f"tokens.share_{name}"] for name in ("positive", "negative", "skew"))
        assert tokens["tokens.definite"].tolist() == [definite] * 2
        if key is other:
            assert min(skew.min(), negative.min()) > 0.01, "the control"
        else:
            assert max(skew.max(), (negative if definite else positive).max()) < 1e-20


def test_exchanged_queries_and_keys_flip_directionality_alone_and_the_norm_alone_has_a_scale():
    spiky, plain = random(3, 60, 4), random(3, 60, 4, seed=1)
    spiky[:, :3] *= 10
    there, back = measure_weights(query_key(spiky, plain)), measure_weights(query_key(plain, spiky))
    assert there["weights.directionality"].mean() > 0.3
    scaled = measure_weights(query_key(1e8 * spiky, 1e-3 * plain, scale=0.6))
    for name in (info.name for info in WEIGHTS if not info.curve):
        close(back[name], -there[name] if name == "weights.directionality" else there[name])
        close(scaled[name], 2e5 * there[name] if name == "weights.norm" else there[name])
    gain = torch.logspace(0, 5, 20, dtype=torch.float64)[:, None]  # LayerNorm gains of unlike magnitudes
    heads = query_key(gain * random(2, 20, 4), gain * random(2, 20, 4, seed=1))
    matrix = dense(heads)
    expected = (matrix * matrix.mT).sum((-2, -1)) / matrix.square().sum((-2, -1))
    close(measure_weights(heads)["weights.symmetry"], expected)


def test_inputs_at_the_edge():
    one = measure_tokens(query_key(random(2, 1, 4), random(2, 1, 4, seed=1), "tokens"))
    assert one["tokens.share_skew"].isnan().all()
    assert one["tokens.definite"].tolist() == [1, 1]
    saturated = measure_tokens(query_key(1e3 * random(2, 40, 4), 1e3 * random(2, 40, 4, seed=1), "tokens"))
    for whole in ("kernel_shares", "score_shares"):
        close(sum(saturated[info.name] for info in TOKENS if whole in info.wholes), 1.0, atol=1e-10)
    assert saturated["tokens.definite"].tolist() == [0, 0]
