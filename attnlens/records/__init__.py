"""The frozen nouns that the parts of attnlens hand to each other; each file is imported when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnlens.records.calls import Call
    from attnlens.records.checks import Baseline, BaselineMeasure, Breach, Check, read_baseline
    from attnlens.records.comparison import BlockChange, Comparison, HeadChange, MeasureChange, Relation, Shift, Spread
    from attnlens.records.coverage import Coverage, Skipped
    from attnlens.records.experiments import Bound, Curve, Experiment, Trajectory
    from attnlens.records.measures import Head, HeadId, Measure, Null, Record
    from attnlens.records.plans import FormTried, KeyRank, Plan, PlanStep, Rise, read_plan
    from attnlens.records.predictions import Prediction, Predictor
    from attnlens.records.provenance import (
        AdapterInfo,
        Conventions,
        File,
        FileInParts,
        ModelInfo,
        Settings,
        Text,
        Tool,
    )
    from attnlens.records.report import (
        Environment,
        Extreme,
        Report,
        SiteCheck,
        Summary,
        TextSummary,
        Verdict,
        json_schema,
        read_report,
    )
    from attnlens.records.selections import AttentionRows, Pick, Selection, Sentence
    from attnlens.records.studies import StudyCell, StudyColumn, StudyOrdering, StudyPair, StudyRun, StudyTable
    from attnlens.records.swaps import (
        PARTS,
        Agreement,
        BeyondWindow,
        Change,
        Control,
        Effect,
        Healing,
        HealingControl,
        HealingRate,
        HealingStep,
        HealingTraining,
        Outcome,
        Pair,
        PositionChange,
        SiteSwap,
        Stage,
        Swap,
        Task,
        TextChange,
        TextCosine,
    )
    from attnlens.records.tensors import QueryKey, Rotation, Site, Source
    from attnlens.records.windows import Windows

_NAMES = {
    "calls": "Call",
    "checks": "Baseline BaselineMeasure read_baseline Breach Check",
    "comparison": "BlockChange Comparison HeadChange MeasureChange Relation Shift Spread",
    "coverage": "Coverage Skipped",
    "experiments": "Bound Curve Experiment Trajectory",
    "measures": "Head HeadId Measure Null Record",
    "plans": "FormTried KeyRank Plan PlanStep Rise read_plan",
    "predictions": "Prediction Predictor",
    "provenance": "AdapterInfo Conventions File FileInParts ModelInfo Settings Text Tool",
    "report": "Environment Extreme Report SiteCheck Summary TextSummary Verdict json_schema read_report",
    "selections": "AttentionRows Pick Selection Sentence",
    "studies": "StudyCell StudyOrdering StudyPair StudyRun StudyTable StudyColumn",
    "swaps": "PARTS Agreement BeyondWindow Change Control Effect Healing HealingControl HealingRate HealingStep "
    "HealingTraining Outcome Pair PositionChange SiteSwap Stage Swap Task TextChange TextCosine",
    "tensors": "QueryKey Rotation Site Source",
    "windows": "Windows",
}
"""Which file each name is in."""
_HOMES = {name: f"attnlens.records.{file}" for file, names in _NAMES.items() for name in names.split()}

__all__ = [
    "PARTS",
    "AdapterInfo",
    "Agreement",
    "AttentionRows",
    "Baseline",
    "BaselineMeasure",
    "BeyondWindow",
    "BlockChange",
    "Bound",
    "Breach",
    "Call",
    "Change",
    "Check",
    "Comparison",
    "Control",
    "Conventions",
    "Coverage",
    "Curve",
    "Effect",
    "Environment",
    "Experiment",
    "Extreme",
    "File",
    "FileInParts",
    "FormTried",
    "Head",
    "HeadChange",
    "HeadId",
    "Healing",
    "HealingControl",
    "HealingRate",
    "HealingStep",
    "HealingTraining",
    "KeyRank",
    "Measure",
    "MeasureChange",
    "ModelInfo",
    "Null",
    "Outcome",
    "Pair",
    "Pick",
    "Plan",
    "PlanStep",
    "PositionChange",
    "Prediction",
    "Predictor",
    "QueryKey",
    "Record",
    "Relation",
    "Report",
    "Rise",
    "Rotation",
    "Selection",
    "Sentence",
    "Settings",
    "Shift",
    "Site",
    "SiteCheck",
    "SiteSwap",
    "Skipped",
    "Source",
    "Spread",
    "Stage",
    "StudyCell",
    "StudyColumn",
    "StudyOrdering",
    "StudyPair",
    "StudyRun",
    "StudyTable",
    "Summary",
    "Swap",
    "Task",
    "Text",
    "TextChange",
    "TextCosine",
    "TextSummary",
    "Tool",
    "Trajectory",
    "Verdict",
    "Windows",
    "json_schema",
    "read_baseline",
    "read_plan",
    "read_report",
]


def __getattr__(name: str) -> Any:
    """A record; what reads no report needs no pydantic."""
    if name not in _HOMES:
        raise AttributeError(f"module 'attnlens.records' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return found
