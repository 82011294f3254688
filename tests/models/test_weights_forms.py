"""Tests that weights are read in every layout and under every position encoding: planted, or against dense matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import model_types
import pytest
import torch
import transformers as tf
from heads import dense, query_key, random, rotary, stacked, turns
from loaded import loaded
from torch import Tensor, nn

import attnlens
from attnlens.analyzers.symmetry import of_weights
from attnlens.errors import UnreadableError
from attnlens.maths import linalg
from attnlens.models import hooks, texts, weights
from attnlens.models.weights.query_key_maps import fit_rotation
from attnlens.records import Rotation
from attnlens.runs.doctor import check_sites

TOKENS = 7


def random_model(model: Any) -> Any:
    """The model in float64 with weights that are neither uniform nor small; gains stay near 1."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for parameter in model.double().eval().requires_grad_(False).parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            else:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def made_up(model: Any, tokens: int) -> dict[str, Tensor]:
    """The inputs that the program makes up, in the model's own precision."""
    inputs = texts.placeholder(loaded(model), tokens, 0).batches[0].inputs
    return hooks.as_dtype(inputs, model.dtype)


def read(model: Any) -> list[weights.Factors]:
    """The factors of every site."""
    first, window = (hooks.survey(model, made_up(model, tokens)) for tokens in (1, TOKENS))
    found = list(weights.factors(model, first, window))
    assert not [made for made in found if isinstance(made, UnreadableError)], found
    return found


def agrees(model: Any) -> bool:
    """Whether what is read gives the model's own attention on its own inputs."""
    inputs = made_up(model, TOKENS)
    checks = check_sites(model, hooks.survey(model, made_up(model, 1)), hooks.survey(model, inputs), inputs)
    return all(check.verdict == "agrees" for check in checks)


# --- latent attention -------------------------------------------------------------------------------------------------

LATENT = {
    "vocab_size": 99, "hidden_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 56, "moe_intermediate_size": 24, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12, "v_head_dim": 10, "first_k_dense_replace": 1,
}  # fmt: skip


def deepseek(**changes: Any) -> Any:
    return random_model(tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(**LATENT | changes)))


