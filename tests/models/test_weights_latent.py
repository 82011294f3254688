"""Tests that latent attention is read as two forms, whose matrices are products of the module's parameters."""

from contextlib import contextmanager
from dataclasses import replace

import model_types
import pytest
import torch
import transformers as tf
from factors import agrees, factors_of, probes, random_inputs, random_model
from heads import dense, random
from loaded import loaded

import attnlens
from attnlens.errors import NotBilinearError
from attnlens.models import hooks, weights
from attnlens.models.weights import probe as probing
from attnlens.models.weights import query_key_maps

close = torch.testing.assert_close
SIZES = {
    "vocab_size": 99, "hidden_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 56, "moe_intermediate_size": 24, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12, "v_head_dim": 10, "first_k_dense_replace": 1,
}  # fmt: skip
LATENTS = ("q_a_layernorm", "kv_a_layernorm")


def deepseek(**changes):
    return random_model(tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(**SIZES | changes)))


def attention_of(model):
    return model.model.layers[0].self_attn


@pytest.mark.parametrize("rank", [16, None], ids=["queries of a latent", "queries of the inputs"])
def test_matrices_of_both_forms_are_products_of_the_parameters(rank):
    model = deepseek(q_lora_rank=rank)
    module, (factors,) = attention_of(model), factors_of(model)
    if rank is None:
        query = module.q_proj.weight
    else:
        query = module.q_b_proj.weight @ torch.diag(module.q_a_layernorm.weight) @ module.q_a_proj.weight
    down, shared = module.kv_a_proj_with_mqa.weight.split([16, 8])
    key = module.kv_b_proj.weight.view(4, 22, 16)[:, :12] @ torch.diag(module.kv_a_layernorm.weight) @ down
    query, (nope, rope) = query.view(4, 20, 40), factors.parts
    assert factors.latent
    assert factors.query_key.query.shape == nope.query.shape
    close(dense(nope), factors.scale * query[:, :12].mT @ key, rtol=0, atol=1e-6)
    # the two of a pair stand side by side or half the part apart, as the layer has it: M(0) is the same
    close(dense(rope), factors.scale * query[:, 12:].mT @ shared, rtol=0, atol=1e-6)
    assert nope.rotation is None
    assert len(rope.rotation.pairs) == 4
    assert agrees(model)


def test_parts_are_weighed_by_the_keys_latent_and_their_sum_is_not_a_form():
    model = deepseek()
    module, (factors,) = attention_of(model), factors_of(model)
    (nope, rope), x, y = (dense(part)[0] for part in factors.parts), random(1, 40), random(6, 40, seed=1)

    def rms(latent, norm):
        return (latent.square().mean(-1) + norm.variance_epsilon).sqrt()

    lengths = rms(y @ module.kv_a_proj_with_mqa.weight[:16].T, module.kv_a_layernorm)
    expected = ((x @ nope @ y.T) / lengths + x @ rope @ y.T)[0] / rms(module.q_a_proj(x), module.q_a_layernorm)
    calls = []
    still = torch.ones(1, 2, 8, dtype=torch.float64), torch.zeros(1, 2, 8, dtype=torch.float64)
    with hooks.answer_calls(model, lambda call: calls.append(call) or call.value.transpose(1, 2)):
        for token in y:
            module(torch.stack((x[0], token))[None], position_embeddings=still, attention_mask=None)
    scores = torch.stack([call.scale * call.query[0, 0, 0] @ call.key[0, 0, 1] for call in calls])
    close(scores, expected, rtol=1e-6, atol=1e-6)
    ratio = scores / (x @ (nope + rope) @ y.T)[0]
    assert (ratio / ratio[0] - 1).abs().max() > 0.05, "control: not a positive multiple of one form"


def enlarged(model):
    """The model with queries and keys 60 times as large, gains and biases neither 1 nor 0."""
    draw = torch.Generator().manual_seed(1)
    for name, part in model.eval().requires_grad_(False).named_parameters():
        if model_types.SHARP.search(name) and part.ndim == 2:
            part.mul_(60)
        elif part.ndim == 1:
            part.add_(0.3 * torch.randn(part.shape, generator=draw))
    return model


