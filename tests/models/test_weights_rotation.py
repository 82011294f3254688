"""Tests that the rotation told from queries and keys is the one that turns them, whatever gains hide."""

import copy

import families
import loaded
import pytest
import torch
import transformers as tf
from factors import ROTARY, read
from heads import random, stacked, turns

import attnlens
from attnlens.analyzers.registry import select_analyzers
from attnlens.errors import UnreadableError
from attnlens.maths import linalg
from attnlens.models import hooks, weights
from attnlens.models.weights.query_key_maps import fit_rotation
from attnlens.records import Rotation

EXACT = torch.finfo(torch.float64).eps
POSITIONS, SIZE = 9, 12
LAYOUTS = {
    "half-split": [(pair, pair + 6) for pair in range(6)],
    "interleaved": [(2 * pair, 2 * pair + 1) for pair in range(6)],
    "partial": [(0, 2), (1, 3)],
    "elsewhere": [(7, 9), (2, 11), (4, 5)],
}


def rotation(layout, base=40.0):
    pairs = torch.tensor(sorted(layout))
    frequencies = base ** (-torch.arange(len(pairs)).double() / len(pairs))
    return Rotation(pairs, torch.arange(POSITIONS).double()[:, None] * frequencies, SIZE)


def turned(by, rows=20, dead=(), seed=0):
    """Rows at every position, turned; the coordinates `dead` are 0 before."""
    x = random(rows, 1, SIZE, seed=seed)
    x[..., list(dead)] = 0
    return by.rotate(x.expand(rows, POSITIONS, SIZE))


def same_turns(ours, theirs):
    torch.testing.assert_close(turns(ours), turns(theirs), rtol=0, atol=1e-9)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_pairs_and_angles_are_found_whatever_the_layout(layout):
    true = rotation(layout)
    found = fit_rotation(turned(true), turned(true, seed=1), EXACT)
    assert found.pairs.tolist() == true.pairs.tolist()
    same_turns(found, true)


HIDDEN = {
    "one coordinate of queries and keys": ([2], [2]),
    "one coordinate here, its partner there": ([2], [8]),
    "one pair of queries": ([2, 8], []),
    "one pair of keys and another of queries": ([2, 8], [3, 9]),
    "all queries": (range(SIZE), []),
}


@pytest.mark.parametrize("hidden", HIDDEN.values(), ids=HIDDEN)
def test_a_pair_is_told_from_whatever_signal_is_left(hidden):
    true = rotation(LAYOUTS["half-split"])
    queries, keys = (turned(true, dead=dead, seed=seed) for seed, dead in enumerate(hidden))
    same_turns(fit_rotation(queries, keys, EXACT), true)


def test_a_pair_without_signal_stands_still_and_the_others_turn():
    true = rotation(LAYOUTS["half-split"])
    found = fit_rotation(turned(true, dead=[2, 8]), turned(true, dead=[2, 8], seed=1), EXACT)
    kept = [pair for pair in range(6) if pair != 2]
    same_turns(found, Rotation(true.pairs[kept], true.angles[:, kept], SIZE))


def refused(query, key, words, rounding=EXACT):
    with pytest.raises(UnreadableError, match=words):
        fit_rotation(query, key, rounding)


def test_what_is_no_rotation_is_refused():
    true, other = rotation(LAYOUTS["half-split"]), rotation(LAYOUTS["half-split"], base=30.0)
    queries, keys = turned(true), turned(true, seed=1)
    refused(queries, turned(other, seed=1), "rotate differently")
    refused(queries, turned(true.transposed, seed=1), "more than the direction")
    refused(queries, keys[:, :1].expand_as(keys), "rotate differently")
    refused(queries, turned(rotation(LAYOUTS["interleaved"]), seed=1), "more than the direction")
    lengths = 1 + 0.1 * torch.arange(POSITIONS).double()[:, None]
    refused(queries * lengths, keys * lengths, "more than the direction")
    refused(queries + random(POSITIONS, SIZE), keys, "more than the direction")
    one_pair = other.angles.clone()
    one_pair[:, :-1] = true.angles[:, :-1]
    refused(queries, turned(Rotation(true.pairs, one_pair, SIZE), seed=1), "rotate differently")


# --- gains of 0 -------------------------------------------------------------------------------------------------------


def gemma(dead=(), layers=(0,)):
    """A tiny Gemma 3 whose QK-norms have gain 0 (weight −1) at these coordinates of these layers."""
    model = families.build("gemma3")
    for layer in layers:
        for name in ("q_norm", "k_norm"):
            getattr(model.model.layers[layer].self_attn, name).weight[list(dead)] = -1.0
    return model


DEAD = {
    "one pair": (2, 7),
    "one coordinate": (2,),
    "two pairs": (0, 5, 3, 8),
    "all but one pair": (0, 1, 2, 3, 5, 6, 7, 8),
}


