"""Tests that rules mean what is written, that what can't be read is refused in words, and that nothing is run."""

from __future__ import annotations

import ast
import functools
import math
import os
import string
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reports import planted, synthetic_report

import attnlens
from attnlens.checks.judging import largest_rejected
from attnlens.checks.rule import parse_condition, parse_rule, read_rules
from attnlens.errors import UsageError
from attnlens.maths.statistics import false_discovery

GRID = np.array([[0.1, 0.2, 0.3], [0.4, np.nan, 0.9]])
"""Values of the heads of two layers; one has none."""


def outcome(rule: str, report=None):
    """Return the check of one rule, on a measure `weights.planted` that is GRID unless a report is given."""
    (check,) = attnlens.check(report or planted(GRID), [rule]).checks
    return check


AGGREGATES = [
    *(("min > 0.05", 0.1, True), ("min > 0.1", 0.1, False), ("min >= 0.1", 0.1, True)),
    *(("max < 0.9", 0.9, False), ("max <= 0.9", 0.9, True), ("mean in 0.37..0.39", 0.38, True)),
    *(("median == 0.3", 0.3, True), ("median != 0.3", 0.3, False)),
    *(("q25 <= 0.2", 0.2, True), ("q97.5 > 0.85", 0.85, False)),
    *(("share(> 0.25) < 0.7", 0.6, True), ("share(in 0.1..0.2) == 0.4", 0.4, True)),
    *(("count == 5", 5, True), ("count == 6", 5, False)),
    *(("max < 0.5 @layers 0", 0.3, True), ("max < 0.5 @layers 0-1 @heads 0,1", 0.4, True)),
    *(("max < 0.5 @part encoder", 0.9, False), ("value in 0..1", None, True), ("value < 0.4", None, False)),
]


def test_an_aggregate_is_compared_as_it_is_written_and_heads_without_a_value_are_counted():
    for wanted, value, passed in AGGREGATES:
        check = outcome(f"weights.planted: {wanted}")
        assert check.value == (None if value is None else pytest.approx(value)), wanted
        assert (check.passed, check.subject) == (passed, "weights.planted"), wanted
    assert [outcome(f"weights.planted: count == 5{heads}").without for heads in ("", " @layers 0")] == [1, 0]


@settings(deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.integers(0, 100))
def test_quantiles_are_those_of_numpy(numbers, percent):
    check = outcome(f"weights.planted: q{percent:02} in -1e9..1e9", planted(np.array([numbers])))
    assert check.value == pytest.approx(np.quantile(numbers, percent / 100), rel=1e-9, abs=1e-9)


BLAMED = {
    "max < 0.35": [(1, 2, 0.9), (1, 0, 0.4)],
    "min > 0.15": [(0, 0, 0.1)],
    "value in 0.2..0.4": [(1, 2, 0.9), (0, 0, 0.1)],
    "share(> 0.25) < 0.5": [(1, 2, 0.9), (1, 0, 0.4), (0, 2, 0.3)],
    "share(> 0.25) > 0.9": [(0, 0, 0.1), (0, 1, 0.2)],
    "min in 0.2..0.3": [(0, 0, 0.1)],
    "max in 0.1..0.5": [(1, 2, 0.9)],
    # no single head makes the smallest too large
    **{rule: [] for rule in ("median > 0.5", "min < 0.05", "max > 2", "min in 0.01..0.05", "max in 0.95..1")},
}


def test_the_heads_that_are_to_blame_are_named_worst_first():
    for rule, heads in BLAMED.items():
        breaches = outcome(f"weights.planted: {rule}").breaches
        assert [(one.layer, one.head, one.value) for one in breaches] == heads, rule


def test_columns_paths_and_bars():
    report = synthetic_report(3, 4)
    errors = [head.measures["tokens.entropy"].se for head in report.heads]
    scores = [head.measures["weights.symmetry"].z for head in report.heads]
    assert outcome("tokens.entropy.se: max < 9", report).value == max(errors)
    assert outcome("|weights.symmetry.z|: min > -1", report).value == min(map(abs, scores))
    assert outcome("weights.symmetry.null: min > -1", report).value == pytest.approx(1 / 768)
    assert outcome("summary.identity_error: value < 1e-6", report).value == 3.2e-7
    assert outcome("model.parameters: value == 109514298", report).passed
    assert outcome("coverage.heads: value != 12", report).passed is False
    assert outcome("summary.layer_symmetry.0: value > 0.5", report).passed
    assert outcome("summary.median_errors.tokens.entropy: value >= 0", report).passed, "a key may hold dots"


