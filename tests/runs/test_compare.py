"""Tests that planted damage is named where it is, and that harmless changes and equal models are recognised as such."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import math
import re
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
from loaded import changed
from planted_causes import find_layers, interleave, reorder_rows
from program import invoke
from program import refused as ended

import attnlens
from attnlens.errors import UsageError
from attnlens.models import loading, texts
from attnlens.records import Comparison
from attnlens.report.findings import find
from attnlens.report.report import Report
from attnlens.report.sections.checked import describe_breach
from attnlens.report.sections.facts import title
from attnlens.report.shapes import Shapes

SMALL: dict[str, Any] = {"windows": 8, "length": 32, "analyzers": ("symmetry", "spectrum")}
TWO: dict[str, Any] = {"windows": 2, "length": 32, "analyzers": "symmetry"}
LAYERS = {"smollm2": 5, "minilm": 5, "two layers of smollm2": 2, "two layers of minilm": 2}
"""Layers that the tests need of the first two trained models."""
FULL = pytest.mark.full
CASES = [
    ("demo", {"W_K shuffled": 0, "gain doubled": 1, "3 bits": 2}),
    ("tiny llama", {"W_K shuffled": 0, "mask leaks": 1}),
    ("tiny bert", {"head zeroed": 0, "gain doubled": 1}),
    pytest.param("demo", {"head zeroed": 0, "gain doubled": 1, "mask leaks": 3}, marks=FULL),
    pytest.param("minilm", {"W_K shuffled": 0, "head zeroed": 1, "gain doubled": 2, "3 bits": 4}, marks=FULL),
    pytest.param(
        "smollm2", {"W_K shuffled": 0, "head zeroed": 1, "gain doubled": 2, "3 bits": 3, "mask leaks": 4}, marks=FULL
    ),
]
"""Model, and damage with its layer; trained models from other packages take long."""
LONG = [pytest.param(name, marks=FULL) for name in ("demo", "two layers of minilm", "two layers of smollm2")]
PAGE = (
    (Path(__file__).parents[2] / "docs" / "pipelines.md")
    .read_text()
    .partition("### Did a change break the attention?")[2]
)
GATE = dict(re.findall(r"--rule '(\S+): ([^']+)'", PAGE.partition("\nThe first rule")[0]))
"""The rules of the page on pipelines."""


@functools.cache
def model(name: str) -> loading.Loaded:
    if name.startswith("tiny "):
        return loaded.family(name.removeprefix("tiny "))
    if name in ("demo", "whole minilm"):
        return loaded.trained(name.removeprefix("whole "))
    if name == "whole smollm2":  # each draw of rounding moves numbers of every word's vector
        return loaded.fewer_words(loaded.smollm2(), texts.sample("another"))
    return loaded.cut(model(f"whole {name.split()[-1]}"), LAYERS[name])


def damaged(name: str, *changes: tuple[str, int]) -> loading.Loaded:
    return changed(model(name), lambda second: damage.plant(second, dict(changes)))


@functools.cache
def report_of(name: str, *changes: tuple[str, int]) -> Report:
    """Compare a model with itself after planted changes."""
    # measures of the weights take longest, and the tiny models have them
    source = "both" if name.startswith("tiny ") else "tokens"
    return attnlens.compare(model(name), damaged(name, *changes), source=source, **SMALL)


def compared(*sides: Any, **options: Any) -> Comparison:
    return attnlens.compare(*sides, **TWO | options).comparison


def answers(report: Report) -> dict[str, str]:
    """Return the answer to each question of the report's findings."""
    return {finding.question: finding.answer for finding in find(Shapes(report))}


def named(result: Comparison, measure: str) -> set[tuple[int, int]]:
    return {(row.layer, row.head) for row in result.rows if row.measure == measure and row.named}


def rows(result: Comparison, measure: str) -> dict[tuple[int, int], Any]:
    return {(row.layer, row.head): row for row in result.rows if row.measure == measure}


