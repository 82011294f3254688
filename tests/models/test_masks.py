"""Tests how calls of transformers' attention interface are read: masks of any number, biases, scales and pairing."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers as tf

from attnlens.analyzers.registry import select_analyzers
from attnlens.errors import ModelError
from attnlens.kernels import OWN
from attnlens.kernels.attention import attend
from attnlens.models import hooks, weights
from attnlens.models.hooks.interface import read_call

LEAST = torch.finfo(torch.float32).min
close = torch.testing.assert_close


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def read(query, mask=None, **more):
    return read_call(torch.nn.Identity(), query, query, query, mask, more)


def split(mask):
    call = read(torch.zeros(mask.shape[0], 2, *mask.shape[-2:]), mask)
    return call.allowed, call.bias


def visibility():
    """Random visibility, each query sees itself; the first sequence sees everything, as Swin's first window does."""
    seen = torch.rand(4, 1, 6, 6, generator=torch.Generator().manual_seed(0)) > 0.3
    seen[0] = True
    return seen | torch.eye(6, dtype=torch.bool)


def test_any_number_that_takes_the_weight_away_is_a_mask():
    numbers = {torch.float32: (-50.0, -100.0, -1e4, -1e9, LEAST, -math.inf)}
    numbers |= {torch.bfloat16: (-100.0, -1e9), torch.float16: (-100.0, -65504.0)}
    seen = visibility()
    for dtype, visible in ((dtype, visible) for dtype in numbers for visible in (0.0, 1.0)):
        for number in numbers[dtype]:
            allowed, bias = split(torch.where(seen, visible, number).to(dtype))
            assert torch.equal(allowed, seen), (dtype, number, visible)
            assert bias is None, (dtype, number, visible)
    for number, empty in ((LEAST, True), (-1e9, True), (-100.0, False), (-3.0, False)):
        mask = torch.zeros(1, 1, 4, 4)
        mask[0, 0, 1] = number  # −100 for every key leaves the softmax as it was
        allowed, _ = split(mask)
        assert allowed[0, 0, [0, 2, 3]].all(), number
        assert bool(allowed[0, 0, 1].any()) != empty, number


def test_a_mask_on_top_of_a_position_bias_is_separated_from_it():
    seen, bias = visibility(), 8 * draw(1, 2, 6, 6, seed=1).clamp(-1, 1)
    for number in (-100.0, -1e4, -1e9, LEAST):
        allowed, added = split(bias + torch.where(seen, 0.0, number))
        assert torch.equal(allowed, seen.expand_as(allowed))
        # the bias of a masked pair is known from the sequence that sees it
        close(added, bias.expand_as(added), rtol=0, atol=1e-6)
    seen, bias = seen.clone(), bias.repeat(4, 1, 1, 1)
    seen[:, :, 0, 1] = False
    bias[1, :, 2] += 1.0
    allowed, added = split(bias + torch.where(seen, 0.0, -100.0))
    assert (added[:, :, 0, 1] == 0).all(), "no sequence sees this pair"
    unknown = allowed[0, :, 2] & allowed[1, :, 2] & ~allowed[2, :, 2]
    assert unknown.any()
    assert (added[2, :, 2][unknown] == 0).all(), "the bias differs between sequences"


DISTANCE = (torch.arange(300)[:, None] - torch.arange(300)).abs()
BIASES = {
    "ALiBi": -DISTANCE * torch.tensor([1.0, 0.5])[:, None, None],
    "learned by distance": -40 * DISTANCE.clamp(max=16).double().log1p()[None].float(),
    "one far value": torch.where(DISTANCE == 7, -30.0, 0.0)[None],
}


def test_a_deep_position_bias_is_not_a_mask():
    for name, number in itertools.product(BIASES, (0.0, -1e4, LEAST)):
        bias = BIASES[name][None]
        seen = torch.ones_like(bias, dtype=torch.bool) & ((torch.arange(300) < 280) | (number == 0))
        allowed, added = split(torch.where(seen, bias, number))
        assert torch.equal(allowed, seen), name
        close(added, bias * seen)
        assert added.min() < -20, "control: a fixed bound would cut it"


