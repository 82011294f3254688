"""Tests symmetry, definiteness and shares of scores on planted heads, with reasons where there are none."""

import pytest
import torch
from heads import dense, query_key, random, rotary

from attnlens.analyzers.registry import select_analyzers
from attnlens.analyzers.symmetry import TOKENS, WEIGHTS, of_tokens, of_weights

SCALARS = [info.name for info in WEIGHTS if not info.curve]


def test_the_analyzers_are_entered_under_one_name():
    assert [(found.name, found.source) for found in select_analyzers(["symmetry"])] == [
        ("symmetry", "weights"),
        ("symmetry", "tokens"),
    ]


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=["no batch", "a batch", "two batch axes"])
@pytest.mark.parametrize("turned", [False, True], ids=["still", "rotated"])
def test_every_measure_is_there_finite_and_in_range(batch, turned):
    rotation = rotary(5, 4) if turned else None
    readings = of_weights(query_key(random(*batch, 4, 20, 4), random(*batch, 2, 20, 4, seed=1), rotation=rotation))
    infos = {info.name: info for info in WEIGHTS if turned or not info.curve}
    assert list(readings) == list(infos)
    for name, reading in readings.items():
        assert reading.shape == (*batch, 4, *((5,) if infos[name].curve else ()))
        in_range(reading, infos[name])
    tokens = of_tokens(query_key(random(*batch, 4, 20, 4), random(*batch, 2, 20, 4, seed=1), "tokens"))
    assert list(tokens) == [info.name for info in TOKENS]
    for info in TOKENS:
        assert tokens[info.name].shape == (*batch, 4)
        in_range(tokens[info.name], info)


def in_range(reading, info):
    assert reading.dtype == torch.float64
    assert reading.isfinite().all()
    assert info.low is None or (reading >= info.low - 1e-12).all()
    assert info.high is None or (reading <= info.high + 1e-12).all()


def test_a_batch_reads_what_its_members_read():
    query, key = random(3, 4, 20, 4), random(3, 2, 20, 4, seed=1)
    for source, analyze in (("weights", of_weights), ("tokens", of_tokens)):
        together = analyze(query_key(query, key, source))
        for member in range(3):
            alone = analyze(query_key(query[member], key[member], source))
            for name, reading in alone.items():
                torch.testing.assert_close(together[name][member], reading, rtol=1e-10, atol=1e-12)


def test_in_cross_attention_no_measure_takes_queries_for_keys():
    heads = query_key(random(3, 20, 4), random(3, 12, 4, seed=1), part="cross")
    assert list(of_weights(heads)) == ["weights.norm"] == [info.name for info in WEIGHTS if not info.self_only]
    torch.testing.assert_close(of_weights(heads)["weights.norm"], torch.linalg.matrix_norm(dense(heads)))
    tokens = of_tokens(query_key(heads.query, heads.key, "tokens", part="cross"))
    assert list(tokens) == [
        f"tokens.{name}" for name in ("share_key", "share_interaction", "share_first", "first_if_even")
    ]
    assert list(tokens) == [info.name for info in TOKENS if not info.self_only]
    assert all(reading.isfinite().all() for reading in tokens.values())


def test_where_the_mask_hides_pairs_the_kernel_has_no_parts():
    mask = torch.ones(20, 20, dtype=torch.bool).tril()
    masks = torch.stack((mask, torch.ones(20, 20, dtype=torch.bool)))[:, None]
    readings = of_tokens(query_key(random(2, 3, 20, 4), random(2, 3, 20, 4, seed=1), "tokens", allowed=masks))
    of_all = [info.name for info in TOKENS if info.identified == "all pairs"]
    assert of_all == [f"tokens.{name}" for name in ("share_positive", "share_negative", "share_skew", "definite")]
    for info in TOKENS:
        there = readings[info.name].isfinite()
        assert there.all(-1).tolist() == [info.name not in of_all, True]
        assert there.any(-1).tolist() == [info.name not in of_all, True]


# --- identities, each with its control --------------------------------------------------------------------------------


def planted(heads=6, kv_heads=2, d_model=24, head_dim=4):
    """A grouped model whose every head is symmetric: W_Q of head h is a multiple of W_K of key head h // group."""
    key = random(kv_heads, d_model, head_dim)
    group = heads // kv_heads
    query = key.repeat_interleave(group, 0) * (1 + torch.arange(heads).double())[:, None, None]
    return query, key