def relations(result: Comparison) -> set[str | None]:
    return {head.relation for head in result.heads}


def of_layer(result: Comparison, layer: int | None, kv_head: int | None = None) -> set[tuple[int, int]]:
    """Return the heads of a layer, or those that share one key head (several under grouped-query attention)."""
    return {(head.layer, head.head) for head in result.heads if head.layer == layer and kv_head in (None, head.kv_head)}


@pytest.mark.parametrize(("name", "at"), CASES)
def test_damage_is_named_where_it_is_and_nowhere_else(name, at):
    report = report_of(name, *at.items())
    result = report.comparison
    forms = {
        *of_layer(result, at.get("3 bits")),
        *of_layer(result, at.get("W_K shuffled"), HEAD),
        *of_layer(result, at.get("head zeroed"), HEAD),
    }
    # BERT's norm follows the attention: the rows change from the next layer on, and not by the layer's own doing
    before = not name.endswith(("minilm", "bert"))
    doubled = of_layer(result, at.get("gain doubled")) if before else set()
    attending = forms | of_layer(result, at.get("mask leaks")) | doubled
    assert named(result, "compare.form_change") == forms
    assert named(result, "compare.own_kl") == attending
    assert [place for place, block in enumerate(result.blocks) if block.named] == sorted(at.values())
    assert [block.layers for block in result.blocks] == [[layer] for layer in range(len(result.blocks))]
    assert {(head.layer, head.head) for head in result.heads if head.relation == "changed"} == forms
    # factors of a module of which another head changed may differ by rounding
    layers = {layer for layer, _ in forms}
    assert {head.relation for head in result.heads if head.layer not in layers} <= {"identical"}
    assert relations(result) <= {"changed", "identical", "rounding"}
    assert {(row.layer, row.head) for row in result.rows if row.named and row.measure.startswith("weights.")} <= forms
    # the control: as both models run, all layers behind the first damage attend differently
    if len(result.blocks) > 2:
        assert len(named(result, "compare.row_kl")) > len(attending)
    assert min(layer for layer, _ in named(result, "compare.row_kl")) >= min(at.values())
    masks = [note for note in result.notes if "has a different mask: decoder in the first" in note]
    assert [note.partition(" has")[0] for note in masks] == [f"Layer {at.get('mask leaks')}"] * ("mask leaks" in at)
    # the pipeline's rules turn red, and name the heads
    breaches = {check.subject: check.breaches for check in attnlens.check(report, GATE).checks if not check.passed}
    assert breaches.keys() == GATE.keys()
    assert {(breach.layer, breach.head) for breach in breaches["compare.own_kl"]} == attending
    assert {breach.layer for breach in breaches["compare.blocks"]} == set(at.values())
    counts = [head.measures["compare.named"].value for head in report.with_changes().heads]
    assert sum(counts) == result.named == sum(row.named for row in result.rows)
    assert result.tests == sum(row.p is not None for row in result.rows)


def test_heads_behind_damage_inherit_their_change_and_the_least_change_is_of_the_size_of_the_named_ones():
    report = report_of(CASES[0][0], *CASES[0][1].items())
    result = report.comparison
    assert "more attend differently only because their inputs changed" in answers(report)["Changed?"]
    tokens = [row for row in result.rows if row.measure == "tokens.entropy" and row.se]
    assert all(abs(row.delta) > 0.5 * row.least for row in tokens if row.named)
    assert all(row.least > 3 * row.se for row in tokens)


def test_another_rope_base_is_named_at_every_layer():
    result = compared(model("tiny llama"), damaged("tiny llama", ("RoPE base", 0)), source="tokens", windows=12)
    assert [block.named for block in result.blocks] == [True, True]
    assert len(named(result, "compare.own_kl")) > 0.9 * len(result.heads)
    assert not named(result, "compare.form_change"), "at equal positions the form is the same"


