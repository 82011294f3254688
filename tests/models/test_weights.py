"""Tests that the Jacobian's factors are the model's weights, and that what is not bilinear is refused."""

import families
import pytest
import torch
import transformers
from factors import ROTARY, read
from heads import turns
from torch.utils.flop_counter import FlopCounterMode

from attnlens.errors import NotBilinearError
from attnlens.models import hooks
from attnlens.models.weights.probe import FewTokens, norms_inside
from attnlens.models.weights.probe import linear as linear_norms


def per_head(weight, heads):
    """A Linear's (out, in) weight as (heads, in, head_dim)."""
    return weight.double().view(heads, -1, weight.shape[1]).mT


def linear(query, key):
    """Hand reader for modules with separate projections at these attribute names."""

    def hand(module, call):
        return (
            per_head(getattr(module, query).weight, call.query.shape[1]),
            per_head(getattr(module, key).weight, call.key.shape[1]),
        )

    return hand


def gpt2(module, call):
    weight = module.c_attn.weight.T
    size = weight.shape[0] // 3
    heads = call.query.shape[1]
    return per_head(weight[:size], heads), per_head(weight[size : 2 * size], heads)


def gpt_neox(module, call):
    weight = module.query_key_value.weight
    fused = weight.view(call.query.shape[1], 3, -1, weight.shape[1]).double()
    return fused[:, 0].mT, fused[:, 1].mT


def phi3(module, call):
    head_dim = call.query.shape[-1]
    q, k = call.query.shape[1] * head_dim, call.key.shape[1] * head_dim
    weight = module.qkv_proj.weight
    return per_head(weight[:q], call.query.shape[1]), per_head(weight[q : q + k], call.key.shape[1])


def gained(module, call):
    """QK-norm: W times the norm's gain, measured as the norm of a vector of ones."""
    query, key = linear("q_proj", "k_proj")(module, call)
    ones = torch.ones(call.query.shape[-1])
    return query * module.q_norm(ones).double(), key * module.k_norm(ones).double()


PROJ = linear("q_proj", "k_proj")
HAND = {
    "bert": linear("query", "key"),
    "roberta": linear("query", "key"),
    "distilbert": linear("q_lin", "k_lin"),
    "albert": linear("query", "key"),
    "gpt2": gpt2,
    "gpt_neox": gpt_neox,
    "opt": PROJ,
    "llama": PROJ,
    "mistral": PROJ,
    "qwen2": PROJ,
    "qwen3": gained,
    "gemma2": PROJ,
    "gemma3": gained,
    "phi3": phi3,
    "cohere": PROJ,
    "gpt_oss": PROJ,
    "t5": linear("q", "k"),
    "bart": PROJ,
    "whisper": PROJ,
    "vit": None,
    "clip": PROJ,
}
FOLDED = {"opt": lambda d: d**-0.5, "whisper": lambda d: d**-0.5}


@pytest.mark.parametrize("name", [name for name in HAND if HAND[name]])
def test_factors_are_the_weights_that_stand_in_the_model(name):
    model = families.build(name)
    inputs = families.inputs(name, model, batch=1)
    for found, factors in zip(hooks.survey(model, inputs), read(model, name), strict=True):
        query, key = HAND[name](found.module, found.call)
        head_dim = found.call.query.shape[-1]
        if name in FOLDED and found.call.scale == 1.0:
            query = query * FOLDED[name](head_dim)
        if name == "gpt_oss":  # YaRN's factor is part of cos and sin, and so of the effective weights
            query, key = (part * model.model.rotary_emb.attention_scaling for part in (query, key))
        torch.testing.assert_close(factors.maps.query, query, rtol=2e-6, atol=2e-6 * float(query.abs().max()))
        torch.testing.assert_close(factors.maps.key, key, rtol=2e-6, atol=2e-6 * float(key.abs().max()))
        assert factors.query_key.scale == found.call.scale
        group = len(query) // len(key)
        paired = factors.query_key.paired_key
        torch.testing.assert_close(paired, factors.maps.key.repeat_interleave(group, 0), rtol=0, atol=0)
        if group > 1:
            assert not torch.equal(paired, factors.maps.key.repeat(group, 1, 1)), "control: not h % key heads"
        swapped = (factors.maps.query - query.flip(0)).norm()
        assert swapped > 0.1 * query.norm(), "control: heads in another order would be seen"