UNMATCHED = {
    "Did you mean 'tokens.entropy'": ["tokens.entropi: min > 0"],
    "no selection.svm_cosine, because this report was made with other analyzers": ["selection.svm_cosine: min > 0"],
    "swap.loss.delta": ["swap.loss.delta: value < 1"],
    "is not a number": ["model.id: value == 1"],
    "is a single number": ["model.parameters: min > 1", "model.parameters: value > 1 @layers 0"],
    "no head of this report matches": ["tokens.entropy: min > 0 @layers 70", "tokens.entropy: min > 0 @part cross"],
    "have no base": ["tokens.entropy.base: min > 0"],
    "is a curve": ["weights.singular_values: min > 0"],
    "matches nothing": [
        *(f"summary.{name}: value == 0" for name in ("__class__", "model_fields")),
        *(f"model.{name}: value == 0" for name in ("to_json", "__class__.__init__")),
        *("heads.0.layer: value == 0", "swap.__dict__: value == 0"),
    ],
}
SENSELESS = {
    "write the aggregate first": ["", "min", "> 0.5", "__import__('os').system('true') > 0"],
    "unknown aggregate 'least'": ["least > 0.5"],
    "unknown aggregate 'q101'": ["q101 > 0.5"],
    "is not a comparison": ["min > x", "min => 1", "min > 0.5 and max < 1", "min > nan", "min > inf", "min in 1"],
    " is not a comparison": ["share() > 0.5"],
    "numbers must be finite": ["min > 1e999"],
    "reversed": ["min in 1..0", "min > 0 @layers 3-1"],
    "in brackets": ["share > 0.5", "min(> 1) > 0.5"],
    "not a list of numbers": ["min > 0 @layers", "min > 0 @layers 0-99999"],
    "twice": ["min > 0 @layers 0 @layers 1"],
    "write @layers or @heads": ["min > 0 @part nowhere", "min > 0 @model x"],
    "at most 200": ["min > " + "9" * 300],
}
DEEP = functools.reduce(lambda table, _: {"a": table}, range(2000), {"b": "min > 0"})
NO_RULES = {
    "contains no rules": [{}, [], 5],
    "must be a condition": [{"tokens.entropy": []}, {"tokens.entropy": 0.5}],
    "a condition must be a string": [{"tokens.entropy": [0.5]}],
    "does not name a measure": [{"": "min > 0"}, {"||": "min > 0"}],
    "lacks a colon": ["tokens.entropy min > 0"],
    "matches nothing": [["x: min > 0"] * 2000],
    "can't be read": ["nowhere.toml"],
    "nested more than 50 levels deep": [DEEP],
}


@pytest.mark.parametrize(
    ("table", "call"),
    [
        (UNMATCHED, lambda rule: outcome(rule, synthetic_report(2, 2))),
        (SENSELESS, parse_condition),
        (NO_RULES, lambda rules: attnlens.check(synthetic_report(1, 2), rules)),
    ],
    ids=["unmatched", "senseless", "no rules"],
)
def test_rules_that_match_nothing_or_make_no_sense_are_refused_in_words(table, call):
    for words, rule in ((words, rule) for words, rules in table.items() for rule in rules):
        with pytest.raises(UsageError) as refusal:
            call(rule)
        message = str(refusal.value)
        assert words in message, rule
        assert table is not UNMATCHED or "matches nothing" in message or "is a single number" in message
        assert table is not SENSELESS or len(message.splitlines()) == 2
        assert table is UNMATCHED or words in refusal.value.problem
    with pytest.raises(UsageError, match=r"--rule 'model\.parameters: value > 1'$"):
        outcome("model.parameters: max > 1 @layers 0", synthetic_report(2, 2))
    with pytest.raises(UsageError, match="because gone"):
        outcome("weights.planted: min > 0", planted(np.full((1, 2), np.nan)))