@pytest.mark.parametrize("name", ["tiny llama", pytest.param("tiny bert", marks=FULL), *LONG])
def test_another_gauge_and_another_order_are_no_change(name):
    report = report_of(name, ("gauge", 0), ("reordered", 1))
    result = report.comparison
    assert result.named == 0
    assert not any(block.named for block in result.blocks)
    assert relations(result) == {"same form"}
    assert any("gauge" in note for note in result.notes)
    moved = of_layer(result, 1)
    assert {(head.layer, head.head) for head in result.heads if head.partner != head.head} == moved
    assert any(
        f"Layer 1: the second model has {len(moved)} heads in a different order" in note for note in result.notes
    )
    assert [check.passed for check in attnlens.check(report, GATE).checks] == [True] * len(GATE)


def test_with_heads_chosen_a_reordered_layer_is_compared_by_number_and_noted():
    result = compared(model("tiny bert"), damaged("tiny bert", ("reordered", 1)), source="weights", heads=[0, 1])
    assert [head.partner for head in result.heads] == [0, 1, 0, 1]
    assert [
        note for note in result.notes if note.startswith("Layer 1: the heads of the second model are in a different")
    ]


@pytest.mark.parametrize("name", ["tiny bert", *LONG[:2]])
def test_rounding_to_bfloat16_is_recognised(name):
    result = report_of(name, ("bf16", 0)).comparison
    assert result.named == 0
    assert relations(result) == {"rounding"}
    assert [cause.hypothesis for cause in result.diagnosis] == ["rounded to bfloat16"]


def test_rounding_is_recognised_if_some_weights_stay_in_float32_and_if_the_model_runs_in_bfloat16():
    def round_matrices(second: Any) -> None:
        for weight in (weight for weight in second.parameters() if weight.dim() > 1):
            weight.copy_(weight.bfloat16())

    own = model("tiny bert")
    result = compared(own, changed(own, round_matrices), source="weights")
    assert result.named == 0
    assert [cause.hypothesis for cause in result.diagnosis] == ["rounded to bfloat16"]
    result = compared(own, changed(own, lambda second: second.bfloat16()))
    assert relations(result) == {"rounding"}
    assert max(block.change for block in result.blocks) < 0.05


def test_models_in_training_are_compared_at_rest_and_left_as_they_are():
    sides = [damaged("tiny bert"), damaged("tiny bert", ("gain doubled", 1))]
    for side in sides:
        side.model.train().requires_grad_(True)
        for module in side.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.5
    before = {name: weight.clone() for name, weight in sides[0].model.state_dict().items()}
    result = compared(*sides, windows=2, length=16)
    assert [place for place, block in enumerate(result.blocks) if block.change > 1e-3] == [1]
    assert all(side.model.training for side in sides)
    assert all(torch.equal(before[name], weight) for name, weight in sides[0].model.state_dict().items())


def test_broken_weights_are_named_and_the_other_heads_are_compared():
    second, broken = damaged("demo"), {1: float("nan"), 2: float("inf")}
    with torch.no_grad():
        for head, value in broken.items():
            second.model.transformer.h[2].attn.c_attn.weight[0, 16 * head] = value  # of the query
    result = compared(model("demo"), second, source="weights", layers=[1, 2])
    changes = {place: row.delta for place, row in rows(result, "compare.form_change").items()}
    assert changes == dict.fromkeys(changes, 0) | {(2, head): None for head in broken}
    unrelated = [(head.layer, head.head, head.reason) for head in result.heads if head.relation is None]
    assert unrelated == [(2, head, "a form is 0 or not finite") for head in broken]


@pytest.mark.parametrize("family", ["xlnet", pytest.param("deberta-v2", marks=FULL)])
def test_equal_models_that_compute_attention_by_hand_do_not_differ(family):
    own = loaded.loaded(model_types.build(family).eval())
    result = compared(own, loaded.loaded(copy.deepcopy(own.model)), length=8, batch_size=2)
    assert result.named == 0
    assert all(row.delta == pytest.approx(0, abs=1e-9) for row in result.rows if row.measure == "compare.row_kl")


