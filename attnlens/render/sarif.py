"""Checks as SARIF 2.1.0, within what GitHub takes: one result a head that breaks a rule."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

import attnlens
from attnlens.records import Breach, Check, Report
from attnlens.sections.checked import worst
from attnlens.sentences import checked
from attnlens.wording import clean

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
MOST_RESULTS, MOST_BYTES = 25_000, 10_000_000
"""What GitHub takes of one upload; its 10 MB are counted compressed, ours are not, so that ours are the stricter."""


def sarif(report: Report) -> str:
    """The failed checks of a report; where there are too many results, the worst, and a notification that says so."""
    results = _results(report.checks)
    room = MOST_BYTES - len(_written(report, [], len(results)).encode())
    kept: list[dict[str, Any]] = []
    for result in results[:MOST_RESULTS]:
        room -= len(json.dumps(result).encode()) + 2  # and the comma behind it
        if room < 0:
            break
        kept.append(result)
    return _written(report, kept, len(results))


def _written(report: Report, kept: Sequence[dict[str, Any]], every: int) -> str:
    run = {
        "tool": {"driver": _driver(report.checks)},
        "automationDetails": {"id": "attnlens/check/"},
        "columnKind": "unicodeCodePoints",
        "invocations": [_invocation(len(kept), every)],
        "results": list(kept),
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}) + "\n"


def _driver(checks: Sequence[Check]) -> dict[str, Any]:
    rules = [
        {
            "id": clean(check.id),
            "shortDescription": {"text": clean(check.rule)},
            "fullDescription": {"text": clean(f"attnlens check wants {check.rule}")},
            "defaultConfiguration": {"level": "error"},
        }
        for check in checks
    ]
    return {"name": "attnlens", "version": attnlens.__version__, "rules": rules}


def _invocation(kept: int, every: int) -> dict[str, Any]:
    if kept == every:
        return {"executionSuccessful": True}
    text = f"{every} heads and rules failed; the {kept} worst are here, for GitHub takes no more. --json has all."
    return {
        "executionSuccessful": True,
        "toolExecutionNotifications": [{"level": "warning", "message": {"text": text}}],
    }


def _results(checks: Sequence[Check]) -> list[dict[str, Any]]:
    """One for every head that breaks a rule, the worst first, after one for every rule that fails through none."""
    alone: list[tuple[Check, Breach | None]] = [
        (check, None) for check in checks if not check.passed and not check.breaches
    ]
    numbers = {id(check): number for number, check in enumerate(checks)}
    return [_result(check, breach, numbers[id(check)]) for check, breach in [*alone, *worst(checks)]]


def _result(check: Check, breach: Breach | None, number: int) -> dict[str, Any]:
    place = "" if breach is None else f"{breach.site}\0{breach.layer}\0{breach.head}"
    found: dict[str, Any] = {
        "ruleId": clean(check.id),
        "ruleIndex": number,
        "level": "error",
        "message": {"text": checked.told(check) if breach is None else checked.accusation(check, breach)},
        "partialFingerprints": {"ruleAndHead/v1": sha256(f"{check.id}\0{place}".encode(errors="replace")).hexdigest()},
    }
    if check.file is not None:
        location: dict[str, Any] = {
            "physicalLocation": {
                "artifactLocation": {"uri": uri(check.file)},
                "region": {"startLine": max(1, check.line or 1)},
            }
        }
        if breach is not None:
            name = clean(f"{breach.site} head {breach.head}")
            location["logicalLocations"] = [{"fullyQualifiedName": name}]
        found["locations"] = [location]
    return found


def uri(file: str) -> str:
    """The file as GitHub looks for it: from the workspace (else the current folder) on, its characters quoted."""
    root = Path(os.environ.get("GITHUB_WORKSPACE") or ".").resolve()
    path = Path(clean(file)).resolve()
    if path.is_relative_to(root):
        return quote(path.relative_to(root).as_posix(), errors="replace")
    return "file://" + quote(path.as_posix(), errors="replace")
