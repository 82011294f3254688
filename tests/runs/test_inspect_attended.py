"""Tests that `--show attention` keeps each query's largest weights, and refuses what a report can't hold."""

from __future__ import annotations

import pytest
from program import attnlens, refused, without_torch

import attnlens as library
from attnlens.errors import UsageError
from attnlens.models import loading
from attnlens.records import AttentionRows
from attnlens.report.report import Report, read_report
from attnlens.runs.inspect import sequences as attended


@pytest.fixture(scope="module")
def report(demo: loading.Loaded) -> Report:
    return library.inspect(demo, show="attention", analyzers="spectrum", heads=[1, 5], windows=1, length=40)


def test_rows_are_the_attention_that_the_measures_are_of(report: Report) -> None:
    assert [(rows.layer, rows.head) for rows in report.inspection.attention] == [
        (h.layer, h.head) for h in report.heads
    ]
    for rows, head in zip(report.inspection.attention, report.heads, strict=True):
        largest = [row[0] for row in rows.weights]
        assert len(largest) == 40
        assert sum(largest) / 40 == pytest.approx(head.measures["tokens.max_weight"].value, abs=1e-4)
        sums = [sum(row) + rest for row, rest in zip(rows.weights, rows.rest, strict=True)]
        assert sums == pytest.approx([1] * 40, abs=1e-3)


def test_a_row_holds_the_largest_weights_first_and_no_later_token(report: Report) -> None:
    for rows in report.inspection.attention:
        for query, (keys, weights) in enumerate(zip(rows.keys, rows.weights, strict=True)):
            assert max(keys) <= query, "demo is causal"
            assert weights == sorted(weights, reverse=True)
            assert len(keys) == len(weights) == len(set(keys)) <= attended.MOST_WEIGHTS
            assert weights[-1] >= attended.LEAST


def test_the_tokens_stand_beside_the_rows(report: Report, demo: loading.Loaded) -> None:
    (words,) = {tuple(rows.sentence.keys) for rows in report.inspection.attention if rows.sentence}
    assert len(words) == 40
    assert report.inspection.attention[0].sentence is not None
    assert report.inspection.attention[0].sentence.queries is None
    assert library.inspect(demo, heads=[1], layers=[0], windows=1, length=16).inspection.attention == [], (
        "only where asked"
    )


@pytest.mark.parametrize(
    ("field", "wrong", "said"),
    [
        ("rest", [0.0], "different numbers of queries"),
        ("weights", [[1.0], [0.5]], "different numbers of keys and weights"),
        ("keys", [[0], [9, 0]], "do not match the rows"),
        ("sentence", {"sequence": 0, "keys": ["a"]}, "do not match the rows"),
    ],
)
def test_rows_of_strangers_are_of_one_size(field: str, wrong: object, said: str) -> None:
    rows = {"keys": [[0], [1, 0]], "weights": [[1.0], [0.6, 0.4]], "rest": [0.0, 0.0]}
    place = {"site": "s", "layer": 0, "head": 0, "kv_head": 0, "part": "decoder", "sequence": 0}
    good = {**place, **rows, "sentence": {"sequence": 0, "keys": ["a", "b"]}}
    assert AttentionRows.model_validate(good).rest == [0.0, 0.0], "the control"
    with pytest.raises(ValueError, match=said):
        AttentionRows.model_validate(good | {field: wrong})


def test_more_rows_than_a_report_keeps_are_refused_before_the_work(monkeypatch, demo: loading.Loaded) -> None:
    monkeypatch.setattr(attended, "MOST_ROWS", 100)
    with pytest.raises(UsageError, match=r"keeps at most 100 rows \(heads × queries\), but these heads have 512"):
        library.inspect(demo, show="attention", windows=1, length=16)
    monkeypatch.setattr(attended, "MOST_TOKENS", 8)
    with pytest.raises(UsageError, match="at most 8 tokens, but these have 16"):
        library.inspect(demo, show="attention", windows=1, length=16)


def test_the_command_writes_rows_and_draws_them(tmp_path) -> None:
    few = ("--layers", "0", "--windows", "2", "--length", "16", "--no-progress", "-q")
    result = attnlens(
        "inspect", "demo", "--show", "attention", *few, "--json", "r.json", "--html", "r.html", cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    assert len(read_report(tmp_path / "r.json").inspection.attention) == 8
    assert '"attention":{"0.0":{"queries":["' in (tmp_path / "r.html").read_text()
    refused(without_torch("inspect", "demo", "--show", "attention", "--source", "weights"), "weights no text is read")
    refused(without_torch("inspect", "demo", "--show", "selection"), "requires a single head")