def test_models_without_a_common_tokenizer_are_compared_by_their_weights():
    second = damaged("tiny llama", ("W_K shuffled", 1))
    second = loading.Loaded(second.model, None, "no tokenizer", second.info, second.kind)
    result = compared(model("tiny llama"), second, length=16)
    assert named(result, "compare.form_change") == of_layer(result, 1, HEAD)
    assert "receive different inputs for the same windows" in result.notes[0]


def test_models_of_other_shapes_are_compared_by_their_distributions():
    options = {"windows": 2, "length": 16, "analyzers": "symmetry"}
    result = attnlens.compare(model("demo"), model("tiny bert"), **options).comparison
    assert not result.rows
    assert not result.paired
    shifts = {shift.measure: shift for shift in result.shifts}
    assert shifts.keys() >= {"weights.symmetry", "tokens.share_key"}
    keys = shifts["tokens.share_key"]
    assert (keys.before.heads, keys.after.heads) == (32, 8)
    heads = attnlens.inspect(model("demo"), source="tokens", **options)
    values = torch.tensor([head.measures["tokens.share_key"].value for head in heads], dtype=torch.float64)
    expected = values.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64))
    assert keys.before.quartiles == pytest.approx(expected.tolist(), rel=1e-6)


@pytest.mark.usefixtures("without_layout")
def test_a_saved_swap_is_compared_under_its_own_kernel(tmp_path):
    options = {"windows": 6, "length": 32, "layers": [1]}
    save = options | loaded.BARE | {"heads": [0, 3], "save": tmp_path / "swapped"}
    swap = attnlens.swap_kernel("demo", kernels="rbf", **save).swap
    report = attnlens.compare("demo", tmp_path / "swapped", analyzers="symmetry", **options)
    result = report.comparison
    figure = report.plot()
    assert figure.texts[0].get_text() == title(report) == "demo → swapped"
    assert [axes.get_title("left")[:5] for axes in figure.axes if axes.get_title("left")] == ["where"], (
        "no measure changed, so there are no changes to draw by size"
    )
    assert result.outcome.loss.after == pytest.approx(swap.loss.after, rel=1e-5)
    assert result.outcome.kl == pytest.approx(swap.kl, rel=1e-4)
    assert named(result, "compare.own_kl") == {(1, 0), (1, 3)}
    assert relations(result) == {"identical"}
    other = rows(result, "tokens.share_key").values()
    assert all(row.delta is None and "requires the exponential kernel" in row.reason for row in other)


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> Path:
    """Write two reports with their windows: of the demo, and of the demo with a damaged head."""
    folder = tmp_path_factory.mktemp("reports")
    other, text = damaged("demo", ("W_K shuffled", 2)), folder / "text.txt"
    for part in (other.model, other.tokenizer):
        part.save_pretrained(folder / "other")
    text.write_text("In the beginning God created the heaven and the earth. " * 30 + "And God saw the light. " * 200)
    options = ["--text", text, "--windows", "4", "--length", "32", "--analyzer", "symmetry", "-q"]
    for name, source in (("a", "demo"), ("b", folder / "other")):
        files = ["--json", folder / f"{name}.json", "--windows-csv", folder / f"{name}.csv"]
        done = invoke("inspect", source, *options, *files)
        assert done.returncode == 0, done.stderr
    return folder


