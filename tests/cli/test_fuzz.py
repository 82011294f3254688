"""Tests that no word or file, at random, ends outside the family of errors: words, plans, reports, swaps, TOML.

ATTNLENS_FUZZ multiplies how many cases are tried; a few hundred in CI.
"""

import json
import os
from pathlib import Path

import pytest
import views
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reports import synthetic_report
from swap_reports import planned

from attnlens import requests
from attnlens.arguments import budget, listed_numbers, selection_share
from attnlens.cli.commands import app
from attnlens.cli.parameters import defaults, kinds
from attnlens.errors import AttnlensError
from attnlens.kernels import FILTERS, TIES, kernels, parsed
from attnlens.records import read_plan
from attnlens.report.report import Report, read_report
from attnlens.runs.swap.pipeline import swap_kernel
from attnlens.runs.swap.saved import load_swapped

CASES = 150 * int(os.environ.get("ATTNLENS_FUZZ", "1"))
fuzzed = settings(
    max_examples=CASES,
    deadline=None,
    database=None,
    derandomize="ATTNLENS_FUZZ" not in os.environ,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

PIECES = [
    *kernels(),
    *TIES,
    *FILTERS,
    "gamma",
    "degree",
    "rank",
    ":",
    "=",
    "+",
    ",",
    "-",
    ".",
    "1",
    "0",
    "1e400",
    "nan",
]
WORDS = st.one_of(st.text(max_size=60), st.lists(st.sampled_from(PIECES), max_size=9).map("".join))
NUMBERS = st.one_of(
    st.text(max_size=30), st.text("0123456789-,. x²", max_size=30), st.just("9" * 6000), st.just("0-" + "9" * 6000)
)
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.text(max_size=20),
        st.integers(),
        st.sampled_from([10**4000, -1, 2**63, 1e308, -1e308, 5e-324, 0.0]),
        st.floats(),
    ),
    lambda deeper: st.lists(deeper, max_size=3) | st.dictionaries(st.text(max_size=8), deeper, max_size=3),
    max_leaves=6,
)


def family(call):
    """What it gives, or None where it refuses."""
    try:
        return call()
    except AttnlensError:
        return None


@fuzzed
@given(WORDS, st.booleans())
def test_kernels_are_spelled_or_refused(words, signed):
    kernel = family(lambda: parsed(words, allow_signed=signed))
    if kernel is not None:
        assert parsed(kernel.spelling, allow_signed=signed).spelling == kernel.spelling


@fuzzed
@given(NUMBERS)
def test_lists_of_layers_and_heads_are_read_or_refused(words):
    family(lambda: listed_numbers("layers", words))
    family(lambda: requests.head(words))
    family(lambda: selection_share(words))
    family(lambda: budget(words))


@fuzzed
@given(VALUES)
def test_arguments_from_python_are_read_or_refused(given_):
    family(lambda: requests.numbers("layers", given_))
    family(lambda: requests.head(given_))
    family(lambda: requests.words("text", given_))
    family(lambda: requests.InspectRequest(length=given_))


def altered(document, draw):
    """The document with one to three of its parts exchanged for anything."""
    for _ in range(draw(st.integers(1, 3))):
        place = document
        while isinstance(place, dict | list) and place:
            key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
            if draw(st.integers(0, 3)) == 0 or not isinstance(place[key], dict | list):
                place[key] = draw(VALUES)
                break
            place = place[key]
    return json.dumps(document)


REPORT, PLANNED = synthetic_report(2, 2), planned()


@fuzzed
@given(st.data())
def test_reports_are_read_and_shown_or_refused(tmp_path, data):
    file = tmp_path / "r.json"
    source = data.draw(st.sampled_from([REPORT, PLANNED]))
    file.write_text(altered(json.loads(source.to_json()), data.draw))
    report = family(lambda: read_report(file))
    if report is not None:
        for show in (Report.to_json, repr, views.csv, views.markdown, views.summary, views.details):
            family(lambda show=show: show(report))


@fuzzed
@given(st.data())
def test_plans_are_read_or_refused(tmp_path, data):
    file = tmp_path / "p.json"
    file.write_text(altered(json.loads(PLANNED.plan.to_json()), data.draw))
    plan = family(lambda: read_plan(file))
    if plan is not None:
        assert plan.within_budget in (True, False)


@pytest.fixture(scope="module")
def saved_swap(original, tmp_path_factory):
    """A folder that --save wrote, and what its attnlens.json says."""
    folder = tmp_path_factory.mktemp("swaps") / "saved"
    swap_kernel(str(original), "rbf", fit=True, heads=[1], save=folder, windows=2, length=8)
    return folder, (folder / "attnlens.json").read_text()


@fuzzed
@given(st.data())
def test_saved_swaps_are_loaded_or_refused(saved_swap, data):
    folder, facts = saved_swap
    (folder / "attnlens.json").write_text(altered(json.loads(facts), data.draw))
    swapped = family(lambda: load_swapped(folder))
    if swapped is not None:
        swapped.close()


@pytest.fixture(scope="module")
def known():
    return kinds(command.callback for command in app.registered_commands)


LINES = st.lists(
    st.one_of(
        st.text(max_size=40),
        st.tuples(
            st.sampled_from(["layers", "tokens", "json", "no-pack", "text", "lr", "[tool.attnlens]"]), VALUES
        ).map(lambda pair: f"{pair[0]} = {json.dumps(pair[1])[:5000]}"),
        st.just("a = " + "[" * 5000),
    ),
    max_size=4,
)
NEVER = {"json", "text", "trust_remote_code", "allow_pickle", "save", "model"}


@fuzzed
@given(LINES)
def test_defaults_are_read_or_refused(tmp_path, known, lines):
    Path(tmp_path / "attnlens.toml").write_bytes("\n".join(lines).encode(errors="surrogatepass"))
    found = family(lambda: defaults(tmp_path, known))
    assert not NEVER & set(found or {})