FUZZ = int(os.environ.get("ATTNLENS_FUZZ", "1"))
"""Multiplies the cases, as in tests/cli/test_fuzz.py."""
WORDS = ["..", "==", ">=", "in", "min", "q05", "share", "value", "layers", "part", "0.5", "1e9", "decoder", " "]
WORDS = st.sampled_from([*"<>=!@().,|-+", *WORDS])


def refused(call):
    """What the call returns; None where it raises our error, in two lines."""
    try:
        return call()
    except UsageError as error:
        message = str(error)
    assert len(message.splitlines()) == 2
    return None


@settings(max_examples=80 * FUZZ, deadline=None)
@given(st.one_of(st.text(), st.lists(WORDS).map("".join), st.lists(WORDS).map(" ".join)))
@example("share(" * 50)
@example("min > 1\n")
@example("min > ٣")
def test_any_text_is_a_condition_or_our_error(text):
    read = refused(lambda: parse_condition(text))
    if read is not None:
        assert parse_condition(f"{read.measured} {read.comparison}{read.filters}").filters == read.filters
        assert math.isfinite(read.comparison.low)


@settings(max_examples=80 * FUZZ, deadline=None)
@given(st.text(), st.text(alphabet=string.printable))
def test_any_subject_is_found_or_our_error(subject, wanted):
    report = planted(GRID)
    for text in (f"{subject}: value > 0", f"{subject}:{wanted}", wanted):
        refused(lambda: attnlens.check(report, [text]))  # noqa: B023  # called at once


def test_no_rule_is_ever_executed():
    for path in Path(attnlens.checks.__path__[0]).glob("*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        assert not {ast.unparse(call.func) for call in calls} & {"eval", "exec", "compile", "__import__"}, path


def test_rejections_are_those_of_the_torch_version():
    random = np.random.default_rng(0)
    for size in (1, 7, 200):
        p = random.random(size) ** 4
        limit = largest_rejected(p.tolist(), 0.1)
        assert (p <= limit).tolist() == false_discovery(torch.from_numpy(p), 0.1).tolist()
    assert largest_rejected([], 0.1) < 0


TOML = """\
title = "not [check]"  # [check]
'x' = 1
[other]
"tokens.entropy" = ["min > 9"]

[check]   # rules
"tokens.entropy" = [
  "min > 0.05",  # "in a comment"

  'median in 0.4..0.9',
]
tokens.max_weight = "max < 1"
"a#b=[" = ["value < 1", "value > 0"]

[check.weights]
symmetry = [\"\"\"min > -1\"\"\",
  "max < 1"]
"""


def test_rules_are_those_of_the_table_whatever_its_toml(tmp_path):
    (tmp_path / "x.toml").write_text(TOML)
    rules = read_rules(tmp_path / "x.toml")
    assert {rule.place for rule in rules} == {f"{tmp_path / 'x.toml'}: "}
    assert [(rule.subject, rule.wanted) for rule in rules] == [
        *(("tokens.entropy", "min > 0.05"), ("tokens.entropy", "median in 0.4..0.9")),
        *(("tokens.max_weight", "max < 1"), ("a#b=[", "value < 1"), ("a#b=[", "value > 0")),
        *(("weights.symmetry", "min > -1"), ("weights.symmetry", "max < 1")),
    ]
    (tmp_path / "y.toml").write_bytes(b'check = { "tokens.entropy" = ["min > 0"] }\r\n')
    (rule,) = read_rules(tmp_path / "y.toml")
    assert (rule.subject, rule.wanted) == ("tokens.entropy", "min > 0")


def test_an_id_outlives_the_numbers_of_its_rule():
    assert parse_rule("a: min > 0.05").id == parse_rule("a: min>0.1").id
    ids = {parse_rule(f"a: {text}").id for text in ("min > 1", "max > 1", "min < 1", "min > 1 @layers 0", "q05 > 1")}
    assert len(ids) == 5
    twice = attnlens.check(planted(GRID), ["weights.planted: min > 0", "weights.planted: min > 0.01"]).checks
    assert twice[0].id != twice[1].id
