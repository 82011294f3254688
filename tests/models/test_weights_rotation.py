"""Tests that the rotation fitted to queries and keys is the one that turns them, whatever gains hide."""

import copy

import families
import pytest
import torch
import transformers as tf
from factors import ROTARY, read
from heads import query_key, random, rotary, stacked, turns

from attnlens.analyzers.registry import select_analyzers
from attnlens.analyzers.symmetry import measure_weights
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
IDS = {"input_ids": torch.arange(10)[None] + 3}
close = torch.testing.assert_close


def rotation(layout, base=40.0):
    pairs = torch.tensor(sorted(LAYOUTS[layout]))
    frequencies = base ** (-torch.arange(len(pairs)).double() / len(pairs))
    return Rotation(pairs, torch.arange(POSITIONS).double()[:, None] * frequencies, SIZE)


def turned(by, rows=20, dead=(), seed=0):
    """Rows at every position, turned; the coordinates `dead` are 0 before."""
    x = random(rows, 1, SIZE, seed=seed)
    x[..., list(dead)] = 0
    return by.rotate(x.expand(rows, len(by.angles), SIZE))


def assert_same_turns(ours, theirs, atol=1e-9):
    close(turns(ours), turns(theirs), rtol=0, atol=atol)


def test_pairs_and_angles_are_fitted_in_any_layout_and_with_any_signal_left():
    for layout in LAYOUTS:
        true = rotation(layout)
        fitted = fit_rotation(turned(true), turned(true, seed=1), EXACT)
        assert (fitted.pairs.tolist(), fitted.by_distance) == (true.pairs.tolist(), True), layout
        assert_same_turns(fitted, true)
    true = rotation("half-split")
    for query, key in (([2], [2]), ([2], [8]), ([2, 8], []), ([2, 8], [3, 9]), (range(SIZE), [])):
        fitted = fit_rotation(turned(true, dead=query), turned(true, dead=key, seed=1), EXACT)
        assert_same_turns(fitted, true)
    fitted = fit_rotation(turned(true, dead=[2, 8]), turned(true, dead=[2, 8], seed=1), EXACT)
    left = [0, 1, 3, 4, 5]  # a pair without signal stands still
    assert_same_turns(fitted, Rotation(true.pairs[left], true.angles[:, left], SIZE))


def test_anything_but_a_common_rotation_is_refused():
    true, other = rotation("half-split"), rotation("half-split", base=30.0)
    queries, keys = turned(true), turned(true, seed=1)
    lengths = 1 + 0.1 * torch.arange(POSITIONS).double()[:, None]
    one_pair = torch.cat((true.angles[:, :-1], other.angles[:, -1:]), 1)
    for query, key, words in (
        (queries, turned(other, seed=1), "rotate differently"),
        (queries, turned(true.transposed, seed=1), "more than rotate queries and keys"),
        (queries, keys[:, :1].expand_as(keys), "rotate differently"),
        (queries, turned(rotation("interleaved"), seed=1), "more than rotate queries and keys"),
        (queries * lengths, keys * lengths, "more than rotate queries and keys"),
        (queries + random(POSITIONS, SIZE), keys, "more than rotate queries and keys"),
        (queries, turned(Rotation(true.pairs, one_pair, SIZE), seed=1), "rotate differently"),
    ):
        with pytest.raises(UnreadableError, match=words):
            fit_rotation(query, key, EXACT)


PLACES = torch.tensor([[0, 0], [0, 0], *[[row, column] for row in range(3) for column in range(4)]]).double()
"""Two tokens without a place, and a grid of three rows."""
BY_PLACE = Rotation(  # half of the pairs turn with the row, half with the column
    torch.stack((torch.arange(6), torch.arange(6, 12)), -1),
    torch.cat([PLACES[:, axis, None] * torch.tensor([1.0, 0.3, 0.1]).double() for axis in (0, 1)], -1),
    SIZE,
    by_distance=False,
)


