"""Tests of the values that records derive from their fields, and of fields that they refuse."""

import json
import math

import pytest
import torch
from pydantic import ValidationError
from reports import synthetic_report

from attnlens import records
from attnlens.checks.judging import build_baseline
from attnlens.records import Call, Coverage, Head, HeadChange, Measure, Null, Site, Text
from attnlens.records.comparison import heads_with_changes
from attnlens.records.provenance import convert_plan

SITE = Site("attention", 0, 0, "decoder")
PLACE = {"site": "s", "layer": 0, "kv_head": 0, "part": "decoder"}


def test_a_measure_has_a_value_or_a_reason_and_its_distance_from_chance():
    assert Measure(value=5.0, null=Null(mean=1.0, sd=2.0)).z == 2.0
    for wrong in ({"value": None}, {"value": 1.0, "reason": "gone"}):
        with pytest.raises(ValidationError, match="either a value or a reason"):
            Measure(**wrong)
    head = Head(**PLACE, head=0, measures={"kind": Measure(value=1.0, label="flat"), "norm": Measure(value=2.0)})
    assert (head.cells()["kind"], head.cells()["norm"]) == ("flat", 2.0)


def test_rows_of_windows_leave_out_missing_values():
    units, values = [{"head": 0}, {"head": 1}], {"norm": torch.tensor([[1.0, math.nan]])}
    rows = [*records.Windows([("a", 3)], units, values).rows()]
    assert rows == [{"text": "a", "window": 3, "head": 0, "norm": 1.0}, {"text": "a", "window": 3, "head": 1}]


def test_a_run_that_lacks_a_source_is_incomplete_and_texts_are_told_apart_by_their_content():
    assert Coverage(sites=1, heads=2, analysed=2).complete
    assert not Coverage(sites=1, heads=2, analysed=2, without={"tokens": 2}).complete
    first, second = (Text.of([Text(name="a", sha256=digest), Text(name="b", sha256="0")]) for digest in "12")
    assert (first.name, first.sha256 != second.sha256) == ("a + b", True)


def test_heads_of_a_comparison_have_the_values_of_their_partners():
    heads = [Head(**PLACE, head=head, measures={"norm": Measure(value=head)}) for head in (0, 1)]
    pairs = [HeadChange(**PLACE, head=head, partner=1 - head) for head in (0, 1)]
    compared = heads_with_changes(records.Comparison.model_construct(rows=[], heads=pairs), heads)
    assert [head.measures["norm"].value for head in compared] == [1, 0]


def test_columns_of_a_baseline_are_as_long_as_its_heads():
    baseline = build_baseline(synthetic_report(1, 2))
    for column in ("values", "errors"):
        document = json.loads(baseline.to_json())
        document["measures"]["tokens.entropy"][column].pop()
        with pytest.raises(ValidationError, match="must have one entry per head"):
            records.Baseline.model_validate(document)


def test_the_first_look_with_the_least_loss_is_tested():
    run = records.StudyRun.model_construct(losses=[3.0, 1.0, 2.0])
    assert records.StudyCell.model_construct(runs=[run]).tested_evaluation == 1


def test_the_promise_of_a_plan_of_version_1_becomes_its_estimate():
    plan = convert_plan({"promised": {"share": 0.01}})
    assert (plan["estimated"], plan["promised"], [*plan["reasons"]]) == ({"share": 0.01}, None, ["promised"])


def test_query_heads_of_a_group_keep_their_key_head_and_keys_their_values():
    query, key, value = torch.randn(1, 4, 3, 2), torch.randn(1, 2, 5, 2), torch.randn(1, 2, 5, 2)
    call = Call(query, key, value, scale=1.0)
    assert call.key_heads == call.query_key(SITE).key_of == (0, 0, 1, 1)
    assert torch.equal(call.paired_key, key[:, [0, 0, 1, 1]])
    selected = call.select([1, 2])
    assert (selected.key_heads, torch.equal(selected.key, key)) == ((0, 1), True)
    part = call.sequences([0], slice(0, 1), slice(1, 4))
    assert torch.equal(part.query, query[:, :, :1])
    assert torch.equal(part.value, value[:, :, 1:4])
    capped = torch.tanh(call.query_key(SITE).logits / 2) * 2
    torch.testing.assert_close(Call(query, key, value, scale=1.0, softcap=2.0).query_key(SITE).logits, capped)