def test_scale_chosen_keys_and_position_bias_of_a_call_are_read():
    assert read(torch.ones(1, 2, 3, 16)).scale == 0.25, "one over the root of the head's width"
    assert read(torch.ones(1, 2, 3, 16), scaling=2.0).scale == 2.0
    for options, words in (({"scaling": 1j}, "scales its scores by a complex number"), ({"sinks": 1}, "separate sink")):
        with pytest.raises(ModelError, match=words):
            read(torch.ones(1, 2, 3, 16), **options)
    query, module = torch.ones(1, 2, 3, 4), torch.nn.Identity()
    module.indexer = SimpleNamespace(build_block_mask=lambda blocks, *_: torch.where(blocks, 0.0, LEAST))
    chosen = torch.tensor([[[0, 2], [1, 0], [2, 0]]], dtype=torch.int32)
    blocks = torch.tensor([[[[True, False, True], [True, True, False], [True, False, True]]]])
    for mask in (torch.ones(1, 1, 3, 3, dtype=torch.bool).tril(), None):  # an indexer's keys under the mask
        for indices in ({"indices": chosen}, {"block_indices": blocks}):
            call = read_call(module, query, query, query, mask, indices)
            assert call.allowed.int().tolist() == [[[[1, 0, 0], [1, 1, 0], [1, 0, 1]]]]
            assert not call.causal
    few, many = draw(1, 2, 3, 4), draw(1, 4, 3, 4, seed=1)
    for key, value in ((few, many), (many, few)):  # heads that share a key or a value are neighbours
        call = read_call(torch.nn.Identity(), many, key, value, None, {})
        for ours, theirs in ((call.key, key), (call.value, value)):
            assert all(torch.equal(ours[:, head], theirs[:, head * theirs.shape[1] // 4]) for head in range(4))
    seen = visibility().expand(4, 2, 6, 6)
    beside, numbers = (8 * draw(1, heads, 6, 6, seed=1).clamp(-1, 1) for heads in (2, 1))
    call = read(torch.zeros(4, 2, 6, 6), torch.where(visibility(), numbers, LEAST), position_bias=beside)
    close(call.bias.expand(4, 2, 6, 6)[seen], (beside + numbers).expand(4, 2, 6, 6)[seen])


def test_one_row_of_a_mask_holds_for_all_queries(monkeypatch):
    monkeypatch.setattr("attnlens.kernels.attention.rows.TILE_BYTES", 1)  # tiles of 16 rows
    query, key, value = draw(3, 2, 3, 40, 4)
    seen = torch.ones(2, 1, 1, 40, dtype=torch.bool)
    seen[1, ..., 30:] = False
    for mask in (seen, torch.where(seen, 0.0, LEAST)):
        call = read_call(torch.nn.Identity(), query, key, value, mask, {})
        assert call.allowed.shape == (2, 1, 40, 40)
        expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, seen.expand(-1, -1, 40, -1))
        close(attend(call, OWN, "eager").transpose(1, 2), expected)


def drawn(model):
    for name, parameter in model.named_parameters():
        if "relative" in name:
            parameter.data.normal_()
        elif parameter.ndim > 1:
            sharp = 1.4 if "q_proj" in name or "k_proj" in name else 1.0
            parameter.data.normal_(std=sharp / parameter[0].numel() ** 0.5)
    return model.eval().requires_grad_(False)


def swin():
    """Shifted windows: its mask tells which patches were neighbours in the image, beside relative positions."""
    sizes = {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": 4}

    def visible(reached):
        mask = reached.arguments["attention_mask"] == 0
        repeated = mask.repeat(reached.call.query.shape[0] // len(mask), 1, 1)
        return repeated[:, None], reached.module.relative_position_bias()

    return drawn(tf.SwinModel(tf.SwinConfig(**sizes))), torch.randn(2, 3, 16, 16), visible


def eomt():
    config = tf.EomtConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=2, image_size=32, patch_size=8, num_blocks=2,
        num_queries=5, mlp_ratio=2, num_upscale_blocks=1, num_labels=3, num_register_tokens=1,
    )  # fmt: skip
    model = tf.EomtForUniversalSegmentation(config)
    model.attn_mask_probs.fill_(1.0)
    return drawn(model), torch.randn(2, 3, 32, 32), lambda reached: (reached.arguments["attention_mask"] == 1, None)


def plain_scores(query_key):
    return query_key.query.double() @ query_key.key.double().mT * query_key.scale


def largest_change(query_key, changed):
    """Largest difference of any symmetry measure of a site with other scores or another mask."""
    analyzer = next(one for one in select_analyzers(["symmetry"]) if one.source == "tokens")
    own, other = (analyzer.function(one) for one in (query_key, changed))
    return max(float((own[name] - other[name]).abs().nan_to_num(0).max()) for name in own)


@pytest.mark.parametrize("build", [swin, eomt])
def test_models_with_other_masks_read_as_with_a_boolean_one(build):
    torch.manual_seed(0)
    model, pixels, visible = build()
    inputs = {"pixel_values": pixels}
    sites = hooks.survey(model, inputs)
    masked = [reached for reached in sites if reached.arguments.get("attention_mask") is not None]
    assert masked
    assert hooks.identity_error(model, inputs) < hooks.IDENTITY_TOLERANCE
    for reached in masked:
        (seen, bias), call = visible(reached), reached.call
        assert not seen.all()
        assert torch.equal(call.allowed, seen.expand_as(call.allowed))
        ours = call.query_key(reached.site)
        scores = call.query.double() @ call.key.double().mT * call.scale + (0 if bias is None else bias)
        close(ours.logits, scores.double())
        close(ours.attention, scores.masked_fill(~seen, -math.inf).softmax(-1))
        added = (scores + torch.where(seen, 0.0, -100.0) - plain_scores(ours)).expand(*ours.query.shape[:-1], -1)
        unit = torch.eye(added.shape[-1], dtype=torch.float64).expand(*ours.key.shape[:-1], -1)
        query, key = torch.cat([ours.query.double(), added / ours.scale], -1), torch.cat([ours.key.double(), unit], -1)
        unmasked = replace(ours, query=query, key=key, bias=None, allowed=None)
        assert largest_change(ours, unmasked) > 0.05, "control: as scores the mask is seen as structure"
        assert largest_change(ours, replace(ours, bias=scores - plain_scores(ours))) < 1e-6
    if build is swin:  # its mask is made for all windows together
        for reached, factors in zip(sites, weights.factors(model, sites, sites), strict=True):
            assert factors.rotation is None
            close(factors.maps.query, reached.module.q_proj.weight.double().view(2, 8, 16).mT, rtol=1e-6, atol=1e-6)
