"""Pytest plugin: the fixture `attention_report` creates reports, and `assert_attention` checks them against rules."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike, fspath
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from attnlens.records import Report


@pytest.fixture(scope="session")
def attention_report() -> Callable[..., Report]:
    """Return a function that inspects a model or reads a report; results for names and paths are cached."""
    cached: dict[str, Report] = {}

    def get_report(subject: object, **options: object) -> Report:
        if not isinstance(subject, str | PathLike):
            return _get_report(subject, options)
        name = repr((fspath(subject), sorted(options.items())))
        if name not in cached:
            cached[name] = _get_report(subject, options)
        return cached[name]

    return get_report


def assert_attention(
    model_or_report: object,
    rules: object,
    *,
    baseline: str | PathLike[str] | None = None,
    allow_partial: bool = False,
    **options: object,
) -> None:
    """Fail the test if a report breaks a rule or differs too much from its baseline.

    `model_or_report` is a report, the path of a report, or a model to inspect first.
    `rules`, `baseline` and `allow_partial` are those of `attnlens.check`, and `options` those of `attnlens.inspect`.
    Raise UsageError for invalid rules.
    """
    __tracebackhide__ = True
    import attnlens
    from attnlens.report.sections.checked import describe_check

    report = _get_report(model_or_report, options, rules if baseline is None else None)
    judged = attnlens.check(report, rules, baseline=baseline, allow_partial=allow_partial)
    failed = [describe_check(check, judged.model.layer_name) for check in judged.checks if not check.passed]
    if failed:
        raise AssertionError("\n".join([f"{len(failed)} of {len(judged.checks)} rules failed:", *failed]))


@pytest.fixture(name="assert_attention", scope="session")
def _assertion_fixture() -> Callable[..., None]:
    """Return `assert_attention`, for tests that request it as a fixture instead of importing it."""
    return assert_attention


def _get_report(subject: object, options: dict[str, object], rules: object = None) -> Report:
    """Return `subject` if it is a report, or read the report at this path, or inspect the model.

    Unless `options` name analyzers, a model is inspected with those that `rules` need.
    """
    import attnlens
    from attnlens.arguments import names_report
    from attnlens.checks.judging import choose_options
    from attnlens.checks.rule import parse_rules
    from attnlens.records import Report
    from attnlens.report.report import read_report

    if isinstance(subject, Report):
        return subject
    if isinstance(subject, str | PathLike) and names_report(fspath(subject)):
        return read_report(fspath(subject))
    required = {} if rules is None or "analyzers" in options else choose_options(parse_rules(rules), None)
    inspect: Callable[..., Report] = attnlens.inspect  # untyped, because it checks its arguments
    return inspect(subject, **(required | options))
