"""Tests that `compare` names the cause of a difference: planted damage in models of several layouts, and in configs."""

from __future__ import annotations

import copy
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import loaded
import planted_causes
import pytest
import tiny
import torch
import transformers as tf
from loaded import changed
from planted_causes import DAMAGES, find_layers, fold, fold_last

import attnlens
from attnlens.maths.diagnosis.values import PRECISION
from attnlens.models import loading
from attnlens.records import Comparison, Finding, MeasureChange, Outcome
from attnlens.records.comparison import ON_FORMS
from attnlens.report.findings import find, next_commands
from attnlens.report.shapes import Shapes
from attnlens.requests import InspectRequest
from attnlens.runs.compare.changes import NOTES_ON_FORMS
from attnlens.runs.compare.diagnosis import compare_configs, describe_models
from attnlens.runs.inspect.pipeline import prepare, survey
from attnlens.runs.progress import silent

FULL = pytest.mark.full
INTERLEAVED, ONE_HEAD = "rows of q and k interleaved", "rows of k interleaved, one head"


@functools.cache
def model(name: str) -> loading.Loaded:
    if name == "four layers of gpt2":
        built = tiny.gpt2(n_layer=4, n_embd=48)
        for block in built.transformer.h:
            torch.nn.init.normal_(block.attn.c_attn.bias, std=0.02)
        return loaded.loaded(built)
    if name in ("demo", "minilm"):
        return loaded.trained(name)
    return loaded.cut(loaded.smollm2(), 4) if name == "smollm2" else loaded.family(name)


def described(first: loading.Loaded, second: loading.Loaded) -> dict[str, Any]:
    """Return what `compare` reports on configs, tensors and causes, without comparing heads."""
    request = InspectRequest(source="weights", analyzers=["symmetry"])
    sides = [survey(prepare(side, request, None, silent)) for side in (first, second)]
    sites = {a.site: b.site for a, b in zip(sides[0].site_calls, sides[1].site_calls, strict=True)}
    return describe_models((sides[0], sides[1]), sites, {})


def causes(first: loading.Loaded, second: loading.Loaded) -> list[tuple[str, list[int], list[int]]]:
    """Return the hypothesis, layers and heads of each cause."""
    return [(each.hypothesis, each.layers, each.heads) for each in described(first, second)["diagnosis"]]


def plant(name: str, layer: int) -> Callable[[Any], object]:
    """Return a change that plants a damage of planted_causes.DAMAGES in one layer."""
    return lambda second: DAMAGES[name].change(find_layers(second)[layer])


def adapt(layer: int) -> Callable[[Any], None]:
    """Add an update of rank 2 to W_Q and W_V."""
    return lambda second: planted_causes.adapt(2, "query", "value")(find_layers(second)[layer])


def quantise(layer: int) -> Callable[[Any], None]:
    """Round each row of W_Q and W_K to 16 levels."""

    def change(second: Any) -> None:
        for part in (find_layers(second)[layer].weights[role] for role in ("query", "key")):
            part.copy_(planted_causes.round_values(part.flatten(0, 1), 4).reshape(part.shape))

    return change


def round_off(*names: str) -> Callable[[Any], None]:
    """Round these tensors, by default all, to bfloat16."""

    def change(second: Any) -> None:
        for name in names or dict(second.named_parameters()):
            second.get_parameter(name).copy_(second.get_parameter(name).bfloat16())

    return change


def disturb(*names: str, size: float = 0.3) -> Callable[[Any], None]:
    """Add noise to these tensors, by default to all, of `size` times their spread."""

    def change(second: Any) -> None:
        for number, name in enumerate(names or dict(second.named_parameters())):
            weight = second.get_parameter(name)
            generator = torch.Generator().manual_seed(number)
            weight.add_(size * weight.std() * torch.randn(weight.shape, generator=generator))

    return change


MODELS = [
    "four layers of gpt2",
    pytest.param("demo", marks=FULL),
    pytest.param("minilm", marks=FULL),
    pytest.param("smollm2", marks=FULL),
]


@pytest.mark.parametrize("name", MODELS)
def test_planted_damage_is_named_with_its_layer_and_heads(name):
    own = model(name)
    grouped = name == "smollm2"
    heads = [3, 4, 5] if grouped else [1]
    second = changed(own, plant(ONE_HEAD, 0), quantise(1), adapt(2), plant("o transposed", 3))
    expected = [
        ("interleaved rows", [0], heads),
        ("quantised to 4 bits", [1], []),
        ("rank 2 update", [2], []),
        ("transposed", [3], []),
    ]
    assert sorted(causes(own, second)) == sorted(expected)
    if not grouped:
        second = changed(own, plant("q and k exchanged", 0), plant("bias of q lost", 1), plant("q times √head_dim", 2))
        assert sorted(causes(own, second)) == [("bias dropped", [1], []), ("exchanged", [0], []), ("scaled", [2], [])]