def read(probe, reader=probing.match_weights):
    with probing.linear(probing.norms_inside(probe.target.module)):
        return reader(probe)


def distance(probe, maps):
    """The largest relative difference of W_Q, W_K and biases from the Jacobian's."""
    expected = read(probe, lambda probe: query_key_maps._differentiate(probe, None))
    parts = ("query", "key", "query_bias", "key_bias")
    pairs = [(getattr(maps, part), getattr(expected, part)) for part in parts]
    assert all(ours.shape == theirs.shape for ours, theirs in pairs)
    return max(float((ours - theirs).norm() / theirs.norm().clamp(min=1e-300)) for ours, theirs in pairs)


CASES = ["deepseek_v3", "kimi_k25", "kimi_linear", "minicpm3", "longcat_flash", "youtu"]
CASES += [{}, {"attention_bias": True}, {"q_lora_rank": None}]
"""A latent of queries and keys, of keys alone, with scales behind them, with biases and with gains of 0."""
PLAIN = ("bert", "gpt2", "gpt_neox", "phi3", "llama", "opt", "bart", "whisper", "qwen3", "ctrl", "granite")
"""Linear, Conv1D, interleaved, fused, grouped, scaled, with biases, with a gain after the product, three inputs."""


@pytest.mark.parametrize("case", [*CASES, *PLAIN], ids=str)
def test_matched_rows_and_products_of_weights_are_the_jacobian(case):
    if case in PLAIN:
        model = model_types.build(case)
    elif isinstance(case, str):
        model = enlarged(model_types.build(case))
    else:
        model = enlarged(deepseek(**case))
        attention_of(model).kv_a_layernorm.weight[2:5] = 0
    sites = probes(model)
    assert sites
    for probe in sites:
        assert distance(probe, read(probe)) <= 1e-12
        with torch.no_grad():
            spoilt = {key: part + 1e-6 * part.roll(1, 0) for key, part in probe.weights.items()}
        assert distance(probe, read(replace(probe, weights=spoilt))) > 1e-9, "control"
        with pytest.raises(ZeroDivisionError), probing._record_inner_inputs(probe.target.module):
            raise ZeroDivisionError
        assert not any(part._forward_pre_hooks for part in probe.target.module.modules()), "hooks are removed"


def test_a_report_names_the_nope_part_of_latent_attention_alone():
    sizes = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size")}
    plain = random_model(tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, num_attention_heads=4)))
    for model, is_latent in ((deepseek(), True), (plain, False)):
        report = attnlens.inspect(loaded(model), source="weights", length=7)
        assert report.coverage.complete
        assert any("nope" in note for note in report.model.conventions.notes) == is_latent


@pytest.mark.parametrize("latent", LATENTS)
@pytest.mark.parametrize("kind", ["norm with a bias", "SiLU"])
def test_a_nonlinear_step_between_the_matrices_is_not_read(kind, latent):
    model = deepseek()
    norm = getattr(attention_of(model), latent)
    biased = random_model(torch.nn.LayerNorm(len(norm.weight)))
    step = biased if kind == "norm with a bias" else torch.nn.Sequential(norm, torch.nn.SiLU())
    setattr(attention_of(model), latent, step)
    assert read(probes(model)[0]) is None
    (error,) = weights.factors(model, *(hooks.survey(model, random_inputs(model, tokens)) for tokens in (1, 7)))
    assert isinstance(error, NotBilinearError)


@pytest.mark.parametrize("latent", LATENTS)
def test_a_gain_that_is_left_out_is_refused(latent, monkeypatch):
    (probe,) = probes(deepseek(kv_lora_rank=12))
    assert read(probe) is not None
    gain, original = getattr(probe.target.module, latent).weight, probing._record_inner_inputs

    @contextmanager
    def without(module):
        with original(module) as inputs:
            yield inputs
            inputs[:] = [part / gain if part.shape[-1] == len(gain) else part for part in inputs]

    monkeypatch.setattr(probing, "_record_inner_inputs", without)
    assert read(probe) is None