def test_vision_factors_are_the_weights():
    model = families.build("vit")
    inputs = families.inputs("vit", model, batch=1)
    for found, factors in zip(hooks.survey(model, inputs), read(model, "vit"), strict=True):
        names = {name: module for name, module in found.module.named_modules() if isinstance(module, torch.nn.Linear)}
        query = next(module for name, module in names.items() if name.split(".")[-1] in ("query", "q_proj"))
        torch.testing.assert_close(factors.maps.query, per_head(query.weight, found.call.query.shape[1]))


def test_biases_are_read_and_left_out_of_the_form():
    model = families.build("bert")
    factors = read(model, "bert")[0]
    module = model.bert.encoder.layer[0].attention.self
    torch.testing.assert_close(factors.maps.query_bias.flatten(), module.query.bias.double())
    assert module.query.bias.norm() > 0
    torch.testing.assert_close(factors.query_key.query, factors.maps.query)


@pytest.mark.parametrize("name", list(HAND))
def test_only_rotary_families_have_a_rotation(name):
    model = families.build(name)
    assert all((factors.rotation is not None) == (name in ROTARY) for factors in read(model, name))


@pytest.mark.parametrize("name", ROTARY)
def test_the_rotation_is_a_group_of_rotations(name):
    rotation = turns(read(families.build(name), name)[0].rotation)
    unit = torch.eye(rotation.shape[-1], dtype=torch.float64)
    torch.testing.assert_close(rotation[0], unit, atol=1e-5, rtol=0)
    torch.testing.assert_close(rotation @ rotation.mT, unit.expand_as(rotation), atol=1e-4, rtol=0)
    torch.testing.assert_close(rotation[7] @ rotation[4].mT, rotation[3], atol=1e-4, rtol=0)
    assert (rotation[1] - unit).norm() > 0.1


def test_qk_norm_keeps_the_gain_and_says_so():
    factors = read(families.build("qwen3"), "qwen3")[0]
    assert factors.qk_norm
    assert "QK-norm" in factors.route
    assert not read(families.build("llama"), "llama")[0].qk_norm


def test_a_norm_beside_the_path_is_not_taken_for_qk_norm():
    assert not any(factors.qk_norm for factors in read(families.build("albert"), "albert"))


def causal(config, model_class):
    torch.manual_seed(0)
    model = model_class(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model, {"input_ids": torch.arange(10)[None] + 3}


def test_layer_norm_with_bias_is_not_bilinear():
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 56}
    config = transformers.PhiConfig(vocab_size=99, **sizes, qk_layernorm=True)
    model, inputs = causal(config, transformers.PhiForCausalLM)
    found = read(model, inputs=inputs)
    assert all(isinstance(error, NotBilinearError) for error in found)
    assert "not bilinear" in found[0].problem


def test_nan_in_one_head_leaves_the_others():
    model = families.build("llama")
    projection = model.model.layers[0].self_attn.q_proj.weight
    projection[:10] = torch.nan
    factors = read(model, "llama")[0]
    assert factors.maps.query[0].isnan().all()
    assert factors.maps.query[1:].isfinite().all()
    assert factors.rotation.angles.isfinite().all()


def test_a_part_that_is_called_norm_and_is_none_is_passed_over():
    config = transformers.RobertaPreLayerNormConfig(**families.ENCODER)
    model, inputs = causal(config, transformers.RobertaPreLayerNormForMaskedLM)
    assert not any(factors.qk_norm for factors in read(model, inputs=inputs))


def test_a_centred_norm_keeps_its_gain_and_its_centring():
    holder = torch.nn.Module()
    holder.q_norm = torch.nn.LayerNorm(8, bias=False)
    torch.nn.init.uniform_(holder.q_norm.weight, 0.5, 2)
    x = 3 + torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    with linear_norms(norms_inside(holder)):
        found = holder.q_norm(x)
    expected = holder.q_norm.weight * (x - x.mean(-1, keepdim=True))
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-5, atol=1e-5)  # but for the norm's eps
    assert (found - holder.q_norm.weight * x).norm() > found.norm(), "the control: uncentred it is another one"


@pytest.mark.parametrize(("tokens", "multiplied"), [((1, 1, 8), 1), ((1, 5, 8), 5)])
def test_a_repeated_token_is_multiplied_by_the_weights_once(tokens, multiplied):
    weight, hidden = torch.randn(4, 8), torch.randn(tokens).expand(1, 5, 8)
    with FlopCounterMode(display=False) as counter, FewTokens():
        result = torch.nn.functional.linear(hidden, weight)
    assert counter.get_total_flops() == 2 * multiplied * weight.numel()
    assert torch.allclose(result, hidden @ weight.T)
    assert result.is_contiguous(), "modules may change it in place"
