"""Tests that no word or file, at random, ends outside the family of errors; ATTNLENS_FUZZ multiplies the cases."""

import json
import os

import pytest
import views
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reports import synthetic_report
from swap_reports import planned

from attnlens import arguments, requests
from attnlens.cli.commands import app
from attnlens.cli.parameters import defaults, kinds
from attnlens.errors import AttnlensError
from attnlens.kernels import FILTERS, TIES, kernels, parsed
from attnlens.records import read_plan
from attnlens.report.report import Report, read_report
from attnlens.runs.swap.pipeline import swap_kernel
from attnlens.runs.swap.saved import load_swapped

fuzzed = settings(
    max_examples=40 * int(os.environ.get("ATTNLENS_FUZZ", "1")), deadline=None, database=None,
    derandomize="ATTNLENS_FUZZ" not in os.environ,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
PIECES = [*kernels(), *TIES, *FILTERS, "gamma", "degree", "rank", *":=+,-.10", "1e400", "nan"]
WORDS = st.text(max_size=60) | st.lists(st.sampled_from(PIECES), max_size=9).map("".join)
LONG = st.sampled_from(["9" * 6000, "0-" + "9" * 6000])
NUMBERS = st.text(max_size=30) | st.text("0123456789-,. x²", max_size=30) | LONG
EXTREMES = st.sampled_from([None, True, False, 10**4000, -1, 2**63, 1e308, -1e308, 5e-324, 0.0])
VALUES = st.recursive(
    EXTREMES | st.text(max_size=20) | st.integers() | st.floats(),
    lambda deeper: st.lists(deeper, max_size=3) | st.dictionaries(st.text(max_size=8), deeper, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(["layers", "tokens", "json", "no-pack", "text", "lr", "[tool.attnlens]"])
PAIRS = st.tuples(KEYS, VALUES).map(lambda pair: f"{pair[0]} = {json.dumps(pair[1])[:5000]}")
LINES = st.lists(st.text(max_size=40) | PAIRS | st.just("a = " + "[" * 5000), max_size=4)
NEVER = {"json", "text", "trust_remote_code", "allow_pickle", "save", "model"}
REPORT, PLANNED = synthetic_report(2, 2), planned()


def attempt(call, *arguments, **options):
    """The result, or None if the call refuses."""
    try:
        return call(*arguments, **options)
    except AttnlensError:
        return None


def alter(document, draw):
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


@fuzzed
@given(WORDS, st.booleans(), NUMBERS, VALUES)
def test_arguments_are_read_or_refused(words, signed, numbers, value):
    kernel = attempt(parsed, words, allow_signed=signed)
    assert kernel is None or parsed(kernel.spelling, allow_signed=signed).spelling == kernel.spelling
    attempt(arguments.listed_numbers, "layers", numbers)
    for read in (requests.head, arguments.selection_share, arguments.budget):
        attempt(read, numbers)
    attempt(requests.head, value)
    attempt(requests.numbers, "layers", value)
    attempt(requests.words, "text", value)
    attempt(requests.InspectRequest, length=value)


@fuzzed
@given(st.data())
def test_reports_and_plans_are_read_and_shown_or_refused(tmp_path, data):
    file = tmp_path / "r.json"
    file.write_text(alter(json.loads(data.draw(st.sampled_from([REPORT, PLANNED])).to_json()), data.draw))
    report = attempt(read_report, file)
    for show in (Report.to_json, repr, views.csv, views.markdown, views.summary, views.details):
        if report is not None:
            attempt(show, report)
    file.write_text(alter(json.loads(PLANNED.plan.to_json()), data.draw))
    plan = attempt(read_plan, file)
    assert plan is None or plan.within_budget in (True, False)


@pytest.fixture(scope="module")
def saved_swap(original, tmp_path_factory):
    """A folder that --save wrote, and its attnlens.json."""
    folder = tmp_path_factory.mktemp("swaps") / "saved"
    swap_kernel(str(original), "rbf", fit=True, heads=[1], save=folder, windows=2, length=8)
    return folder, (folder / "attnlens.json").read_text()


@fuzzed
@given(st.data())
def test_saved_swaps_are_loaded_or_refused(saved_swap, data):
    folder, facts = saved_swap
    (folder / "attnlens.json").write_text(alter(json.loads(facts), data.draw))
    if (swapped := attempt(load_swapped, folder)) is not None:
        swapped.close()


@fuzzed
@given(LINES)
def test_defaults_are_read_or_refused(tmp_path, lines):
    (tmp_path / "attnlens.toml").write_bytes("\n".join(lines).encode(errors="surrogatepass"))
    options = kinds(command.callback for command in app.registered_commands)
    assert not NEVER & set(attempt(defaults, tmp_path, options) or {})
