"""A report of which every string was written by a stranger."""

from __future__ import annotations

import re

from reports import synthetic_report

from attnlens.records import AttentionRows, Extreme, File, InspectionBody, Sentence, Skipped, Text, TextSummary
from attnlens.report.report import Report

HOSTILE = "x\x1b[2J\x1b]0;owned\x07 \x00 <script>alert(1)</script> \"onload='a' & \u202egnp.exe\u200b \x9b31m"


STEERING = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]")


def hostile() -> Report:
    """A report that holds the string wherever a report holds strings."""
    report = synthetic_report(2, 2, model=HOSTILE, architecture=HOSTILE)
    settings = report.settings.model_copy(
        update={"text": Text(name=HOSTILE, sha256=HOSTILE), "device": HOSTILE, "dtype": HOSTILE, "notes": [HOSTILE]}
    )
    environment = report.environment.model_copy(update=dict.fromkeys(("python", "torch", "platform"), HOSTILE))
    skipped = [Skipped(site=HOSTILE, heads=[0], measure=HOSTILE, reason=HOSTILE)]
    extremes = [Extreme(layer=0, head=0, measure=HOSTILE, value=4, rank=1, of=4, percentile=99, text=HOSTILE)]
    texts = [TextSummary(name=HOSTILE, sequences=2)]
    conventions = report.model.conventions.model_copy(update={"notes": [HOSTILE]}) if report.model.conventions else None
    return report.model_copy(
        update={
            "command": HOSTILE,
            "model": report.model.model_copy(
                update={"conventions": conventions, "revision": HOSTILE, "files": [File(name=HOSTILE, sha256=HOSTILE)]}
            ),
            "settings": settings,
            "environment": environment,
            "tool": report.tool.model_copy(update={"name": HOSTILE, "version": HOSTILE}),
            "coverage": report.coverage.model_copy(update={"skipped": skipped, "analysed": 3}),
            "summary": report.summary.model_copy(update={"extremes": extremes, "texts": texts}),
            "inspection": InspectionBody(attention=[attended()]),
            "heads": [head.model_copy(update={"site": HOSTILE, "measures": measures(head)}) for head in report],
        }
    )


def attended() -> AttentionRows:
    """The rows of a head on three hostile tokens."""
    place = {"site": HOSTILE, "layer": 0, "head": 0, "kv_head": 0, "part": "decoder"}
    sentence = Sentence(sequence=0, keys=[HOSTILE, "=cmd|' /C calc'!A0", "</script><!--"])
    rows = {"keys": [[0], [1, 0], [2, 1]], "weights": [[1], [0.6, 0.4], [0.5, 0.3]], "rest": [0, 0, 0.2]}
    return AttentionRows(**place, sequence=0, **rows, sentence=sentence)


def measures(head):
    """Its measures, one of them with a hostile name and label, one missing for a hostile reason."""
    norm = head.measures["weights.norm"]
    named = {HOSTILE: norm, "weights.law": norm.model_copy(update={"label": HOSTILE})}
    if head.head:
        named["weights.norm"] = norm.model_copy(update={"value": None, "reason": HOSTILE})
    return head.measures | named
