"""Reports whose strings are all hostile."""

from __future__ import annotations

import re

import numpy as np
from experiment_reports import converging, curve, experiment_report, training
from reports import synthetic_report
from swap_reports import swap_report, swapped

from attnlens.records import AttentionRows, Extreme, File, InspectionBody, Sentence, Skipped, Text, TextSummary
from attnlens.report.report import Report

HOSTILE = (
    "=x\x1b[2J\x1b]0;owned\x07 \x00 <script>alert(1)</script> [red]b[/red] | `c` @team www.evil.example "
    "\"onload='a' & \u202egnp.exe\u200b \x9b31m"
)
STEERING = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]")


def hostile() -> Report:
    """Return a report whose strings are all hostile."""
    report = synthetic_report(2, 2, model=HOSTILE, architecture=HOSTILE)
    settings = {"text": Text(name=HOSTILE, sha256=HOSTILE), "device": HOSTILE, "dtype": HOSTILE, "notes": [HOSTILE]}
    skipped = [Skipped(site=HOSTILE, heads=[0], measure=HOSTILE, reason=HOSTILE)]
    extremes = [Extreme(layer=0, head=0, measure=HOSTILE, value=4, rank=1, of=4, percentile=99, text=HOSTILE)]
    summary = {"extremes": extremes, "texts": [TextSummary(name=HOSTILE, sequences=2)]}
    conventions = report.model.conventions.model_copy(update={"notes": [HOSTILE]}) if report.model.conventions else None
    model = {"conventions": conventions, "revision": HOSTILE, "files": [File(name=HOSTILE, sha256=HOSTILE)]}
    environment = dict.fromkeys(("python", "torch", "platform"), HOSTILE)
    update = {
        "command": HOSTILE,
        "model": report.model.model_copy(update=model),
        "settings": report.settings.model_copy(update=settings),
        "environment": report.environment.model_copy(update=environment),
        "tool": report.tool.model_copy(update={"name": HOSTILE, "version": HOSTILE}),
        "coverage": report.coverage.model_copy(update={"skipped": skipped, "analysed": 3}),
        "summary": report.summary.model_copy(update=summary),
        "inspection": InspectionBody(attention=[attended()]),
        "heads": [head.model_copy(update={"site": HOSTILE, "measures": measures(head)}) for head in report],
    }
    return report.model_copy(update=update)


def attended() -> AttentionRows:
    """Return the attention rows of a head on three hostile tokens."""
    place = {"site": HOSTILE, "layer": 0, "head": 0, "kv_head": 0, "part": "decoder"}
    sentence = Sentence(sequence=0, keys=[HOSTILE, "=cmd|' /C calc'!A0", "</script><!--"])
    rows = {"keys": [[0], [1, 0], [2, 1]], "weights": [[1], [0.6, 0.4], [0.5, 0.3]], "rest": [0, 0, 0.2]}
    return AttentionRows(**place, sequence=0, **rows, sentence=sentence)


def measures(head):
    """Return its measures: one with a hostile name, one with a hostile label, one missing for a hostile reason."""
    norm = head.measures["weights.norm"]
    named = {HOSTILE: norm, "weights.law": norm.model_copy(update={"label": HOSTILE})}
    if head.head:
        named["weights.norm"] = norm.model_copy(update={"value": None, "reason": HOSTILE})
    return head.measures | named


def hostile_swap() -> Report:
    swap = swapped(sweep="layers", kernel=HOSTILE, formula=HOSTILE, fitted=[HOSTILE], notes=[HOSTILE])
    sites = [site.model_copy(update={"site": HOSTILE, "path": HOSTILE}) for site in swap.sites]
    stages = [stage.model_copy(update={"reasons": {HOSTILE: HOSTILE}}) for stage in swap.stages]
    return swap_report(swap.model_copy(update={"sites": sites, "stages": stages, "reasons": {HOSTILE: HOSTILE}}))


def hostile_experiments() -> Report:
    shown = dict.fromkeys(("quantity", "picture", "label"), HOSTILE)
    named = dict.fromkeys(("name", "question", "source", "axis", "model"), HOSTILE)
    pairs = {name: {HOSTILE: HOSTILE} for name in ("settings", "reasons", "labels")}
    curves = {HOSTILE: curve([1.0, 2.0], np.array([0.1, 0.2]), **shown)}
    one = converging(**named, **pairs, final={HOSTILE: None}, published={HOSTILE: 1.0}, errors={}, curves=curves)
    update = {"axis": HOSTILE, "question": HOSTILE, "reasons": {HOSTILE: HOSTILE}}
    return experiment_report(one, training(1, 2, 3).model_copy(update=update))