@pytest.mark.parametrize("dead", DEAD.values(), ids=DEAD)
def test_gains_of_zero_cost_no_head_and_no_angle(dead):
    whole, gapped = read(families.build("gemma3"), "gemma3"), read(gemma(dead), "gemma3")
    for before, after in zip(whole, gapped, strict=True):
        same_turns(after.rotation, before.rotation)
    kept = [coordinate for coordinate in range(10) if coordinate not in dead]
    torch.testing.assert_close(gapped[0].maps.query[..., kept], whole[0].maps.query[..., kept])
    assert (gapped[0].maps.query[..., list(dead)] == 0).all()
    joint = torch.linalg.svdvals(stacked(gapped[0].query_key))[:, :10]
    torch.testing.assert_close(linalg.Form(gapped[0].query_key).singular_values, joint, atol=1e-6, rtol=1e-6)


def test_where_every_gain_is_zero_there_is_nothing_to_turn():
    factors = read(gemma(range(10)), "gemma3")
    assert factors[0].rotation is None
    assert factors[0].maps.query.norm() == 0
    assert factors[1].rotation is not None


def test_gains_behind_the_rotation_are_no_rotation():
    config = tf.HunYuanDenseV1Config(**families.GROUPED)
    model = tf.HunYuanDenseV1ForCausalLM(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=0.3)
    inputs = {"input_ids": torch.arange(10)[None] + 3}
    assert all(factors.rotation is not None for factors in read(model, inputs=inputs)), "equal gains turn with it"
    model.model.layers[0].self_attn.query_layernorm.weight[2] = 0.2
    uneven, even = read(model, inputs=inputs)
    assert isinstance(uneven, UnreadableError)
    assert "not bilinear" not in uneven.problem, "that was not shown"
    assert even.qk_norm


@pytest.mark.parametrize(("query_heads", "key_heads"), [((0, 1), (0,)), (range(6), (0, 1))])
def test_heads_that_share_a_dead_pair_are_read(query_heads, key_heads):
    model = families.build("llama")
    module = model.model.layers[0].self_attn
    for projection, heads in ((module.q_proj, query_heads), (module.k_proj, key_heads)):
        for row in (10 * head + coordinate for head in heads for coordinate in (1, 6)):
            projection.weight[row] = projection.bias[row] = 0
    factors, untouched = read(model, "llama")
    lost = len(query_heads) == 6  # no head has a signal there, so that there is no angle
    assert [1, 6] in untouched.rotation.pairs.tolist()
    assert ([1, 6] in factors.rotation.pairs.tolist()) != lost
    joint = torch.linalg.svdvals(stacked(factors.query_key))[:, :10]
    torch.testing.assert_close(linalg.Form(factors.query_key).singular_values, joint, atol=1e-6, rtol=1e-6)


# --- partial rotary, layers without positions, scaled frequencies -----------------------------------------------------


def test_partial_rotary_without_signal_in_the_turning_part_has_no_rotation():
    model = families.build("gpt_neox")
    fused = model.gpt_neox.layers[0].attention.query_key_value
    rotary = read(model, "gpt_neox")[1].rotation.pairs.flatten().tolist()
    assert sorted(rotary) == [0, 1, 2, 3]
    for part in (fused.weight, fused.bias):
        part.view(4, 3, 10, -1)[:, :2, rotary] = 0
    first, second = read(model, "gpt_neox")
    assert first.rotation is None
    assert first.maps.query.norm() > 0
    assert second.rotation is not None


def test_layers_without_positions_among_rotary_ones_have_none():
    config = tf.SmolLM3Config(**families.GROUPED | {"num_hidden_layers": 4}, no_rope_layers=[1, 0, 1, 0])
    torch.manual_seed(0)
    model = tf.SmolLM3ForCausalLM(config).eval().requires_grad_(False)
    found = read(model, inputs={"input_ids": torch.arange(10)[None] + 3})
    assert [factors.rotation is None for factors in found] == [False, True, False, True]
    assert found[0].rotation is found[2].rotation


SCALED = {
    "default": {"rope_type": "default", "rope_theta": 100.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16},
}  # fmt: skip


@pytest.mark.parametrize("scaling", SCALED.values(), ids=SCALED)
def test_angles_are_positions_times_the_models_frequencies(scaling):
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**families.GROUPED, rope_parameters=scaling)).eval()
    found = read(model, inputs={"input_ids": torch.arange(10)[None] + 3})[0]
    frequencies = model.model.rotary_emb.inv_freq.double()
    pairs = torch.stack((torch.arange(5), torch.arange(5, 10)), -1)
    expected = Rotation(pairs, torch.arange(10).double()[:, None] * frequencies, 10)
    torch.testing.assert_close(turns(found.rotation), turns(expected), rtol=0, atol=2e-6)