def test_angles_of_places_are_distinguished_from_those_of_distances():
    fitted = fit_rotation(turned(BY_PLACE), turned(BY_PLACE, seed=1), EXACT)
    assert not fitted.by_distance
    assert_same_turns(fitted, BY_PLACE)
    along = rotary(9, 12)
    assert fit_rotation(turned(along), turned(along, seed=1), EXACT).by_distance, "control"
    heads = query_key(random(4, 15, 12), random(2, 15, 12, seed=1), rotation=BY_PLACE)
    form, joint = linalg.Form(heads), stacked(heads)
    eigenvalues = torch.linalg.eigvalsh((joint + joint.mT) / 2)
    close(linalg.symmetry(form), (joint * joint.mT).sum((1, 2)) / joint.square().sum((1, 2)))
    close(form.norm, joint.norm(dim=(1, 2)))
    close(form.definiteness, eigenvalues.sum(-1) / eigenvalues.abs().sum(-1))
    summed = joint.sum(0)
    assert linalg.layer_symmetry(heads) == pytest.approx(float((summed * summed.T).sum() / summed.square().sum()))
    assert "weights.symmetry_by_distance" not in measure_weights(heads)


def gemma(dead=(), layers=(0,), model=None):
    """A tiny Gemma 3 whose QK-norms have gain 0 (weight −1) at these coordinates of these layers."""
    model = families.build("gemma3") if model is None else model
    for layer in layers:
        for name in ("q_norm", "k_norm"):
            getattr(model.model.layers[layer].self_attn, name).weight[list(dead)] = -1.0
    return model


def assert_singular_values_of_the_joint_kernel(query_key):
    joint = torch.linalg.svdvals(stacked(query_key))[:, :10]
    close(linalg.Form(query_key).singular_values, joint, atol=1e-6, rtol=1e-6)


def test_gains_of_zero_cost_no_head_and_no_angle_but_without_signal_there_is_no_rotation():
    whole = read(families.build("gemma3"), "gemma3")
    for dead in ([2, 7], [2], [0, 5, 3, 8], [0, 1, 2, 3, 5, 6, 7, 8]):
        gapped = read(gemma(dead), "gemma3")
        for before, after in zip(whole, gapped, strict=True):
            assert_same_turns(after.rotation, before.rotation)
        left = [coordinate for coordinate in range(10) if coordinate not in dead]
        close(gapped[0].maps.query[..., left], whole[0].maps.query[..., left])
        assert (gapped[0].maps.query[..., dead] == 0).all(), dead
        assert_singular_values_of_the_joint_kernel(gapped[0].query_key)
    first, second = read(gemma(range(10)), "gemma3")  # without signal in the turning part of the first
    assert (first.rotation, first.maps.query.norm()) == (None, 0)
    assert second.rotation is not None
    model = families.build("gpt_neox")  # which turns a part of its coordinates
    fused = model.gpt_neox.layers[0].attention.query_key_value
    turning = read(model, "gpt_neox")[1].rotation.pairs.flatten().tolist()
    assert sorted(turning) == [0, 1, 2, 3]
    for part in (fused.weight, fused.bias):
        part.view(4, 3, 10, -1)[:, :2, turning] = 0
    first, second = read(model, "gpt_neox")
    assert (first.rotation, bool(first.maps.query.norm() > 0)) == (None, True)
    assert second.rotation is not None


def test_gains_behind_the_rotation_are_not_a_rotation():
    model = tf.HunYuanDenseV1ForCausalLM(tf.HunYuanDenseV1Config(**families.GROUPED)).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=0.3)
    assert all(factors.rotation is not None for factors in read(model, inputs=IDS)), "equal gains turn with it"
    model.model.layers[0].self_attn.query_layernorm.weight[2] = 0.2
    uneven, even = read(model, inputs=IDS)
    assert isinstance(uneven, UnreadableError)
    assert "not bilinear" not in uneven.problem, "that was not shown"
    assert even.qk_norm


YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = YARN | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_angles_are_positions_times_the_models_frequencies_in_the_layers_with_positions():
    pairs = torch.stack((torch.arange(5), torch.arange(5, 10)), -1)
    for scaling in ({"rope_type": "default", "rope_theta": 100.0}, LLAMA3, YARN):
        torch.manual_seed(0)
        model = tf.LlamaForCausalLM(tf.LlamaConfig(**families.GROUPED, rope_parameters=scaling)).eval()
        angles = torch.arange(10).double()[:, None] * model.model.rotary_emb.inv_freq.double()
        assert_same_turns(read(model, inputs=IDS)[0].rotation, Rotation(pairs, angles, 10), atol=2e-6)
    config = tf.SmolLM3Config(**families.GROUPED | {"num_hidden_layers": 4}, no_rope_layers=[1, 0, 1, 0])
    torch.manual_seed(0)
    factors = read(tf.SmolLM3ForCausalLM(config).eval().requires_grad_(False), inputs=IDS)
    assert [one.rotation is None for one in factors] == [False, True, False, True]
    assert factors[0].rotation is factors[2].rotation


