"""Tests that factors and roles are the model's weights in every layout, and that what is not bilinear is refused.

Latent attention is read as two forms, whose matrices are products of the module's parameters.
"""

from contextlib import contextmanager
from dataclasses import replace

import families
import model_types
import pytest
import torch
import transformers as tf
from factors import ROTARY, agrees, factors_of, probes, random_inputs, random_model, read
from heads import dense, random, turns
from loaded import loaded
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import attnlens
from attnlens.errors import NotBilinearError, UnreadableError
from attnlens.models import hooks, weights
from attnlens.models.weights import probe as probing
from attnlens.models.weights import query_key_maps

close = torch.testing.assert_close


def separate(query, key):
    return lambda part: (part.get_submodule(query).weight, part.get_submodule(key).weight)


def gained(part, query=None):
    """QK-norm: W times the norm's gain, measured as the norm of a vector of ones."""
    sides = ((part.q_proj.weight if query is None else query, part.q_norm), (part.k_proj.weight, part.k_norm))
    sizes = [(rows, norm, len(norm.weight)) for rows, norm in sides]
    return [rows.view(-1, n, rows.shape[-1]) * norm(torch.ones(n))[:, None] for rows, norm, n in sizes]


def grouped(rows):
    """Groups of two queries, a key, which the module repeats, and a value (Falcon 40B)."""
    return rows[:, :2], rows[:, 2:3].expand(-1, 2, -1, -1)


PROJ = separate("q_proj", "k_proj")
HAND = {
    **dict.fromkeys(("bert", "roberta", "albert"), separate("query", "key")),
    **dict.fromkeys(("opt", "llama", "mistral", "qwen2", "gemma2", "cohere", "gpt_oss", "bart", "whisper"), PROJ),
    **dict.fromkeys(("clip", "vit", "gptj", "gpt_neo"), PROJ),
    **dict.fromkeys(("qwen3", "gemma3"), gained),
    "distilbert": separate("q_lin", "k_lin"),
    **dict.fromkeys(("t5", "mpnet"), separate("q", "k")),
    "deberta_v2": separate("query_proj", "key_proj"),
    "gpt2": lambda part: part.c_attn.weight.T.chunk(3)[:2],
    **dict.fromkeys(("gpt_neox", "bloom"), lambda part: part.query_key_value.weight.view(4, 3, 10, -1).unbind(1)[:2]),
    "falcon": lambda part: part.query_key_value.weight.split([40, 10, 10])[:2],
    "phi3": lambda part: part.qkv_proj.weight.split([60, 20, 20])[:2],
    "dbrx": lambda part: part.Wqkv.weight.split([64, 32, 32])[:2],
    **dict.fromkeys(("mpt", "modernbert"), lambda part: part.Wqkv.weight.chunk(3)[:2]),
    "gpt_bigcode": lambda part: part.c_attn.weight.split([64, 16, 16])[:2],
    "codegen": lambda part: part.qkv_proj.weight.view(4, 3, 16, -1).unbind(1)[0::2],
    # a gate follows each head's queries
    **dict.fromkeys(("qwen3_next", "qwen3_5_text"), lambda p: gained(p, p.q_proj.weight.view(4, 2, 16, -1)[:, 0])),
    "falcon new": lambda part: grouped(part.query_key_value.weight.view(2, 4, 16, -1)),
}
"""Rows of W_Q and W_K in a family's own layout."""
NORMED = ("qwen3", "gemma3", "qwen3_next", "qwen3_5_text")