# --- precision --------------------------------------------------------------------------------------------------------

BY_THRESHOLD = ("directionality", "rank90", "inertia", "decay")
"""Measures that jump where something passes a border."""


def halved(name, dtype):
    """A model with weights of that type, and one in float32 with the same weights; buffers stay as they are loaded."""
    model, full = families.build(name), families.build(name)
    for half, whole in zip(model.parameters(), full.parameters(), strict=True):
        half.data = half.data.to(dtype)
        whole.data = half.data.float()
    return model, full


def measured(query_key):
    found = [one.function(query_key) for one in select_analyzers(["symmetry", "spectrum"]) if one.source == "weights"]
    return {name: values for readings in found for name, values in readings.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ROTARY)
def test_a_model_in_half_precision_reads_as_with_the_same_weights_in_float32(name, dtype):
    half, full = halved(name, dtype)
    eps = torch.finfo(dtype).eps
    ours, theirs = read(half, name), read(full, name)
    for low, high in zip(ours, theirs, strict=True):
        torch.testing.assert_close(low.maps.query, high.maps.query, rtol=eps, atol=eps * 1e-2)
        assert torch.equal(low.rotation.pairs, high.rotation.pairs)
        torch.testing.assert_close(turns(low.rotation), turns(high.rotation), rtol=0, atol=eps)
        expected = measured(high.query_key)
        for measure, values in measured(low.query_key).items():
            if not any(word in measure for word in BY_THRESHOLD):
                torch.testing.assert_close(values, expected[measure], rtol=2 * eps, atol=2 * eps)
    assert ours[0].maps.query.dtype == ours[0].rotation.angles.dtype == torch.float64
    assert next(half.parameters()).dtype == dtype, "the model is as it was"


def test_rounded_cos_and_sin_alone_would_not_do():
    full = read(families.build("llama"), "llama")[0].rotation
    angles = full.angles
    rounded = torch.atan2(angles.sin().bfloat16().double(), angles.cos().bfloat16().double())
    coarse = float((turns(Rotation(full.pairs, rounded, full.size)) - turns(full)).abs().max())
    low = read(halved("llama", torch.bfloat16)[0], "llama")[0].rotation
    assert float((turns(low) - turns(full)).abs().max()) < 0.7 * coarse


def test_a_float32_module_is_probed_in_float64_and_left_alone():
    model = families.build("qwen3")
    before = copy.deepcopy(model.state_dict())
    factors = read(model, "qwen3")[0]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
    gain = model.model.layers[0].self_attn.q_norm.weight.double()
    weight = model.model.layers[0].self_attn.q_proj.weight.double().view(6, 10, 48).mT
    ratio = factors.maps.query / (weight * gain)  # one factor, of the norm's eps
    torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio), rtol=1e-12, atol=0)


# --- one layer asked = the same layer among all -----------------------------------------------------------------------


@pytest.mark.parametrize("layer", [0, 1, 2, 3])
def test_a_layer_reads_the_same_alone_and_among_all(layer):
    config = tf.Gemma3TextConfig(
        **families.GROUPED | {"num_hidden_layers": 4}, query_pre_attn_scalar=24, sliding_window=5,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = tf.Gemma3ForCausalLM(config).eval().requires_grad_(False)
    for found in (model.model.layers[0].self_attn, model.model.layers[3].self_attn):
        for norm in (found.q_norm, found.k_norm):
            norm.weight[[1, 6]] = -1.0
    inputs = families.inputs("gemma3", model, batch=1)
    one = {key: value[:, :1] for key, value in inputs.items()}
    first, window = hooks.survey(model, one), hooks.survey(model, inputs)
    among = list(weights.factors(model, first, window))
    (alone,) = weights.factors(model, [first[layer]], [window[layer]])
    assert torch.equal(alone.maps.query, among[layer].maps.query)
    torch.testing.assert_close(turns(alone.rotation), turns(among[layer].rotation), rtol=0, atol=1e-9)
    # layers of one kind share a rotation and so its nulls, gains of 0 or not
    assert among[0].rotation is among[2].rotation is not among[1].rotation is among[3].rotation


def test_inspect_gives_one_layer_the_numbers_that_it_has_among_all():
    model = loaded.loaded(gemma((1, 6)))
    every = attnlens.inspect(model, source="weights", length=8)
    assert every.coverage.complete
    for layer in (0, 1):
        alone = attnlens.inspect(model, source="weights", length=8, layers=[layer])
        expected = [head for head in every.heads if head.layer == layer]
        assert len(alone.heads) == len(expected) == 6
        for ours, theirs in zip(alone.heads, expected, strict=True):
            for name, measure in theirs.measures.items():
                same = pytest.approx(measure.value, rel=1e-8, abs=1e-9) if measure.value is not None else None
                assert ours.measures[name].value == same