def test_reports_with_their_windows_give_the_changes_of_the_models(reports):
    of_reports = attnlens.compare(reports / "a.json", reports / "b.json")
    assert answers(of_reports)["Changed?"].startswith("The form M of 32 heads is not compared, because reports do not")
    both = of_reports.comparison
    text = str(reports / "text.txt")
    of_models = attnlens.compare("demo", reports / "other", text=text, **TWO | {"windows": 4})
    assert both.paired
    assert of_models.comparison.paired
    for name in ("tokens.share_key", "tokens.share_content"):
        for place, row in rows(both, name).items():
            other = rows(of_models.comparison, name)[place]
            assert row.delta == pytest.approx(other.delta, rel=1e-6, abs=1e-8)
            assert row.se == pytest.approx(other.se, rel=1e-5, abs=1e-8)
    rules = {"compare.own_kl": "max < 0.01", "change.tokens.share_key": "max < 10"}
    checks = attnlens.check(of_models, rules).checks
    assert [check.passed for check in checks] == [False, True]
    assert [(breach.layer, breach.head) for breach in checks[0].breaches] == [(2, HEAD)]
    mixed = attnlens.compare(reports / "a.json", reports / "other", text=text).comparison
    pairs = [(row.after, other.after) for row, other in zip(mixed.rows, both.rows, strict=True)]
    assert all(one == other or one == pytest.approx(other, rel=1e-6, abs=1e-9) for one, other in pairs)


def test_reports_without_their_windows_have_wider_errors_and_a_note(reports, tmp_path):
    paths = [tmp_path / f"{name}.json" for name in "ab"]
    for path in paths:
        path.write_text((reports / path.name).read_text())
    result = attnlens.compare(*paths).comparison
    paired = attnlens.compare(reports / "a.json", reports / "b.json").comparison
    assert not result.paired
    assert any("not paired" in note for note in result.notes)
    errors = [(row.se, rows(paired, row.measure)[row.layer, row.head].se) for row in result.rows if row.se]
    assert sum(wide > narrow for wide, narrow in errors) > 0.7 * len(errors)
    first, second = (attnlens.read_report(path).heads[17].measures["tokens.share_key"] for path in paths)
    row = rows(result, "tokens.share_key")[2, HEAD]
    assert abs(row.delta) > 1e-3
    assert (row.delta, row.se) == pytest.approx((second.value - first.value, (first.se**2 + second.se**2) ** 0.5))


def test_reports_that_do_not_fit_are_refused(reports, tmp_path):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    for name in ("b.csv", "b.json"):
        (tmp_path / name).write_text((reports / name).read_text())
    content = (reports / "a.json").read_text()
    a = json.loads(content)
    settings, file, alone = a["settings"], a["windows_file"], {"windows_file": None}

    def refuse(words: str, change: dict[str, Any], rows: str | None = None, other: Path = second, **more: Any) -> None:
        first.write_text(json.dumps(a | change))
        if rows is not None:
            (tmp_path / "a.csv").write_text(rows)
        refused(UsageError, lambda: attnlens.compare(first, other, **more), words)

    for field, value in (("seed", 7), ("windows", 5), ("length", 31), ("placement", "first")):
        refuse(f"settings.{field} differs", alone | {"settings": settings | {field: value}})
    texts = [settings["texts"][0] | {"windows": [0]}]
    refuse("different windows of the text", alone | {"settings": settings | {"texts": texts}})
    refuse("schema_version", {"schema_version": "9"})
    refuse("contains no heads", {"heads": []})
    refuse("does not match its hash in a.json", {}, "text,window,layer,head\n")
    for rows in ("text,window\nx,0\n", "text,window,layer,head\nx,bad,0,0\n", "text,window,layer,head\nx,0,7,7\n"):
        hashed = file | {"sha256": hashlib.sha256(rows.encode()).hexdigest()}
        refuse("does not contain the windows", {"windows_file": hashed}, rows)
    refuse("outside its folder", {"windows_file": file | {"name": "../../../etc/passwd"}})
    refuse("none.json", alone, other=tmp_path / "none.json")
    refuse("windows would be ignored", alone, windows=9)
    model = object()
    refused(UsageError, lambda: attnlens.compare(model, model), "Both sides are the same")
    itself = attnlens.compare(first, first).comparison
    assert itself.rows, "a report can be compared with itself"
    assert all(row.delta in (0, None) for row in itself.rows)
    assert attnlens.compare(first, second).comparison.rows, "the control"
    first.write_text(content.replace('"value": ', '"value": NaN, "old": ', 1))
    refused(UsageError, lambda: attnlens.compare(first, second), "not a report")