@pytest.mark.parametrize("name", MODELS)
def test_two_causes_in_one_layer_are_named_together(name):
    own = model(name)
    twice = plant(INTERLEAVED, 1), quantise(1)
    second = changed(own, plant(INTERLEAVED, 0), *twice, adapt(2), plant(ONE_HEAD, 2))
    found = causes(own, second)
    assert ("interleaved rows", [0, 1], []) in found
    assert ("quantised to 4 bits", [1], []) in found
    assert any(each[:2] == ("rank 2 update", [2]) for each in found)
    assert any(each[:2] == ("interleaved rows", [2]) and each[2] for each in found)
    assert len(found) == 4
    second = changed(own, plant(INTERLEAVED, 1), round_off())
    assert ("interleaved rows", [1], []) in causes(own, second)
    if name != "smollm2":
        second = changed(own, plant("rows interleaved, bias of k lost", 1))
        assert sorted(causes(own, second)) == [("bias dropped", [1], []), ("interleaved rows", [1], [])]


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *(("gpt2", 1e-2), ("gemma2", 0.3), ("bloom", 0.3)),  # BLOOM's attention accepts one sequence only
        *(pytest.param(name, 0.3, marks=FULL) for name in ("demo", "qwen3", "minilm")),
        *(pytest.param(name, 1e-2, marks=FULL) for name in ("demo", "gemma2", "qwen3", "minilm")),
    ],
)
def test_noise_is_not_explained(name, size):
    own = model(name)
    assert {hypothesis for hypothesis, *_ in causes(own, changed(own, disturb(size=size)))} == {"not explained"}


def test_norms_of_queries_and_keys():
    own = model("qwen3")

    def shift_gain(second: Any) -> None:
        find_layers(second)[0].gains[1].weight.add_(1)

    assert causes(own, changed(own, plant("gain of q lost", 1))) == [("gain dropped", [1], [])]
    assert causes(own, changed(own, shift_gain)) == [("gain offset", [0], [])]
    interleaved = plant("rows of q, k and gains interleaved", 1)
    (cause,) = described(own, changed(own, interleaved))["diagnosis"]
    assert cause.hypothesis == "interleaved rows"
    assert cause.tensors == ["query.weight", "query.gain", "key.weight", "key.gain"]
    assert cause.repair == "permute the rows of W_Q and W_K from interleaved to half-split"


def read_by(*readers: torch.nn.Linear) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Return matrices that read a norm, and their biases, for planted_causes.fold."""
    return [(reader.weight, reader.bias) for reader in readers]


def test_a_folded_norm_is_harmless_if_all_matrices_took_it():
    own = model("llama")

    def fold_all(second: Any) -> None:
        for number, layer in enumerate(second.model.layers):
            plant("norm folded", number)(second)
            fold(layer.post_attention_layernorm, read_by(layer.mlp.gate_proj, layer.mlp.up_proj))

    second = changed(own, fold_all)
    ids = torch.arange(5, 21)[None]
    torch.testing.assert_close(own.model(ids).logits, second.model(ids).logits)
    found = described(own, second)["diagnosis"]
    assert [(each.hypothesis, each.layers, each.harmless) for each in found] == [("norm folded", [0, 1], True)] * 2

    (cause,) = described(own, changed(own, plant("norm folded into q and k", 1)))["diagnosis"]
    assert (cause.hypothesis, cause.layers, cause.harmless) == ("norm folded", [1], False)
    assert "but W_V is unchanged" in cause.text


def test_a_norm_whose_output_is_a_residual_cannot_be_folded():
    own = model("bert")

    def fold_first(second: Any) -> None:
        layer = second.bert.encoder.layer[1]
        fold(layer.attention.output.LayerNorm, read_by(layer.intermediate.dense))

    (cause,) = described(own, changed(own, fold_first))["diagnosis"]
    assert (cause.hypothesis, cause.layers, cause.harmless) == ("norm folded", [1], False)
    assert "is also added to the next residual sum" in cause.text


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_the_norm_of_cross_attention_can_be_folded_into_its_queries(name):
    own = model(name)

    folded = plant("norm of cross-attention folded", 3)
    (cause,) = described(own, changed(own, folded))["diagnosis"]
    assert (cause.hypothesis, cause.layers, cause.harmless) == ("norm folded", [5], True)
    query = (
        "decoder.block.1.layer.1.EncDecAttention.q" if name == "t5" else "model.decoder.layers.1.encoder_attn.q_proj"
    )
    found = described(own, changed(own, folded, disturb(f"{query}.weight")))["diagnosis"]
    assert not any(cause.harmless for cause in found)


def test_a_norm_before_cross_attention_whose_output_is_a_residual_cannot_be_folded():
    own = model("bart")

    def fold_cross(second: Any) -> None:
        layer = second.model.decoder.layers[1]
        fold(layer.self_attn_layer_norm, read_by(layer.encoder_attn.q_proj))

    assert not any(cause.harmless for cause in described(own, changed(own, fold_cross))["diagnosis"])


@pytest.mark.parametrize("tied", [False, True])
def test_the_last_norm_can_be_folded_into_the_output_matrix(tied):
    own = changed(model("llama"), tie_word_embeddings=tied)

    second = changed(own, fold_last, tie_word_embeddings=False)
    ids = torch.arange(5, 21)[None]
    torch.testing.assert_close(own.model(ids).logits, second.model(ids).logits)
    (cause,) = described(own, second)["diagnosis"]
    assert (cause.hypothesis, cause.layers, cause.harmless) == ("norm folded", [], True)
    other = changed(own, fold_last, disturb("lm_head.weight"), tie_word_embeddings=False)
    found = {cause.hypothesis for cause in described(own, other)["diagnosis"]}
    assert found == {"gain dropped", "output matrix not tied" if tied else "not explained"}


@pytest.mark.parametrize(
    "damage_name",
    [*("rows of q and k interleaved", "heads of v reordered"), pytest.param("heads of q reordered", marks=FULL)],
)
def test_attention_that_accepts_one_sequence_only_has_heads(damage_name):
    """BLOOM's position bias has the number of sequences in its shape."""
    own = model("bloom")
    ((hypothesis, layers, _),) = causes(own, changed(own, plant(damage_name, 1)))
    assert re.search(DAMAGES[damage_name].expected, hypothesis)
    assert layers == [1]