def test_a_layer_reads_the_same_alone_and_among_all():
    kinds = ["sliding_attention", "full_attention"] * 2
    sizes = families.GROUPED | {"num_hidden_layers": 4}
    config = tf.Gemma3TextConfig(**sizes, query_pre_attn_scalar=24, sliding_window=5, layer_types=kinds)
    torch.manual_seed(0)
    model = gemma((1, 6), (0, 3), tf.Gemma3ForCausalLM(config).eval().requires_grad_(False))
    inputs = families.inputs("gemma3", model, batch=1)
    first, window = (hooks.survey(model, {k: v[:, :end] for k, v in inputs.items()}) for end in (1, None))
    among = list(weights.factors(model, first, window))
    # layers of one kind share a rotation and so its nulls, gains of 0 or not
    assert among[0].rotation is among[2].rotation is not among[1].rotation is among[3].rotation
    for layer in range(4):
        (alone,) = weights.factors(model, [first[layer]], [window[layer]])
        assert torch.equal(alone.maps.query, among[layer].maps.query)
        assert_same_turns(alone.rotation, among[layer].rotation)


def halved(name, dtype):
    """A model with weights of that type, and one in float32 with the same weights; buffers stay as they are loaded."""
    model, full = families.build(name), families.build(name)
    for half, whole in zip(model.parameters(), full.parameters(), strict=True):
        half.data = half.data.to(dtype)
        whole.data = half.data.float()
    return model, full


def measured(query_key):
    """All measures of weights but those that jump."""
    listed = [part for part in select_analyzers(["symmetry", "spectrum"]) if part.source == "weights"]
    values = {name: values for analyzer in listed for name, values in analyzer.function(query_key).items()}
    jumping = "directionality", "rank90", "inertia", "decay"
    return {name: value for name, value in values.items() if not any(word in name for word in jumping)}


HALVES = [(name, torch.bfloat16) for name in ROTARY] + [("llama", torch.float16), ("gemma3", torch.float16)]
REST = (pytest.param(name, torch.float16, marks=pytest.mark.full) for name in ROTARY if name not in ("llama", "gemma3"))


@pytest.mark.parametrize(("name", "dtype"), [*HALVES, *REST])
def test_a_model_in_half_precision_reads_as_with_the_same_weights_in_float32(name, dtype):
    (half, full), eps = halved(name, dtype), torch.finfo(dtype).eps
    for low, high in zip(read(half, name), read(full, name), strict=True):
        assert low.maps.query.dtype == low.rotation.angles.dtype == torch.float64
        close(low.maps.query, high.maps.query, rtol=eps, atol=eps * 1e-2)
        assert torch.equal(low.rotation.pairs, high.rotation.pairs)
        assert_same_turns(low.rotation, high.rotation, atol=eps)
        close(measured(low.query_key), measured(high.query_key), rtol=2 * eps, atol=2 * eps)
    assert next(half.parameters()).dtype == dtype, "the model is restored"


def test_rounded_cos_and_sin_alone_would_not_do():
    full = read(families.build("llama"), "llama")[0].rotation
    angles = full.angles
    rounded = torch.atan2(angles.sin().bfloat16().double(), angles.cos().bfloat16().double())
    low = read(halved("llama", torch.bfloat16)[0], "llama")[0].rotation
    coarse, fine = (turns(other) - turns(full) for other in (Rotation(full.pairs, rounded, full.size), low))
    assert fine.abs().max() < 0.7 * coarse.abs().max()


def test_a_float32_module_is_probed_in_float64_and_restored():
    model = families.build("qwen3")
    before = copy.deepcopy(model.state_dict())
    factors, module = read(model, "qwen3")[0], model.model.layers[0].self_attn
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(part._forward_hooks for part in model.modules())
    weight = module.q_proj.weight.double().view(6, 10, 48).mT
    ratio = factors.maps.query / (weight * module.q_norm.weight.double())  # one factor, of the norm's eps
    close(ratio, ratio.mean().expand_as(ratio), rtol=1e-12, atol=0)