@pytest.mark.parametrize("rotation", [None, rotary(6, 4)], ids=["still", "rotated"])
def test_a_planted_symmetric_grouped_model_reads_one_and_mispaired_it_does_not(rotation):
    query, key = planted()
    right = of_weights(query_key(query, key, rotation=rotation))["weights.symmetry"]
    torch.testing.assert_close(right, torch.ones(6, dtype=torch.float64), rtol=0, atol=1e-13)
    slip = tuple(head % 2 for head in range(6))
    wrong = of_weights(query_key(query, key, key_of=slip, rotation=rotation))["weights.symmetry"]
    mispaired = torch.tensor([head % 2 != head // 3 for head in range(6)])
    assert mispaired.sum() == 2
    assert (wrong[mispaired] < 0.5).all()
    torch.testing.assert_close(wrong[~mispaired], right[~mispaired])


def test_a_skew_matrix_reads_minus_one():
    factor = random(2, 20, 4)
    turn = torch.tensor([[0.0, 1, 0, 0], [-1, 0, 0, 0], [0, 0, 0, 2], [0, 0, -2, 0]], dtype=torch.float64)
    readings = of_weights(query_key(factor @ turn, factor))
    torch.testing.assert_close(readings["weights.symmetry"], -torch.ones(2).double(), rtol=0, atol=1e-12)
    assert readings["weights.positivity"].abs().max() < 1e-12
    assert of_weights(query_key(factor, factor))["weights.symmetry"].min() > 1 - 1e-12


def test_swapped_query_and_key_flip_directionality_and_keep_symmetry():
    spiky = random(3, 60, 4)
    spiky[:, :3] *= 10
    plain = random(3, 60, 4, seed=1)
    there, back = of_weights(query_key(spiky, plain)), of_weights(query_key(plain, spiky))
    assert there["weights.directionality"].mean() > 0.3
    torch.testing.assert_close(back["weights.directionality"], -there["weights.directionality"])
    for kept in set(SCALARS) - {"weights.directionality"}:
        torch.testing.assert_close(back[kept], there[kept], rtol=1e-10, atol=1e-12)


def test_equal_query_and_key_weights_are_mercer_in_weights_and_in_tokens():
    factor = random(2, 20, 4)
    readings = of_weights(query_key(factor, factor))
    for name in ("symmetry", "positivity", "definiteness"):
        torch.testing.assert_close(readings[f"weights.{name}"], torch.ones(2).double(), rtol=0, atol=1e-10)
    embedded = random(50, 20, seed=2) @ factor
    tokens = of_tokens(query_key(embedded, embedded, "tokens"))
    assert max(tokens["tokens.share_skew"].max(), tokens["tokens.share_negative"].max()) < 1e-20
    assert tokens["tokens.definite"].tolist() == [1, 1]
    control = of_tokens(query_key(embedded, random(50, 20, seed=2) @ random(2, 20, 4, seed=3), "tokens"))
    assert min(control["tokens.share_skew"].min(), control["tokens.share_negative"].min()) > 0.01
    assert control["tokens.definite"].tolist() == [0, 0]


def test_a_negative_head_is_symmetric_and_negative_definite():
    factor = random(2, 20, 4)
    readings = of_weights(query_key(factor, -factor))
    assert readings["weights.symmetry"].tolist() == pytest.approx([1, 1])
    assert readings["weights.definiteness"].tolist() == pytest.approx([-1, -1])
    assert readings["weights.inertia_negative"].tolist() == [4, 4]
    tokens = of_tokens(query_key(random(2, 30, 4), -random(2, 30, 4), "tokens"))
    assert tokens["tokens.share_positive"].max() < 1e-20
    assert tokens["tokens.definite"].tolist() == [0, 0]


def test_symmetry_has_no_scale_and_the_norm_has_all_of_it():
    query, key = random(2, 20, 4), random(2, 20, 4, seed=1)
    one, other = of_weights(query_key(query, key)), of_weights(query_key(1e8 * query, 1e-3 * key, scale=0.6))
    torch.testing.assert_close(other["weights.norm"], 2e5 * one["weights.norm"])
    for name in set(SCALARS) - {"weights.norm"}:
        torch.testing.assert_close(other[name], one[name], rtol=1e-9, atol=1e-12)


def test_layer_norm_gains_that_differ_by_orders_of_magnitude_change_no_verdict():
    gain = torch.logspace(0, 5, 20, dtype=torch.float64)[:, None]
    heads = query_key(gain * random(2, 20, 4), gain * random(2, 20, 4, seed=1))
    matrix = dense(heads)
    expected = (matrix * matrix.mT).sum((-2, -1)) / matrix.square().sum((-2, -1))
    torch.testing.assert_close(of_weights(heads)["weights.symmetry"], expected, rtol=1e-9, atol=1e-12)


# --- inputs at the edge -----------------------------------------------------------------------------------------------


def test_zero_weights_have_a_norm_and_no_ratio():
    readings = of_weights(query_key(torch.zeros(2, 9, 3), torch.zeros(2, 9, 3)))
    assert readings["weights.norm"].tolist() == [0, 0]
    assert readings["weights.inertia_negative"].tolist() == [0, 0]
    for name in ("symmetry", "positivity", "definiteness"):
        assert readings[f"weights.{name}"].isnan().all()


def test_one_token_has_no_anatomy_and_a_positive_kernel():
    readings = of_tokens(query_key(random(2, 1, 4), random(2, 1, 4, seed=1), "tokens"))
    assert readings["tokens.share_skew"].isnan().all()
    assert readings["tokens.definite"].tolist() == [1, 1]


def test_saturated_logits_stay_finite():
    readings = of_tokens(query_key(1e3 * random(2, 40, 4), 1e3 * random(2, 40, 4, seed=1), "tokens"))
    for whole in ("kernel_shares", "score_shares"):
        shares = [readings[info.name] for info in TOKENS if whole in info.wholes]
        torch.testing.assert_close(sum(shares), torch.ones(2).double(), rtol=0, atol=1e-10)
    assert readings["tokens.definite"].tolist() == [0, 0]
