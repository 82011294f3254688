"""Tests of the kinds of reports, of reports of version 1, and of the shipped JSON Schema."""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import map_schema
import pytest
from experiment_reports import experiment_report, golden
from reports import synthetic_report
from swap_reports import planned, several

from attnlens.errors import UsageError
from attnlens.records import Plan, json_schema, read_baseline, read_plan
from attnlens.report.report import Report, read_report

OLD = Path(__file__).parents[1] / "data" / "version1"
"""Files that attnlens wrote before version 2, one of each kind, shortened."""
NAMES = ("inspection", "swap", "swap-budget", "comparison", "doctor", "experiments", "studies")
READ = {**dict.fromkeys(NAMES, read_report), "plan": read_plan, "baseline": read_baseline}
KINDS = {name: name.partition("-")[0] for name in NAMES}


def old(name: str) -> dict[str, Any]:
    return json.loads((OLD / f"{name}.json").read_text())


def test_the_files_of_version_1_are_of_every_kind() -> None:
    assert {f"{name}.json" for name in READ} == {path.name for path in OLD.iterdir()}
    assert set(KINDS.values()) == {each["properties"]["kind"]["const"] for each in json.loads(json_schema())["oneOf"]}


@pytest.mark.parametrize("name", READ)
def test_a_file_of_version_1_has_the_same_values_in_version_2(name: str, tmp_path: Path) -> None:
    record = READ[name](OLD / f"{name}.json")
    written = json.loads(record.to_json())
    assert map_schema.differences(old(name), written) == []
    assert written["schema_version"] == "2"
    assert not {"sequences", "tokens", "sequences_asked"} & written["settings"].keys()
    (tmp_path / "r.json").write_text(record.to_json())
    assert READ[name](tmp_path / "r.json") == record
    if kind := KINDS.get(name):
        assert record.kind == kind
        assert {kind} == written.keys() & set(KINDS.values()), "the body of its kind only"


def test_a_swap_of_several_kernels_names_all_in_their_order() -> None:
    report, document = read_report(OLD / "swap.json"), old("swap")
    expected = [swap["kernel"] for swap in (document["swap"], *document["more_swaps"])]
    assert [swap.kernel for swap in report.swaps] == expected
    written = json.loads(report.to_json())["swap"]
    assert [written["kernel"], *(swap["kernel"] for swap in written["others"])] == expected
    assert report.plan is None
    assert read_report(OLD / "swap-budget.json").plan == Plan.model_validate(old("swap-budget")["plan"])


def test_the_comparison_with_version_2_notices_a_changed_number() -> None:
    written = json.loads(read_report(OLD / "swap.json").to_json())
    written["swap"]["others"][0]["kl"] += 1e-9
    written["settings"]["windows"] += 1
    del written["swap"]["loss"]["delta"]
    paths = [line.partition(":")[0] for line in map_schema.differences(old("swap"), written)]
    assert sorted(paths) == ["settings.windows", "swap.loss.delta", "swap.others.0.kl"]


def test_an_unknown_version_is_refused_by_its_name(tmp_path: Path) -> None:
    versions = ["0", "3", "", None, 1, 2, ["1"], {"1": 1}, "1" * 500]
    for version, name in product(versions, ["inspection", "baseline", "plan"]):
        (tmp_path / "r.json").write_text(json.dumps(old(name) | {"schema_version": version}))
        with pytest.raises(UsageError, match=r"has schema_version .*; this version of attnlens reads '1' and '2'"):
            READ[name](tmp_path / "r.json")


VALUES: list[object] = [None, 0, "x", True, 1e308, "swap", [0], [], {"settings": 1}, {}, [[]]]


@pytest.mark.parametrize("values", [VALUES[::2], pytest.param(VALUES[1::2], marks=pytest.mark.full)])
@pytest.mark.parametrize("name", READ)
def test_a_hostile_file_of_version_1_is_read_or_refused(name: str, values: list[object], tmp_path: Path) -> None:
    """Each field of the file, one after the other, has a value of another type."""
    document = old(name)
    fields = [*document, "promised", "reasons", "more_swaps", "plan", "selections", "swap", "experiments"]
    for field, value in product(dict.fromkeys(fields), values):
        (tmp_path / "r.json").write_text(json.dumps(document | {field: value}))
        with suppress(UsageError):
            READ[name](tmp_path / "r.json")


def test_a_report_without_exactly_the_body_of_its_kind_is_refused(tmp_path: Path) -> None:
    plain, swap = json.loads(synthetic_report(1, 1).to_json()), json.loads(several().to_json())["swap"]
    experiments = {"experiments": old("experiments")["experiments"]}
    for document, message in (
        (old("swap") | experiments, "a report of kind swap must not have the field experiments"),
        (plain | {"kind": "swap"}, "a report of kind swap needs the field swap"),
        (plain | {"kind": "ranks"}, "its kind is 'ranks'"),
        (plain | {"kind": None}, "kind: Input should be 'inspection'"),
        (plain | {"swap": swap}, "a report of kind inspection must not have the field swap"),
    ):
        (tmp_path / "r.json").write_text(json.dumps(document))
        with pytest.raises(UsageError, match=message):
            read_report(tmp_path / "r.json")


def test_reports_are_valid_by_the_schema_and_others_are_not() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(json.loads(json_schema()))
    reports: list[Report] = [synthetic_report(2, 2), several(), planned(), experiment_report(golden())]
    for document in [json.loads(report.to_json()) for report in reports]:
        validator.validate(document)
        body = document.pop(document["kind"])
        assert not validator.is_valid(document), "no body"
        document["kind"], document["doctor"] = "doctor", body
        assert document["kind"] == "experiments" or not validator.is_valid(document), "the body of another kind"