@pytest.mark.usefixtures("without_layout")
def test_the_program_writes_every_kind_of_file_and_refuses_with_exit_code_2(reports, tmp_path):
    files = {kind: tmp_path / f"c.{kind}" for kind in ("json", "csv", "html", "markdown")}
    files["figure"] = tmp_path / "c.png"
    sides = reports / "a.json", reports / "b.json"
    done = invoke("compare", *sides, *(part for kind, path in files.items() for part in (f"--{kind}", path)))
    assert done.returncode == 0, done.stderr
    assert "Which" in done.stdout, "the question is printed on two lines"
    assert all(path.stat().st_size for path in files.values())
    written = attnlens.read_report(files["json"]).comparison
    assert written.named == sum(row.named for row in written.rows)
    assert files["csv"].read_text().count("\n") == len(written.rows) + 1
    ended(invoke("compare", sides[0], "-"), "stdin")
    ended(invoke("compare", *sides, "--json", tmp_path / "no" / "x.json"), "does not exist")


def own_kl(first: loading.Loaded, second: loading.Loaded) -> torch.Tensor:
    """Compute KL(P ‖ P') of each head of the first layer, whose inputs are the same, by eager attention in float64."""
    probabilities = []
    for side in (first, second):
        model = copy.deepcopy(side.model).double()
        model.set_attn_implementation("eager")
        batches = texts.batches(first, texts.sample("tiny"), texts.Cut(sequences=2, tokens=32)).batches
        with torch.no_grad():
            parts = [model(**batch.inputs, output_attentions=True).attentions[0] for batch in batches]
        probabilities.append(torch.cat(parts).clamp(min=1e-12))
    p, q = probabilities
    return (p * (p / q).log()).sum(-1).mean((0, 2))


def interleaved(layers: tuple[int, ...], first: int) -> Callable[[Any], None]:
    """Put the rows of W_Q and W_K, for key heads from `first` on, into GPT-J's order for RoPE instead of LLaMA's."""

    def change(model: Any) -> None:
        for layer in layers:
            for role, head in (("query", 3 * first), ("key", first)):
                reorder_rows(interleave, role, heads=slice(head, None))(find_layers(model)[layer])

    return change


@pytest.mark.parametrize(("layers", "first"), [((0,), 1), pytest.param((0, 1), 0, marks=FULL)])
def test_a_lost_rope_permutation_changes_attention_but_not_the_form(layers, first):
    own = model("tiny llama")
    other = changed(own, interleaved(layers, first))
    result, weights = compared(own, other), compared(own, other, source="weights")
    heads = {(layer, head) for layer in layers for head in range(3 * first, 6)}
    assert {(head.layer, head.head) for head in result.heads if head.relation == "same form"} == heads
    assert max(row.delta for row in rows(result, "compare.form_change").values()) < 1e-6
    expected = own_kl(own, other)
    for (layer, head), row in rows(result, "compare.own_kl").items():
        assert layer > 0 or row.delta == pytest.approx(float(expected[head]), rel=1e-3, abs=1e-6)
        assert row.beyond_rounding is ((layer, head) in heads)
    notes = " ".join(result.notes)
    assert "gauge" not in notes
    assert "was a RoPE permutation lost?" in notes
    turned = f"W_Q and W_K of {len(heads)} heads have the same product M but different attention: the rotation"
    assert turned in notes
    assert turned in " ".join(weights.notes)