def by_head(module: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W_Q and W_K of the nope parts, (heads, d_model, 12), and of the rope parts, from the module's own parameters."""
    if module.q_lora_rank is None:
        query = module.q_proj.weight
    else:
        query = module.q_b_proj.weight @ torch.diag(module.q_a_layernorm.weight) @ module.q_a_proj.weight
    down, shared = module.kv_a_proj_with_mqa.weight.split([16, 8])
    up = module.kv_b_proj.weight.view(4, 22, 16)[:, :12]
    nope = up @ torch.diag(module.kv_a_layernorm.weight) @ down
    query = query.view(4, 20, 40)
    return query[:, :12].mT, nope.mT, query[:, 12:].mT, shared.mT.expand(4, -1, -1)


@pytest.mark.parametrize("rank", [16, None], ids=["queries of a latent", "queries of the inputs"])
def test_latent_attention_is_two_forms_whose_matrices_are_the_parameters(rank: int | None) -> None:
    model = deepseek(q_lora_rank=rank)
    (found,) = read(model)
    nope_query, nope_key, rope_query, rope_key = by_head(model.model.layers[0].self_attn)
    nope, rope = found.parts
    assert found.latent
    assert found.query_key.query.shape == nope.query.shape
    torch.testing.assert_close(dense(nope), found.scale * nope_query @ nope_key.mT, rtol=0, atol=1e-6)
    # the two of a pair stand side by side or half the part apart, as the layer has it: M(0) is the same
    torch.testing.assert_close(dense(rope), found.scale * rope_query @ rope_key.mT, rtol=0, atol=1e-6)
    assert nope.rotation is None
    assert rope.rotation is not None
    assert len(rope.rotation.pairs) == 4
    assert agrees(model)


def test_the_parts_are_weighed_by_the_keys_latent_and_the_sum_is_no_form() -> None:
    model = deepseek()
    (found,) = read(model)
    nope, rope = (dense(part)[0] for part in found.parts)
    module = model.model.layers[0].self_attn
    x, y = random(1, 40), random(6, 40, seed=1)
    latent = y @ module.kv_a_proj_with_mqa.weight[:16].T
    lengths = (latent.square().mean(-1) + module.kv_a_layernorm.variance_epsilon).sqrt()
    expected = ((x @ nope @ y.T) / lengths + x @ rope @ y.T)[0]
    low = module.q_a_proj(x)
    expected = expected / (low.square().mean() + module.q_a_layernorm.variance_epsilon).sqrt()
    asked = []
    with hooks.answer_calls(model, lambda call: asked.append(call) or call.value.transpose(1, 2)):
        still = torch.ones(1, 1, 8, dtype=torch.float64), torch.zeros(1, 1, 8, dtype=torch.float64)
        for one in y:
            module(torch.stack((x[0], one))[None], position_embeddings=tuple(part.expand(1, 2, 8) for part in still),
                   attention_mask=None)  # fmt: skip
    seen = torch.stack([call.scale * call.query[0, 0, 0] @ call.key[0, 0, 1] for call in asked])
    torch.testing.assert_close(seen, expected, rtol=1e-6, atol=1e-6)
    both = (x @ (nope + rope) @ y.T)[0]
    assert ((seen / both) / (seen / both)[0] - 1).abs().max() > 0.05, "the control: no positive multiple of one form"


def test_planted_latent_attention_reads_one_and_minus_one() -> None:
    model = deepseek()
    module = model.model.layers[0].self_attn
    module.q_a_proj.weight.copy_(module.kv_a_proj_with_mqa.weight[:16])
    module.q_a_layernorm.weight.copy_(module.kv_a_layernorm.weight)
    up, keys = module.q_b_proj.weight.view(4, 20, 16), module.kv_b_proj.weight.view(4, 22, 16)
    up[0, :12], up[2, :12] = keys[0, :12], -keys[2, :12]
    (found,) = read(model)
    definiteness = of_weights(found.query_key)["weights.definiteness"]
    assert definiteness[0] == pytest.approx(1, abs=1e-6)
    assert definiteness[2] == pytest.approx(-1, abs=1e-6)
    assert definiteness[[1, 3]].abs().max() < 0.9, "the control: random heads"
    module.kv_a_layernorm.weight[:8] *= 3
    assert of_weights(read(model)[0].query_key)["weights.definiteness"][0] < 0.99, "the control: gains are in the form"


def test_the_report_says_that_it_is_the_nope_part() -> None:
    report = attnlens.inspect(loaded(deepseek()), source="weights", length=TOKENS)
    assert report.coverage.complete
    assert any("nope" in note for note in report.model.conventions.notes)
    plain = attnlens.inspect(loaded(random_model(tf.LlamaForCausalLM(small_llama()))), source="weights", length=TOKENS)
    assert not any("nope" in note for note in plain.model.conventions.notes)


def small_llama() -> Any:
    return tf.LlamaConfig(
        vocab_size=99, hidden_size=40, num_hidden_layers=1, num_attention_heads=4, intermediate_size=56
    )


# --- rotations by place -----------------------------------------------------------------------------------------------

PLACES = torch.tensor([[0, 0], [0, 0], *[[row, column] for row in range(3) for column in range(4)]]).double()
"""Two tokens without a place, and a grid of three rows."""


def by_place(size: int = 12) -> Rotation:
    """Half of the pairs turn with the row, half with the column."""
    pairs = torch.stack((torch.arange(size // 2), torch.arange(size // 2, size)), -1)
    frequencies = torch.tensor([1.0, 0.3, 0.1])
    angles = torch.cat((PLACES[:, :1] * frequencies, PLACES[:, 1:] * frequencies), -1)
    return Rotation(pairs, angles.double(), size, by_distance=False)


def test_angles_of_places_are_told_from_those_of_distances() -> None:
    true = by_place()
    rows = [true.rotate(random(20, 1, 12, seed=seed).expand(-1, len(PLACES), -1)) for seed in (0, 1)]
    found = fit_rotation(*rows, torch.finfo(torch.float64).eps)
    assert not found.by_distance
    torch.testing.assert_close(turns(found), turns(true), rtol=0, atol=1e-9)
    along = rotary(9, 12)
    rows = [along.rotate(random(20, 1, 12, seed=seed).expand(-1, 9, -1)) for seed in (0, 1)]
    assert fit_rotation(*rows, torch.finfo(torch.float64).eps).by_distance, "the control"


def test_measures_under_places_are_those_of_the_dense_joint_kernel() -> None:
    heads = query_key(random(4, 15, 12), random(2, 15, 12, seed=1), rotation=by_place())
    form, joint = linalg.Form(heads), stacked(heads)
    symmetric = (joint + joint.mT) / 2
    eigenvalues = torch.linalg.eigvalsh(symmetric)
    expected = (joint * joint.mT).sum((1, 2)) / joint.square().sum((1, 2))
    torch.testing.assert_close(linalg.symmetry(form), expected)
    torch.testing.assert_close(form.norm, joint.norm(dim=(1, 2)))
    torch.testing.assert_close(form.definiteness, eigenvalues.sum(-1) / eigenvalues.abs().sum(-1))
    summed = joint.sum(0)
    assert linalg.layer_symmetry(heads) == pytest.approx(float((summed * summed.T).sum() / summed.square().sum()))
    assert "weights.symmetry_by_distance" not in of_weights(heads)


@pytest.mark.parametrize("name", ["dinov3_vit", "pixtral", "mlcd_vision_model", "eomt_dinov3"])
def test_rotations_of_images_are_read(name: str) -> None:
    model = model_types.build(name).eval()
    for found in read(model):
        assert found.rotation is not None
        assert not found.rotation.by_distance
    assert agrees(model)


def test_a_planted_head_under_places_reads_one() -> None:
    model = model_types.build("dinov3_vit").eval().double().requires_grad_(False)
    for part in (module for module in model.modules() if hasattr(module, "k_proj")):
        heads = part.num_heads
        query, key = (one.weight.view(heads, -1, one.in_features) for one in (part.q_proj, part.k_proj))
        query[0], query[1] = key[0], -key[1]
    for found in read(model):
        definiteness = of_weights(found.query_key)["weights.definiteness"]
        assert definiteness[:2].tolist() == pytest.approx([1, -1], abs=1e-6)
        assert definiteness[2:].abs().max() < 0.9, "the control: random heads"


# --- positions that are added -----------------------------------------------------------------------------------------


def test_positions_added_to_queries_and_keys_are_left_out_and_kept_for_the_rebuilt() -> None:
    model = random_model(model_types.build("detr"))
    for found in read(model):
        module = model.get_submodule(found.site.path)
        expected = module.q_proj.weight.view(4, -1, module.q_proj.in_features).mT
        torch.testing.assert_close(found.maps.query, expected, rtol=0, atol=1e-6)
        assert found.rotation is None
        assert found.on_inputs is None
        assert found.maps.query_bias.shape[1] > 1, "one for each position"
    assert agrees(model)


# --- norms and layouts ------------------------------------------------------------------------------------------------


class Cosine(nn.Module):
    """Attention of normalised queries and keys, normalised by hand."""

    def __init__(self, unit: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.query, self.key, self.unit = nn.Linear(12, 12), nn.Linear(12, 12), unit

    def forward(self, hidden_states: Tensor) -> Tensor:
        query, key = (map_(hidden_states).unflatten(-1, (3, 4)).transpose(1, 2) for map_ in (self.query, self.key))
        weights = (3 * self.unit(query) @ self.unit(key).mT).softmax(-1)
        return (weights @ key).transpose(1, 2).flatten(2)


BY_HAND: dict[str, Callable[[Tensor], Tensor]] = {
    "F.normalize": lambda x: nn.functional.normalize(x, dim=-1),
    "rsqrt": lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6),
    "norm": lambda x: x / x.norm(dim=-1, keepdim=True),
    "vector_norm": lambda x: x / torch.linalg.vector_norm(x, dim=-1, keepdim=True),
    "root": lambda x: x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt(),
}


def cosine(unit: Callable[[Tensor], Tensor]) -> tuple[Cosine, list[weights.Factors | UnreadableError]]:
    torch.manual_seed(0)
    module = Cosine(unit).eval().requires_grad_(False)
    holder = Holder(tf.PretrainedConfig(), module)
    first, window = (hooks.survey(holder, {"hidden_states": torch.randn(1, count, 12)}) for count in (1, TOKENS))
    return module, list(weights.factors(holder, first, window))


class Holder(tf.PreTrainedModel):
    """A model that is one attention module."""

    config_class = tf.PretrainedConfig

    def __init__(self, config: Any, attention: nn.Module) -> None:
        super().__init__(config)
        self.attention = attention

    def forward(self, hidden_states: Tensor) -> tuple[Tensor]:
        return (self.attention(hidden_states),)


@pytest.mark.parametrize("unit", BY_HAND.values(), ids=BY_HAND)
def test_a_normalisation_that_is_no_module_keeps_its_direction(unit: Callable[[Tensor], Tensor]) -> None:
    module, (found,) = cosine(unit)
    assert isinstance(found, weights.Factors)
    assert found.qk_norm
    assert not found.latent
    expected = 3 * module.query.weight.double().view(3, 4, 12).mT
    torch.testing.assert_close(found.maps.query, expected, rtol=0, atol=1e-6)


def test_what_is_no_normalisation_is_refused() -> None:
    _, (found,) = cosine(lambda x: x * x.square().mean(-1, keepdim=True).sqrt() + x.relu())
    assert isinstance(found, UnreadableError)
    assert "not bilinear" in found.problem


@pytest.mark.parametrize("name", ["llama4_text", "nanochat"])
def test_norms_without_weights_are_read_as_qk_norm(name: str) -> None:
    model = model_types.build(name).eval()
    assert all(found.qk_norm for found in read(model))
    assert agrees(model)


@pytest.mark.parametrize("make", [tf.Swinv2Config, tf.SwinConfig])
def test_windows_are_read_and_cosine_attention_as_qk_norm(make: type[Any]) -> None:
    sizes = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}
    model = random_model(tf.AutoModel.from_config(make(**sizes, window_size=4)))
    assert {found.qk_norm for found in read(model)} == {make is tf.Swinv2Config}
    assert agrees(model)


@pytest.mark.parametrize("name", ["xlnet", "squeezebert"])
def test_inputs_with_other_axes_are_read(name: str) -> None:
    model = model_types.build(name).eval()
    assert read(model)
    assert agrees(model)


# --- planted weights in fused layouts ---------------------------------------------------------------------------------

SIZE = 16
"""head_dim of every type that the sweep builds."""


def rows(weight: Tensor) -> Tensor:
    """Rows of a Linear's weight as (heads, head_dim, d_model)."""
    return weight.view(-1, SIZE, weight.shape[1])


def one_after_another(weight: Tensor, heads: int = 4, key_heads: int = 2) -> tuple[Tensor, Tensor]:
    """[q of all heads | k of all heads | v of all heads]."""
    return rows(weight)[:heads], rows(weight)[heads : heads + key_heads]


def head_by_head(weight: Tensor, query: int = 0, key: int = 1) -> tuple[Tensor, Tensor]:
    """[q k v] of one head after another."""
    parts = weight.view(4, 3, SIZE, -1)
    return parts[:, query], parts[:, key]


def gated(part: Any) -> tuple[Tensor, Tensor]:
    """Queries with their gate, head by head; both norms get one gain."""
    part.q_norm.weight.copy_(part.k_norm.weight)
    return rows(part.q_proj.weight)[0::2], rows(part.k_proj.weight)


def group_by_group(part: Any) -> tuple[list[Tensor], Tensor]:
    """Two groups, each of two queries, a key and a value (Falcon 40B)."""
    parts = part.query_key_value.weight.view(2, 4, SIZE, -1)
    return [query for group in parts for query in group[:2]], parts[:, 2]


def falcon_40b() -> Any:
    config = model_types.build("falcon").config
    config.update({"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False})
    return random_model(tf.FalconForCausalLM(config))


Layout = Callable[[Any], tuple[Sequence[Tensor], Tensor]]
LAYOUTS: dict[str, Layout] = {
    "gpt2": lambda part: one_after_another(part.c_attn.weight.T, key_heads=4),
    "phi3": lambda part: one_after_another(part.qkv_proj.weight),
    "dbrx": lambda part: one_after_another(part.Wqkv.weight),
    "mpt": lambda part: one_after_another(part.Wqkv.weight, key_heads=4),
    "gpt_bigcode": lambda part: one_after_another(part.c_attn.weight, key_heads=1),
    "modernbert": lambda part: one_after_another(part.Wqkv.weight, key_heads=4),
    "gpt_neox": lambda part: head_by_head(part.query_key_value.weight),
    "bloom": lambda part: head_by_head(part.query_key_value.weight),
    "codegen": lambda part: head_by_head(part.qkv_proj.weight, key=2),
    "qwen3_next": gated,
    "qwen3_5_text": gated,
    "falcon new": group_by_group,
}
"""Where the rows of W_Q and W_K of every head stand."""
WRONG: dict[str, Layout] = {
    "mpt": lambda part: head_by_head(part.Wqkv.weight),
    "gpt_neox": lambda part: one_after_another(part.query_key_value.weight, key_heads=4),
    "bloom": lambda part: one_after_another(part.query_key_value.weight, key_heads=4),
    "codegen": lambda part: head_by_head(part.qkv_proj.weight),
    "dbrx": lambda part: (rows(part.Wqkv.weight)[2:6], rows(part.Wqkv.weight)[:2]),
    "qwen3_next": lambda part: (rows(part.q_proj.weight)[:4], gated(part)[1]),
    "falcon new": lambda part: one_after_another(part.query_key_value.weight),
}
"""The same, read as another layout."""


def planted(name: str, layout: Layout) -> list[Tensor]:
    """weights.definiteness of all heads where head 0 has W_Q = W_K and head 2 W_Q = −W_K of its key head."""
    model = falcon_40b() if name == "falcon new" else model_types.build(name).eval().double().requires_grad_(False)
    hooks.allow_float64(model)
    for part in {found.module for found in hooks.survey(model, {"input_ids": torch.arange(TOKENS)[None] + 3})}:
        query, key = layout(part)
        copies = key.clone()
        for place, sign in ((0, 1), (2, -1)):
            query[place].copy_(sign * copies[place * len(key) // 4])
    return [of_weights(found.query_key)["weights.definiteness"] for found in read(model)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_planted_weights_of_a_fused_layout_read_one_and_minus_one(name: str) -> None:
    for definiteness in planted(name, LAYOUTS[name]):
        assert definiteness[[0, 2]].tolist() == pytest.approx([1, -1], abs=1e-6)
        assert definiteness[[1, 3]].abs().max() < 0.9, "the control: random heads"


@pytest.mark.parametrize("name", WRONG)
def test_planted_weights_of_another_layout_do_not(name: str) -> None:
    assert all(definiteness[[0, 2]].abs().min() < 0.9 for definiteness in planted(name, WRONG[name]))
