"""Convert reports, baselines and plans of ranks of schema version 1 to version 2.

The converters take and return the parsed JSON. They do not validate it: what is not of the expected type stays as it
is, so that the records of version 2 refuse it and name the field.
"""

from __future__ import annotations

from collections.abc import Mapping

Fields = Mapping[str, object]

SETTINGS = {"sequences": "windows", "sequences_asked": "windows_requested", "tokens": "length", "windows": "placement"}
"""New name of each renamed setting; `windows` was the placement and became the count."""
BODIES = ("selections", "attention", "swap", "more_swaps", "plan", "comparison", "doctor", "experiments", "studies")
"""Fields of a report of version 1 that are in the body of its kind in version 2."""
KINDS = {"converge": "experiments", "verify": "experiments", "study": "studies", "doctor": "doctor"}
"""Kind of a report whose body is empty, by its command; that of any other command is `inspection`."""


def convert_report(report: Fields) -> Fields:
    """Return a report of version 2 with the content of a report of version 1."""
    names = ("swap", "comparison", "doctor", "experiments", "studies")
    bodies = {name: report[name] for name in names if report.get(name)}
    kind = next(iter(bodies), KINDS.get(str(report.get("command")), "inspection"))
    inspection = {name: report[name] for name in ("selections", "attention") if report.get(name)}
    if inspection or kind == "inspection":
        bodies["inspection"] = inspection
    if isinstance(swap := bodies.get("swap"), Mapping):
        bodies["swap"] = {**swap, "others": report.get("more_swaps", []), "plan": convert_plan(report.get("plan"))}
    common = {name: field for name, field in report.items() if name not in BODIES}
    return {**convert_settings_in(common), "schema_version": "2", "kind": kind, **bodies}


def convert_baseline(baseline: Fields) -> Fields:
    """Return a baseline of version 2 with the content of a baseline of version 1."""
    return {**convert_settings_in(baseline), "schema_version": "2"}


CHOSEN_BY = "an older version of attnlens wrote it: its estimate was measured on the text used to choose the ranks"


def convert_plan(plan: object) -> object:
    """Return a plan of version 2 with the content of a plan of version 1, which had no `schema_version`.

    Before plans had an estimate, the promise was measured on the text that chose the ranks: it becomes the estimate.
    """
    if not isinstance(plan, Mapping):
        return plan
    converted = {**convert_settings_in(plan), "schema_version": "2"}
    reasons = plan.get("reasons", {})
    if "estimated" not in plan and plan.get("promised") is not None and isinstance(reasons, Mapping):
        reasons = {**reasons, "promised": CHOSEN_BY}
        converted |= {"estimated": plan["promised"], "promised": None, "reasons": reasons}
    return converted


def convert_settings_in(record: Fields) -> dict[str, object]:
    """Return the record with its settings under their new names."""
    settings = record.get("settings")
    if not isinstance(settings, Mapping):
        return {**record}
    return {**record, "settings": {SETTINGS.get(name, name): value for name, value in settings.items()}}