def test_a_cause_is_named_in_a_layer_whose_inputs_are_nan():
    own = model("bloom")

    second = changed(own, plant("NaN in k", 0), plant("q and k exchanged", 1))
    found = {(hypothesis, *layers) for hypothesis, layers, _ in causes(own, second)}
    assert found == {("not finite", 0), ("exchanged", 1)}


@pytest.mark.parametrize("damage_name", ["fused matrix split flat", "fused matrix split by head"])
def test_a_wrong_split_is_named_if_the_model_lacks_one_of_the_biases(damage_name):
    own = model("whisper")
    found = causes(own, changed(own, plant(damage_name, 1)))
    assert [hypothesis for hypothesis, *_ in found] == ["wrong split"]


def test_gains_stored_as_one_plus_g_and_another_scale_and_softcap():
    own = model("gemma2")

    shifts = [plant("norm's gain + 1", layer) for layer in (0, 1)]
    assert causes(own, changed(own, *shifts)) == [("gain offset", [0, 1], [])]
    assert causes(own, changed(own, plant("norm's gain lost", 1))) == [("gain dropped", [1], [])]
    found = described(own, changed(own, query_pre_attn_scalar=6, attn_logit_softcapping=None))
    assert {change.field for change in found["config"]} == {"query_pre_attn_scalar", "attn_logit_softcapping"}
    assert {cause.hypothesis for cause in found["diagnosis"]} == {"different scale", "different softcap"}
    assert "(× 2)" in found["diagnosis"][0].text
    assert found["tensors"].differ == []