@pytest.mark.parametrize("name", HAND)
def test_factors_are_the_weights_in_the_model(name):
    if name in families.FAMILIES:
        model = families.build(name)
        inputs = families.inputs(name, model, batch=1 + (name in families.TRACED))
    else:
        model, inputs = model_types.build(name.removesuffix(" new")).eval(), {"input_ids": torch.arange(10)[None] + 3}
    if name == "falcon new":
        model.config.update({"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False})
        model = random_model(tf.FalconForCausalLM(model.config)).float()
    for reached, factors in zip(hooks.survey(model, inputs), read(model, inputs=inputs), strict=True):
        call = reached.call
        query, key = (
            rows.detach().double().reshape(heads.shape[1], -1, rows.shape[-1]).mT
            for rows, heads in zip(HAND[name](reached.module), (call.query, call.key), strict=True)
        )
        if name in ("opt", "whisper") and call.scale == 1.0:  # the scale is part of W_Q
            query = query * call.query.shape[-1] ** -0.5
        if name == "deberta_v2":  # its scale, √(3 · 10) for scores of three terms, is part of W_K
            key = key * 30**-0.5
        if name == "gpt_oss":  # YaRN's factor is part of cos and sin, and so of the effective weights
            query, key = (part * model.model.rotary_emb.attention_scaling for part in (query, key))
        close(factors.maps.query, query, rtol=2e-6, atol=2e-6 * float(query.abs().max()))
        close(factors.maps.key, key, rtol=2e-6, atol=2e-6 * float(key.abs().max()))
        assert (factors.maps.query - query.flip(0)).norm() > 0.1 * query.norm(), "control: heads in another order"
        scale = pytest.approx(call.scale, rel=1e-6) if name in families.TRACED else call.scale
        assert factors.query_key.scale == scale
        group, paired = len(query) // len(key), factors.query_key.paired_key
        assert torch.equal(paired, factors.maps.key.repeat_interleave(group, 0))
        if 1 < len(key) < len(query):
            assert not torch.equal(paired, factors.maps.key.repeat(group, 1, 1)), "control: not h % key heads"
        assert factors.qk_norm == (name in NORMED) == ("QK-norm" in factors.route)
        if name in families.FAMILIES:
            assert (factors.rotation is not None) == (name in (*ROTARY, "gptj"))
        if factors.rotation is not None:  # a group of rotations
            matrices, unit = turns(factors.rotation), torch.eye(factors.rotation.size, dtype=torch.float64)
            close(matrices[0], unit, atol=1e-5, rtol=0)
            close(matrices @ matrices.mT, unit.expand_as(matrices), atol=1e-4, rtol=0)
            close(matrices[7] @ matrices[4].mT, matrices[3], atol=1e-4, rtol=0)
            assert (matrices[1] - unit).norm() > 0.1


def test_biases_are_left_out_of_the_form_but_not_of_that_on_inputs():
    model = families.build("bert")
    factors, module = read(model, "bert")[0], model.bert.encoder.layer[0].attention.self
    close(factors.maps.query_bias.flatten(), module.query.bias.double())
    assert module.query.bias.norm() > 0
    close(factors.query_key.query, factors.maps.query)
    on_inputs = factors.on_inputs  # a row more
    close(on_inputs.query, torch.cat((factors.maps.query, factors.maps.query_bias), 1))
    close(on_inputs.key, torch.cat((factors.maps.key, factors.maps.key_bias), 1))
    assert [factors.on_inputs is None for factors in read(families.build("llama"), "llama")] == [True, True], "rotary"
    parts = [(factors.site.part, factors.on_inputs is None) for factors in read(families.build("bart"), "bart")]
    assert {*parts} == {("encoder", False), ("decoder", False), ("cross", True)}


def test_a_layer_norm_with_bias_is_not_bilinear_and_one_before_the_module_is_not_qk_norm():
    phi = tf.PhiConfig(**families.ENCODER | {"hidden_size": 48}, qk_layernorm=True)
    roberta = tf.RobertaPreLayerNormConfig(**families.ENCODER)
    results = []
    for model_class, config in ((tf.PhiForCausalLM, phi), (tf.RobertaPreLayerNormForMaskedLM, roberta)):
        torch.manual_seed(0)
        model = model_class(config).eval().requires_grad_(False)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
        results.append(read(model, inputs={"input_ids": torch.arange(10)[None] + 3}))
    assert {type(result) for result in results[0]} == {NotBilinearError}
    assert all("not bilinear" in result.problem for result in results[0])
    assert {result.qk_norm for result in results[1]} == {False}


def test_a_centred_norm_keeps_its_gain_and_its_centring():
    holder = nn.Module()
    holder.q_norm = nn.LayerNorm(8, bias=False)
    nn.init.uniform_(holder.q_norm.weight, 0.5, 2)
    x = 3 + torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    with probing.linear(probing.norms_inside(holder)):
        normed = holder.q_norm(x)
    expected = holder.q_norm.weight * (x - x.mean(-1, keepdim=True))
    close(normed.double(), expected.double(), rtol=1e-5, atol=1e-5)  # but for the norm's eps
    assert (normed - holder.q_norm.weight * x).norm() > normed.norm(), "control: uncentred it is another one"


def test_a_repeated_token_is_multiplied_by_the_weights_once():
    for distinct in (1, 5):
        weight, hidden = torch.randn(4, 8), torch.randn(1, distinct, 8).expand(1, 5, 8)
        with FlopCounterMode(display=False) as counter, probing.FewTokens():
            result = nn.functional.linear(hidden, weight)
        assert counter.get_total_flops() == 2 * distinct * weight.numel()
        assert torch.allclose(result, hidden @ weight.T)
        assert result.is_contiguous(), "modules may change it in place"


class Cosine(tf.PreTrainedModel):
    """A model that is one attention module, which normalises queries and keys by hand."""

    config_class = tf.PretrainedConfig

    def __init__(self, unit):
        super().__init__(tf.PretrainedConfig())
        self.attention = nn.Module()
        self.attention.query, self.attention.key = nn.Linear(12, 12), nn.Linear(12, 12)
        self.attention.forward, self.unit = self.attend, unit

    def attend(self, hidden_states):
        maps = (self.attention.query, self.attention.key)
        query, key = (map_(hidden_states).unflatten(-1, (3, 4)).transpose(1, 2) for map_ in maps)
        weights = (3 * self.unit(query) @ self.unit(key).mT).softmax(-1)
        return (weights @ key).transpose(1, 2).flatten(2)

    def forward(self, hidden_states):
        return (self.attention(hidden_states),)


BY_HAND = {
    "F.normalize": lambda x: nn.functional.normalize(x, dim=-1),
    "rsqrt": lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6),
    "norm": lambda x: x / x.norm(dim=-1, keepdim=True),
    "vector_norm": lambda x: x / torch.linalg.vector_norm(x, dim=-1, keepdim=True),
    "root": lambda x: x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt(),
    "not a norm": lambda x: x * x.square().mean(-1, keepdim=True).sqrt() + x.relu(),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_norm_written_by_hand_keeps_its_direction(name):
    torch.manual_seed(0)
    model = Cosine(BY_HAND[name]).eval().requires_grad_(False)
    first, window = (hooks.survey(model, {"hidden_states": torch.randn(1, count, 12)}) for count in (1, 7))
    (factors,) = weights.factors(model, first, window)
    if name == "not a norm":
        assert isinstance(factors, UnreadableError)
        assert "not bilinear" in factors.problem
        return
    assert factors.qk_norm
    assert not factors.latent
    expected = 3 * model.attention.query.weight.double().view(3, 4, 12).mT
    close(factors.maps.query, expected, rtol=0, atol=1e-6)


SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
UNUSUAL = {
    **dict.fromkeys(("dinov3_vit", "pixtral", "mlcd_vision_model", "eomt_dinov3"), (True, False)),
    "llama4_text": (True, True), "nanochat": (True, True), "xlnet": (False, False), "squeezebert": (False, False),
    "detr": (False, False), "swin": (False, False), "swinv2": (False, True),
}  # fmt: skip
"""Model type → whether its queries are rotated, and normalised."""


@pytest.mark.parametrize("name", UNUSUAL)
def test_factors_of_unusual_inputs_give_the_models_own_attention(name):
    if name.startswith("swin"):
        config = (tf.SwinConfig if name == "swin" else tf.Swinv2Config)(**SWIN)
        model = random_model(tf.AutoModel.from_config(config))
    else:
        model = model_types.build(name).eval()
        model = random_model(model) if name == "detr" else model
    rotary, normed = UNUSUAL[name]
    for factors in factors_of(model):
        assert factors.qk_norm == normed
        if rotary and not normed:
            assert not factors.rotation.by_distance, "positions on a grid"
        if name == "detr":  # it adds positions to its queries and keys
            module = model.get_submodule(factors.site.path)
            close(factors.maps.query, module.q_proj.weight.view(4, -1, module.q_proj.in_features).mT, rtol=0, atol=1e-6)
            assert factors.rotation is factors.on_inputs is None
            assert factors.maps.query_bias.shape[1] > 1, "one bias for each position"
    assert agrees(model)


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


def match(probe, reader=probing.match_weights):
    with probing.linear(probing.norms_inside(probe.target.module)):
        return reader(probe)


def distance(probe, maps):
    """The largest relative difference of W_Q, W_K and biases from the Jacobian's."""
    expected = match(probe, lambda probe: query_key_maps._differentiate(probe, None))
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
        assert distance(probe, match(probe)) <= 1e-12
        with torch.no_grad():
            spoilt = {key: part + 1e-6 * part.roll(1, 0) for key, part in probe.weights.items()}
        assert distance(probe, match(replace(probe, weights=spoilt))) > 1e-9, "control"
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
    assert match(probes(model)[0]) is None
    (error,) = weights.factors(model, *(hooks.survey(model, random_inputs(model, tokens)) for tokens in (1, 7)))
    assert isinstance(error, NotBilinearError)


@pytest.mark.parametrize("latent", LATENTS)
def test_a_gain_that_is_left_out_is_refused(latent, monkeypatch):
    (probe,) = probes(deepseek(kv_lora_rank=12))
    assert match(probe) is not None
    gain, original = getattr(probe.target.module, latent).weight, probing._record_inner_inputs

    @contextmanager
    def without(module):
        with original(module) as inputs:
            yield inputs
            inputs[:] = [part / gain if part.shape[-1] == len(gain) else part for part in inputs]

    monkeypatch.setattr(probing, "_record_inner_inputs", without)
    assert match(probe) is None


def bart():
    sizes = {"d_model": 32, "vocab_size": 50, "encoder_layers": 1, "decoder_layers": 2, "max_position_embeddings": 16}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40}
    torch.manual_seed(0)
    return tf.BartModel(tf.BartConfig(**sizes, **heads)).eval()


def test_a_layer_with_two_attention_modules_is_read_once():
    model = bart()
    token = torch.tensor([[5]])
    with torch.no_grad():
        sites = hooks.survey(model, {"input_ids": token, "decoder_input_ids": token})
    block = "decoder.layers.1"
    first, second = [site for site in sites if site.site.path.startswith(block)]
    layers = [
        weights.read_layer(model, first, weights.locate_roles(model, first), others=[second.site.path]),
        weights.read_layer(model, second, weights.locate_roles(model, second), rest=False, others=[first.site.path]),
    ]
    both = dict(model.get_submodule(block).named_parameters())
    assert sum(part.numel() for layer in layers for part in layer.parts.values()) == sum(
        part.numel() for part in both.values()
    )
    heads = {f"{role}.weight" for role in ("query", "key", "value", "output")}
    assert all(heads <= layer.parts.keys() for layer in layers)
    assert "fc1.weight" in layers[0].parts
    assert "fc1.weight" in layers[0].headless
    assert layers[1].parts.keys() - heads == {"query.bias", "key.bias", "value.bias", "encoder_attn.out_proj.bias"}
    assert layers[1].headless == {"encoder_attn.out_proj.bias"}
    whole = weights.read_layer(model, first, weights.locate_roles(model, first))  # the control
    assert "encoder_attn.q_proj.weight" in whole.parts


def test_the_output_nearest_to_a_module_is_its_own():
    """BERT's output projections are beside its attention modules, that of cross-attention after that of the first."""
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = tf.BertConfig(**sizes, vocab_size=50, is_decoder=True, add_cross_attention=True)
    torch.manual_seed(0)
    model = tf.BertModel(config).eval()
    with torch.no_grad():
        states = torch.randn(1, 1, 32)
        sites = hooks.survey(model, {"input_ids": torch.tensor([[5]]), "encoder_hidden_states": states})
    for site, name in zip(sites, ("attention", "crossattention"), strict=True):
        others = [other.site.path for other in sites if other is not site]
        layer = weights.read_layer(model, site, weights.locate_roles(model, site), others=others)
        expected = model.get_parameter(f"encoder.layer.0.{name}.output.dense.weight")
        assert torch.equal(layer.parts["output.weight"].flatten(0, 1), expected.T)