def test_a_gauge_keeps_attention_unless_biases_stay_behind():
    def scale_pairs(model: Any) -> None:
        """Scale both coordinates of each pair that RoPE rotates together, which commutes with the rotation."""
        attention = model.model.layers[0].self_attn
        scales = torch.linspace(0.5, 2, attention.head_dim // 2).repeat(2)
        for linear, heads, power in ((attention.q_proj, 6, 1), (attention.k_proj, 2, -1)):
            for tensor in linear.parameters():
                tensor.mul_((scales**power).repeat(heads).view(-1, *[1] * (tensor.ndim - 1)))

    def scale_without_biases(model: Any) -> None:
        weights = find_layers(model)[0].weights
        weights["query"].mul_(2)
        weights["key"].div_(2)

    own = model("tiny llama")
    notes = " ".join(compared(own, changed(own, scale_pairs)).notes)
    assert "6 heads changed only in gauge: their product M and attention changed only by rounding" in notes
    assert "different attention" not in notes
    own = model("tiny bert")
    other = changed(own, scale_without_biases)
    assert float(own_kl(own, other).min()) > 1e-3
    notes = " ".join(compared(own, other).notes)
    assert "W_Q and W_K of 4 heads have the same product M but different attention: biases" in notes
    assert "gauge" not in notes
    assert "gauge" not in " ".join(compared(own, other, source="weights").notes)


def test_an_ill_conditioned_change_of_basis_is_significant_but_too_small_to_matter():
    def change_basis(model: Any, amount: float = 0.0) -> None:
        attention = model.transformer.h[1].attn.c_attn
        d, width = attention.weight.shape[0] // 4, attention.weight.shape[0]
        generator = torch.Generator().manual_seed(0)
        left, right = (torch.linalg.qr(torch.randn(d, d, generator=generator).double())[0] for _ in range(2))
        basis = left @ torch.diag(torch.logspace(0, math.log10(70), d).double()) @ right
        for start, matrix in ((0, basis), (width, torch.linalg.inv(basis).T)):
            for tensor in attention.parameters():
                columns = tensor[..., start : start + d]
                columns.copy_((columns.double() @ matrix).to(tensor.dtype) * (1 + amount))

    own = model("tiny gpt2")
    result = compared(own, changed(own, change_basis), windows=4)
    change = rows(result, "compare.form_change")[1, 0]
    assert 0 < change.delta < change.smallest == 1e-3
    assert change.negligible
    assert result.named == 0
    assert relations(result) == {"identical", "same form"}
    assert [note.partition(":")[0] for note in result.notes] == ["W_Q and W_K of 1 head changed only in gauge"]
    result = compared(own, changed(own, lambda second: change_basis(second, 5e-5)))
    assert relations(result) == {"identical", "same form"}, "M is 0.01 % larger, W_Q and W_K are others"
    assert result.notes == [
        "W_Q and W_K of 1 head changed far more than their product M, as in a change of gauge: the changes in M and in "
        "attention are too small to matter."
    ]
    result = compared(own, changed(own, lambda second: change_basis(second, 0.005)), source="weights")
    assert (1, 0) in named(result, "compare.form_change"), "M is 1 % larger"


def test_a_small_training_step_changes_the_form_by_more_than_rounding_and_too_little_to_matter():
    def train(model: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        for layer in find_layers(model):
            for weight in (layer.weights["query"], layer.weights["key"]):
                noise = torch.randn(weight.shape, generator=generator)
                weight.add_(noise * weight.norm() * 3e-5 / weight.numel() ** 0.5)

    own = model("tiny bert")
    other = changed(own, train)
    report = attnlens.compare(own, other, **TWO)
    result = report.comparison
    for row in rows(result, "compare.form_change").values():
        assert 100 * row.rounding < row.delta < row.smallest
        assert row.negligible
    assert result.named == 0
    assert relations(result) == {"changed"}
    small = (
        "W_Q and W_K of 8 heads have a product M that changed by more than rounding explains, but by less than 0.001 "
        "of its norm (too small to matter)."
    )
    assert result.notes == [small]
    assert answers(report)["Changed?"] == "None of 8 heads changed measurably."
    assert answers(report)["Form M?"] == small
    assert "Which heads?" not in answers(report)
    assert all(check.passed for check in attnlens.check(report, GATE).checks)
    assert compared(own, other, source="weights").notes == [small]


@pytest.mark.parametrize("name", ["tiny gpt2", "tiny llama"])
def test_a_comparison_of_an_early_layer_finds_the_same_changes_without_later_blocks(name):
    own, other = damaged(name), damaged(name, ("gain doubled", 0))
    whole, early = (attnlens.compare(own, other, **SMALL, **chosen).comparison for chosen in ({}, {"layers": [0]}))
    assert 0 < len(early.blocks) < len(whole.blocks)
    paths = {block.path: block.change for block in whole.blocks}
    assert all(block.change == paths[block.path] for block in early.blocks)
    changes = {(row.layer, row.head, row.measure): (row.before, row.after, row.delta) for row in whole.rows}
    assert all(changes[row.layer, row.head, row.measure] == (row.before, row.after, row.delta) for row in early.rows)
    distances = [row for row in early.rows if row.measure == "compare.own_kl"]
    assert distances
    assert all(row.p is not None for row in distances)
    assert max(row.delta for row in distances) > 0


def test_rules_cover_the_blocks_of_a_comparison():
    report = attnlens.compare(model("tiny llama"), damaged("tiny llama", ("head zeroed", 1)), source="tokens", **TWO)
    blocks = report.comparison.blocks
    assert [block.change > 0.01 for block in blocks] == [False, True]
    both, first, last, median = (
        f"compare.blocks: {words}"
        for words in ("max < 0.01", "max < 0.01 @layers 0", "value < 0.01 @layers 1", "median < 9")
    )
    checks = attnlens.check(report, [both, first, last, median]).checks
    assert [check.passed for check in checks] == [False, True, False, True]
    assert checks[0].value == blocks[1].change
    assert [(breach.site, breach.layer, breach.head) for breach in checks[2].breaches] == [(blocks[1].path, 1, None)]
    assert f"block {blocks[1].path}: compare.blocks is" in describe_breach(checks[2], checks[2].breaches[0])
    with pytest.raises(UsageError, match="matches nothing: no block"):
        attnlens.check(report, ["compare.blocks: max < 0.01 @layers 7"])
    plain = attnlens.inspect("demo", source="weights", layers=[0], analyzers=["symmetry"])
    with pytest.raises(UsageError, match="matches nothing: only `attnlens compare` on text"):
        attnlens.check(plain, ["compare.blocks: max < 0.01"])


def test_a_lifted_sliding_window_is_the_heads_own_change():
    own = model("tiny mistral")
    assert own.model.config.sliding_window == 5
    other = changed(own, sliding_window=None)
    report, expected = attnlens.compare(own, other, **TWO), own_kl(own, other)
    result = report.comparison
    assert float(expected.min()) > 0.1
    for (layer, head), row in rows(result, "compare.own_kl").items():
        assert layer > 0 or row.delta == pytest.approx(float(expected[head]), rel=1e-3)
        assert row.beyond_rounding
    assert answers(report)["Changed?"] == f"{len(result.heads)} of {len(result.heads)} heads changed."
    cause = f"{len(result.heads)} heads attend differently to equal inputs although M is unchanged"
    assert answers(report)["Form M?"].startswith(cause)
    assert answers(report)["Same config?"] == "No: sliding_window 5 → none."
    assert answers(report)["Cause?"].startswith("Layers 0–1: a query sees ")


def test_a_scale_is_part_of_the_form():
    def halved(model: Any) -> None:
        for layer in find_layers(model):
            layer.weights["query"].div_(2)

    own = model("tiny gemma2")
    result = compared(own, changed(own, query_pre_attn_scalar=6), source="weights")
    assert all(row.delta == pytest.approx(1, rel=1e-5) for row in rows(result, "compare.form_change").values())
    assert relations(result) == {"changed"}
    assert result.tensors.differ == []
    assert [change.field for change in result.config] == ["query_pre_attn_scalar"]
    assert [cause.hypothesis for cause in result.diagnosis] == ["different scale"]
    result = compared(own, changed(own, halved, query_pre_attn_scalar=6))
    assert relations(result) == {"same form"}
    assert any(
        "changed only in gauge: their product M and attention changed only by rounding" in note for note in result.notes
    )