ROPES = {
    "RoPE's base is 500,000 instead of 10,000": {"rope_theta": 500000.0},
    "RoPE's positions are multiplied by 0.25 (linear scaling)": {"rope_type": "linear", "factor": 4.0},
    "RoPE's base is 500,000 instead of 10,000, and positions are multiplied by 0.25 (linear scaling)": {
        "rope_theta": 500000.0,
        "rope_type": "linear",
        "factor": 4.0,
    },
    "depending on the pair (as in llama3 or yarn scaling)": {
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
    assert (cause.hypothesis, cause.layers) == ("different rotation", [0, 1])
    assert text in cause.text
    assert found["tensors"].differ == []


def test_gains_stored_without_their_one_are_rounded_as_they_are_stored():
    own = model("gemma2")
    found = described(own, changed(own, round_off()))["diagnosis"]
    assert [(cause.hypothesis, cause.layers) for cause in found] == [("rounded to bfloat16", [0, 1])]


def replace_layers(own: loading.Loaded, sources: dict[int, int]) -> Callable[[Any], None]:
    """Give each layer in `sources` the tensors of another layer."""

    def change(second: Any) -> None:
        for layer, source in sources.items():
            first, block = (find_layers(side)[place].block for side, place in ((own.model, source), (second, layer)))
            shared = {name: part for name, part in first.state_dict().items() if name in block.state_dict()}
            block.load_state_dict(block.state_dict() | shared)

    return change


MOVES: dict[str, tuple[dict[int, int], list[tuple[str, list[int], str]]]] = {
    "copied": ({1: 0}, [("tensors of a different layer", [1], " are those of layer 0")]),
    "exchanged": ({1: 2, 2: 1}, [("exchanged layers", [1, 2], " of layers 1 and 2 are exchanged")]),
    "shifted": ({0: 1, 1: 2, 2: 3}, [("tensors of a different layer", [0, 1, 2], " are those of the next layer")]),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("move", MOVES)
def test_layers_with_the_tensors_of_another_are_named(name, move):
    own = model(name)
    sources, expected = MOVES[move]
    found = described(own, changed(own, replace_layers(own, sources)))["diagnosis"]
    assert [(cause.hypothesis, cause.layers) for cause in found] == [each[:2] for each in expected]
    assert all(cause.text.endswith(end) for cause, (*_, end) in zip(found, expected, strict=True))
    assert all(cause.repair for cause in found)


def test_one_tensor_of_another_layer_and_further_changes_are_named():
    own = model("four layers of gpt2")

    def move(second: Any) -> None:
        parts = find_layers(second)
        parts[2].weights["key"].copy_(parts[0].weights["key"].clone())

    (cause,) = described(own, changed(own, move))["diagnosis"]
    assert (cause.layers, cause.text) == ([2], "W_K is that of layer 0")
    found = causes(own, changed(own, replace_layers(own, {1: 2, 2: 1}), adapt(2), plant("bias of q lost", 3)))
    assert found == [("bias dropped", [3], []), ("rank 2 update", [2], []), ("exchanged layers", [1, 2], [])]


def test_encoder_and_decoder_layers_are_not_confused():
    own = model("t5")

    second = changed(own, replace_layers(own, {2: 3, 3: 2}))
    report = attnlens.compare(own, second, source="weights", analyzers="symmetry")
    names = {report.model.layer_name(layer) for cause in report.comparison.diagnosis for layer in cause.layers}
    assert names == {"decoder.0", "decoder.1", "cross.0", "cross.1"}
    assert {cause.hypothesis for cause in report.comparison.diagnosis} == {"exchanged layers"}
    pairs = {cause.text.partition(" of layers ")[2] for cause in report.comparison.diagnosis}
    assert pairs == {"decoder.0 and decoder.1 are exchanged", "cross.0 and cross.1 are exchanged"}


@pytest.mark.parametrize(("name", "rounded"), [("t5", False), ("t5", True), ("llama", False)])
def test_heads_that_leave_their_position_bias_behind_are_damage(name, rounded):
    """T5 stores the bias of all layers in the first layer."""
    own = model(name)
    found = described(own, changed(own, plant("heads reordered in all", 1), *([round_off()] if rounded else [])))[
        "diagnosis"
    ]
    (cause,) = (each for each in found if each.hypothesis not in PRECISION)
    expected = ("heads out of order", False) if name == "t5" else ("reordered heads", True)
    assert (cause.hypothesis, cause.harmless) == expected
    assert ("but position bias is unchanged" in cause.text) is (name == "t5")
    assert name == "llama" or not any(each.harmless for each in found)


def test_a_rope_and_rows_can_both_differ():
    own = model("llama")
    second = changed(own, plant(INTERLEAVED, 1), rope_parameters=own.model.config.rope_parameters | {"rope_theta": 5e5})
    assert sorted(causes(own, second)) == [("different rotation", [0, 1], []), ("interleaved rows", [1], [])]


def test_missing_biases_are_dropped_biases_and_tensors_of_one_model():
    own = model("llama")
    found = described(own, changed(own, attention_bias=False))
    assert [(cause.hypothesis, cause.layers) for cause in found["diagnosis"]] == [("bias dropped", [0, 1])]
    assert len(found["tensors"].missing) == 8
    assert found["tensors"].extra == found["tensors"].differ == []


def test_a_key_bias_changes_attention_only_under_rope():
    own = model("bert")
    (cause,) = described(own, changed(own, plant("bias of k lost", 1)))["diagnosis"]
    assert (cause.hypothesis, cause.harmless) == ("bias dropped", True)
    assert "without RoPE, a key bias does not change attention" in cause.text
    own = model("llama")
    (cause,) = described(own, changed(own, plant("bias of k lost", 1)))["diagnosis"]
    assert (cause.hypothesis, cause.harmless) == ("bias dropped", False)


def test_another_number_of_key_heads():
    own = model("llama")

    def build(*, tiled: bool) -> loading.Loaded:
        config, weights = copy.deepcopy(own.model.config), own.model.state_dict()
        config.num_key_value_heads = 6
        for name in [name for name in weights if "k_proj" in name or "v_proj" in name]:
            heads = weights[name].unflatten(0, (2, 10))
            weights[name] = (torch.cat([heads] * 3) if tiled else heads.repeat_interleave(3, 0)).flatten(0, 1)
        second = type(own.model)(config).eval()
        second.load_state_dict(weights)
        return loading.Loaded(second, own.tokenizer, "", own.info, own.kind)

    assert causes(own, build(tiled=True)) == [("tiled key heads", [0, 1], [])]
    (cause,) = described(own, build(tiled=False))["diagnosis"]
    assert (cause.hypothesis, cause.harmless) == ("repeated key heads", True)


def compared(first: loading.Loaded, second: loading.Loaded, **options: Any) -> tuple[Comparison, dict[str, str]]:
    """Return the comparison, and the answers to its questions."""
    options = {"windows": 2, "length": 16} | options
    report = attnlens.compare(first, second, analyzers="symmetry", **options)
    return report.comparison, {finding.question: finding.answer for finding in findings(report)}


def test_heads_reordered_only_in_queries_and_keys_are_damage():
    own = model("qwen3")
    result, answers = compared(own, changed(own, plant("heads of q and k reordered", 1)))
    assert all(head.partner == head.head for head in result.heads)
    assert answers["Changed?"].startswith("6 of 12 heads changed")
    assert answers["Cause?"] == (
        "Layer 1: the heads of W_Q and W_K are in a different order, but not those of W_V and W_O."
    )
    assert {(row.layer, row.head) for row in result.rows if row.named} == {(1, head) for head in range(6)}
    assert [cause.harmless for cause in result.diagnosis] == [False]


def test_settings_that_change_hidden_states_are_listed():
    sides = [SimpleNamespace(config=tf.GraniteConfig(residual_multiplier=size, pad_token_id=0)) for size in (1.0, 0.5)]
    (change,) = compare_configs(*sides)
    assert (change.field, change.first, change.second) == ("residual_multiplier", "1.0", "0.5")
    sides[1].config = tf.GraniteConfig(hidden_act="gelu", attention_dropout=0.5, pad_token_id=1)
    assert [change.field for change in compare_configs(*sides)] == ["hidden_act"]


def test_first_lines_and_the_repair_of_a_lost_permutation():
    own = model("llama")
    report = attnlens.compare(
        own, changed(own, plant(INTERLEAVED, 0), rms_norm_eps=1e-3), analyzers="symmetry", windows=2, length=16
    )
    first, second, third = findings(report)[:3]
    assert (first.question, first.answer) == ("Same weights?", "No: 4 of 29 tensors differ.")
    assert (second.question, second.answer) == ("Same config?", "No: rms_norm_eps 1e-06 → 0.001.")
    assert (third.question, third.answer) == (
        "Cause?",
        "Layer 0: the rows of W_Q and W_K are interleaved instead of half-split.",
    )
    assert third.evidence == "Repair: permute the rows of W_Q and W_K from interleaved to half-split."
    own_kl = [row for row in report.comparison.rows if row.measure == "compare.own_kl" and row.layer == 0]
    assert len(own_kl) == 6
    assert all(row.beyond_rounding for row in own_kl)
    assert [head.relation for head in report.comparison.heads if head.layer == 0] == ["same form"] * 6


def test_weights_in_files_are_compared_layer_by_layer(tmp_path, monkeypatch):
    from attnlens.models.loading.deferred import DeferredWeights

    own = model("llama")
    other = changed(own, plant(INTERLEAVED, 1), round_off())
    for name, side in (("first", own), ("second", other)):
        side.model.save_pretrained(tmp_path / name)
        side.tokenizer.save_pretrained(tmp_path / name)
    present, read, most = DeferredWeights.present, defaultdict[int, set[str]](set), Counter[int]()
    in_memory_now = defaultdict[int, list[str]](list)

    @contextmanager
    def watch(self: DeferredWeights, module: Any, wanted: Any) -> Iterator[None]:
        path, now = self._paths[module], in_memory_now[id(self)]
        read[id(self)].add(path)
        with present(self, module, wanted):
            now.append(path)
            layers = {match[1] for match in map(re.compile(r"model\.layers\.(\d+)").match, now) if match}
            most[id(self)] = max(most[id(self)], len(layers))
            yield
            now.remove(path)

    monkeypatch.setattr(DeferredWeights, "present", watch)
    options = {"source": "weights", "analyzers": "symmetry"}
    report = attnlens.compare(tmp_path / "first", tmp_path / "second", from_files=True, **options)
    result = report.comparison
    in_memory = attnlens.compare(tmp_path / "first", tmp_path / "second", **options).comparison
    layers = {f"model.layers.{layer}" for layer in (0, 1)}
    outside = {"model.embed_tokens", "model.norm", "lm_head"}
    assert len(read) == 2
    for paths in read.values():
        assert paths - {f"{layer}.self_attn" for layer in layers} == layers | outside
    assert list(most.values()) == [1, 1]
    assert [(each.hypothesis, each.layers) for each in result.diagnosis] == [
        ("interleaved rows", [1]),
        ("rounded to bfloat16", [0, 1]),
    ]
    assert [each.text for each in result.diagnosis] == [each.text for each in in_memory.diagnosis]
    assert result.tensors == in_memory.tensors
    distances = {(row.layer, row.head): row.delta for row in in_memory.rows if row.measure == "compare.form_change"}
    stored = {(row.layer, row.head): row.delta for row in result.rows if row.measure == "compare.form_change"}
    assert stored.keys() == distances.keys()
    assert len(distances) == 12
    assert all(value == pytest.approx(distances[place], rel=1e-3, abs=1e-9) for place, value in stored.items())
    assert result.rows
    assert all(row.p is None and not row.named for row in result.rows)


def placed(first: loading.Loaded, second: loading.Loaded) -> list[tuple[list[int], list[str]]]:
    """Return the layers and tensors of each cause."""
    return [(cause.layers, cause.tensors) for cause in described(first, second)["diagnosis"]]


DECODER = "model.decoder.layers.1"


@pytest.mark.parametrize(
    ("name", "tensor", "layer", "part"),
    [
        ("bart", f"{DECODER}.self_attn.k_proj.weight", 4, "key.weight"),
        ("bart", f"{DECODER}.encoder_attn.q_proj.weight", 5, "query.weight"),
        ("bart", f"{DECODER}.fc1.weight", 4, "fc1.weight"),
        pytest.param("bart", f"{DECODER}.encoder_attn.out_proj.weight", 5, "output.weight", marks=FULL),
        pytest.param("bart", "model.encoder.layers.1.self_attn.q_proj.weight", 1, "query.weight", marks=FULL),
        ("t5", "decoder.block.1.layer.1.EncDecAttention.q.weight", 5, "query.weight"),
    ],
)
def test_each_tensor_of_a_decoder_is_diagnosed_once_at_its_own_attention(name, tensor, layer, part):
    own = model(name)
    assert placed(own, changed(own, disturb(tensor))) == [([layer], [part])]


def test_unexplained_tensors_and_roundings_are_merged_only_if_they_are_the_same():
    own = model("llama")
    up, keys = (f"model.layers.{{}}.{name}.weight" for name in ("mlp.up_proj", "self_attn.k_proj"))
    first, second = described(own, changed(own, disturb(up.format(0), keys.format(1))))["diagnosis"]
    assert (first.layers, first.tensors, second.layers, second.tensors) == (
        [0],
        ["mlp.up_proj.weight"],
        [1],
        ["key.weight"],
    )
    assert (first.text.split()[0], second.text.split()[0]) == ("mlp.up_proj.weight", "W_K")
    assert placed(own, changed(own, disturb(keys.format(0), keys.format(1)))) == [([0, 1], ["key.weight"])]
    parts = round_off(up.format(0), keys.format(1))
    assert placed(own, changed(own, parts)) == [([0], ["mlp.up_proj.weight"]), ([1], ["key.weight"])]
    (whole,) = described(own, changed(own, round_off()))["diagnosis"]
    assert (whole.layers, whole.text) == (
        [0, 1],
        "weights are rounded to bfloat16, also model.embed_tokens.weight, model.norm.weight and lm_head.weight outside "
        "the layers",
    )


def triple(*names: str) -> Callable[[Any], object]:
    return lambda second: [second.get_parameter(name).mul_(3) for name in names]


@pytest.mark.parametrize(
    ("change", "verb"),
    [(disturb, "changed by up to"), (round_off, "are rounded to bfloat16"), (triple, "are multiplied by 3")],
)
def test_all_tensors_outside_of_layers_are_named(change, verb):
    own = model("llama")
    names = ["model.embed_tokens.weight", "lm_head.weight"]
    (cause,) = described(own, changed(own, change(*names)))["diagnosis"]
    assert (cause.layers, cause.tensors) == ([], names)
    assert cause.text.startswith(f"model.embed_tokens.weight and lm_head.weight {verb}")


@pytest.mark.parametrize("from_files", [False, pytest.param(True, marks=FULL)])
def test_the_first_lines_do_not_depend_on_shapes_and_name_the_config(from_files, tmp_path):
    own = model("llama")
    fewer_heads = changed(own, num_attention_heads=3, num_key_value_heads=1, head_dim=20)
    sides: list[Any] = [own, loaded.cut(own, 1), fewer_heads]
    options: dict[str, Any] = {"analyzers": "symmetry", "source": "weights"}
    if from_files:
        for number, side in enumerate(sides):
            side.model.save_pretrained(tmp_path / str(number))
            side.tokenizer.save_pretrained(tmp_path / str(number))
        sides, options = [tmp_path / str(number) for number in range(3)], options | {"from_files": True}
    shorter, wider = (findings(attnlens.compare(sides[0], side, **options)) for side in sides[1:])
    assert [each.question for each in shorter] == ["Same weights?", "Same config?", "Cause?", "Changed?"]
    assert shorter[0].answer.startswith("No: 16 tensors in both models, all identical, but")
    assert "Only in the first model: model.layers.1." in shorter[0].evidence
    assert shorter[1].answer.startswith("No: num_hidden_layers 2 → 1")
    assert shorter[2].answer == "The second model has 1 layer instead of 2 (num_hidden_layers)."
    assert [each.question for each in wider] == ["Same weights?", "Same config?", "Cause?", "Changed?"]
    assert wider[0].answer == "Yes: 29 tensors, all identical."
    assert "num_attention_heads 6 → 3" in wider[1].answer
    assert wider[2].answer == "The second model has 3 attention heads instead of 6 (num_attention_heads)."
    assert wider[2].evidence == "Repair: set num_attention_heads to 6."


def findings(report: attnlens.Report, **changes: Any) -> list[Finding]:
    """Return the findings of a comparison after changes of its fields."""
    comparison = report.comparison.model_copy(update=changes)
    return list(find(Shapes(report.model_copy(update={"comparison": comparison}))))


def test_damage_is_found_in_the_layers_that_both_models_have():
    own = model("llama")
    damaged = changed(own, plant(INTERLEAVED, 0))
    report = attnlens.compare(own, loaded.cut(damaged, 1), analyzers="symmetry", source="weights")
    assert [(cause.hypothesis, cause.layers) for cause in report.comparison.diagnosis] == [
        ("different number of layers", []),
        ("interleaved rows", [0]),
    ]


def test_an_output_matrix_that_is_no_longer_the_embedding():
    own = changed(model("llama"), tie_word_embeddings=True)
    assert own.model.lm_head.weight is own.model.model.embed_tokens.weight
    equal = described(own, changed(own, tie_word_embeddings=False))
    assert [change.field for change in equal["config"]] == ["tie_word_embeddings"]
    assert (equal["tensors"].total, equal["tensors"].differ, equal["diagnosis"]) == (29, [], [])
    assert described(own, changed(own, disturb("model.norm.weight")))["tensors"].total == 28
    other = changed(own, lambda second: second.lm_head.weight.normal_(), tie_word_embeddings=False)
    for sides, hypothesis in (((own, other), "output matrix not tied"), ((other, own), "output matrix tied")):
        found = described(*sides)
        assert found["tensors"].differ == ["lm_head.weight"]
        assert [(cause.hypothesis, cause.layers, cause.tensors) for cause in found["diagnosis"]] == [
            (hypothesis, [], ["lm_head.weight"])
        ]


@pytest.mark.parametrize("name", ["llama", "gemma2"])  # Gemma's gain is 1 + w
def test_the_gain_of_the_last_norm(name):
    own = model(name)

    for name, cause in (("gain lost", "gain dropped"), ("gain + 1", "gain offset")):
        assert causes(own, changed(own, DAMAGES[f"last norm's {name}"].change)) == [(cause, [], [])]
    assert causes(own, changed(own, disturb("model.norm.weight"))) == [("not explained", [], [])]


def test_predictions_that_are_not_finite_are_a_problem():
    own = model("llama")

    def break_weight(second: Any) -> None:
        second.model.layers[1].self_attn.q_proj.weight[0, 0] = torch.nan

    broken = changed(own, break_weight)
    report = attnlens.compare(own, broken, analyzers="symmetry", windows=2, length=16)
    (effect,) = (each for each in findings(report) if each.question == "Effect?")
    assert (effect.answer, effect.severity) == ("The second model's predictions are not finite.", "problem")
    result, answers = compared(broken, own)
    assert result.outcome is None
    assert answers["Note"].startswith("Predictions are not compared: the first model's predictions are not finite.")


def test_changes_of_blocks_have_a_practical_size():
    own = model("llama")
    small, answers = compared(own, changed(own, rms_norm_eps=1e-5))
    assert [(block.negligible, block.named, block.smallest) for block in small.blocks] == [(True, False, 1e-3)] * 2
    assert all(0 < block.change < 1e-4 for block in small.blocks)
    assert answers["Changed?"] == "None of 12 heads changed measurably."
    large, _ = compared(own, changed(own, disturb("model.layers.1.mlp.up_proj.weight")), windows=4, length=24)
    assert [(block.negligible, block.named) for block in large.blocks] == [(True, False), (False, True)]


@functools.cache
def rounded() -> attnlens.Report:
    """Compare a model with itself after rounding."""
    own = model("llama")
    return attnlens.compare(own, changed(own, round_off()), analyzers="symmetry", windows=2, length=16)


def test_rounding_is_as_notable_in_one_direction_as_in_the_other():
    own = model("llama")
    back = attnlens.compare(changed(own, round_off()), own, analyzers="symmetry", source="weights")
    for report in (rounded(), back):
        assert [each.severity for each in findings(report) if each.question == "Cause?"] == ["notable"]


def test_the_effect_is_notable_if_predictions_surely_change():
    report = rounded()

    def effect(kl: float, interval: tuple[float, float], same_top: float = 1.0) -> Finding:
        change = {"mean": kl, "mean_se": 0.002, "same_top": same_top}
        predictions = report.comparison.outcome.predictions.model_copy(update=change)
        outcome = Outcome(predictions=predictions, kl=kl, kl_ci95=interval)
        (found,) = (each for each in findings(report, outcome=outcome) if each.question == "Effect?")
        return found

    assert effect(0.03, (0.02, 0.04)).answer.startswith("KL 0.0300 ± 0.0020 nats per token")
    assert effect(0.03, (0.02, 0.04)).severity == "notable"
    assert effect(0.001, (0.0009, 0.002), same_top=0.98).severity == "notable"
    assert effect(0.03, (0.0, 0.04)).severity == "none"
    assert effect(0.001, (0.0009, 0.002)).severity == "none"


def test_heads_that_differ_in_other_measures_alone_are_not_listed_with_their_own_kl():
    report = rounded()
    fields = {"layer": 1, "q": 1e-9, "rounding": 1e-15}
    small = {"measure": "compare.own_kl", "negligible": True, **fields}

    def shown(*rows: MeasureChange, relation: str = "identical") -> tuple[dict[str, Finding], list[str]]:
        heads = [head.model_copy(update={"relation": relation}) for head in report.comparison.heads]
        change = {"rows": rows, "heads": heads, "blocks": [], "diagnosis": []}
        changed = report.model_copy(update={"comparison": report.comparison.model_copy(update=change)})
        return {each.question: each for each in find(Shapes(changed))}, next_commands(Shapes(changed))

    others = [
        MeasureChange(head=2, delta=5e-5, **small),
        MeasureChange(head=2, measure="compare.row_kl", delta=0.01, named=True, **fields),
        MeasureChange(head=3, delta=4e-5, **small),
        MeasureChange(head=3, measure="compare.row_kl", delta=0.02, named=True, **fields),
    ]
    said, commands = shown(*others)
    assert said["Changed?"].answer == "None of 12 heads changed by itself; 2 differ in other measures."
    assert said["Changed?"].evidence.endswith(" 2 more are significant but too small to matter.")
    assert (
        said["Which heads?"].answer
        == "Attention differs most in layer 1 head 3 (KL 0.020 nats), layer 1 head 2 (KL 0.010 nats)."
    )
    assert not any("inspect" in command for command in commands)

    changes = {"measure": "compare.own_kl", "named": True, **fields}
    most = MeasureChange(head=5, delta=0.3, **changes), MeasureChange(head=4, delta=0.2, **changes)
    said, commands = shown(*others[:1], *most, relation="changed")
    assert said["Changed?"].answer == "2 of 12 heads changed."
    assert said["Changed?"].evidence.endswith(" 1 more is significant but too small to matter.")
    assert (
        said["Which heads?"].answer
        == "Attention differs most in layer 1 head 5 (KL 0.30 nats), layer 1 head 4 (KL 0.20 nats)."
    )
    assert " --head 1.5 " in commands[0], "the most changed head"

    form = MeasureChange(layer=1, head=2, measure="compare.form_change", delta=0.25)
    parts = report.model.model_copy(update={"layer_names": ["encoder.0", "decoder.0"]})
    said = findings(report.model_copy(update={"model": parts}), rows=[form], blocks=[], diagnosis=[], tests=0)
    answer = next(each.answer for each in said if each.question == "Changed?")
    assert answer == "The form M changed by at most 0.25 (‖ΔM‖/‖M‖ of decoder.0.2)."


def test_number_types_are_those_that_fit_the_values():
    report = rounded()
    tensors = report.comparison.tensors
    assert tensors.types == ("float32", "bfloat16"), "both models hold float32 numbers"
    for types, words in (
        (
            tensors.types,
            "The first model's values are exact in float32; the second model's values are exact in bfloat16.",
        ),
        (("gptq", "float16"), "The first model is stored as gptq; the second model's values are exact in float16."),
    ):
        assert findings(report, tensors=tensors.model_copy(update={"types": types}))[0].evidence.endswith(words)


def test_causes_that_are_not_shown_are_in_the_json_report():
    report = rounded()
    (cause,) = report.comparison.diagnosis
    for count, words in ((5, "1 more cause is"), (6, "2 more causes are")):
        shown = [each.evidence for each in findings(report, diagnosis=[cause] * count) if each.question == "Cause?"]
        assert shown[-1] == f"{words} in the JSON report (--json FILE)."


def test_notes_on_other_things_than_forms_are_notes():
    assert all(note.startswith(ON_FORMS) for note in NOTES_ON_FORMS.values())
    own = model("llama")
    second = changed(own, disturb("model.layers.0.self_attn.q_proj.weight"))
    report = attnlens.compare(own, second, analyzers="symmetry", source="weights")
    note = "The tensors were read twice."
    answers = {each.question: each.answer for each in findings(report, notes=[note])}
    assert answers["Note"] == note
    assert answers["Form M?"].startswith("The query/key form M changed in 6 heads")
