"""The frozen nouns that the parts of attnlens hand to each other."""

from attnlens.choices import Intervals, Part
from attnlens.records.calls import Call
from attnlens.records.coverage import Coverage, Skipped
from attnlens.records.experiments import Bound, Curve, Experiment, Trajectory
from attnlens.records.measures import Head, HeadId, Measure, Null, Record
from attnlens.records.plans import KeyRank, Plan, PlanStep, Rise, read_plan
from attnlens.records.provenance import Conventions, File, ModelInfo, Settings, Text, Tool
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
from attnlens.records.rotation import Rotation
from attnlens.records.selections import WHERE_POSED, Pick, Selection, Sentence, Space
from attnlens.records.swaps import (
    PARTS,
    Change,
    Effect,
    Healing,
    HealingStep,
    Outcome,
    Pair,
    SiteSwap,
    Stage,
    Swap,
    Task,
    TextChange,
    TextCosine,
)
from attnlens.records.tensors import QueryKey, Site, Source
from attnlens.records.windows import Windows

__all__ = [
    "PARTS",
    "WHERE_POSED",
    "Bound",
    "Call",
    "Change",
    "Conventions",
    "Coverage",
    "Curve",
    "Effect",
    "Environment",
    "Experiment",
    "Extreme",
    "File",
    "Head",
    "HeadId",
    "Healing",
    "HealingStep",
    "Intervals",
    "KeyRank",
    "Measure",
    "ModelInfo",
    "Null",
    "Outcome",
    "Pair",
    "Part",
    "Pick",
    "Plan",
    "PlanStep",
    "QueryKey",
    "Record",
    "Report",
    "Rise",
    "Rotation",
    "Selection",
    "Sentence",
    "Settings",
    "Site",
    "SiteCheck",
    "SiteSwap",
    "Skipped",
    "Source",
    "Space",
    "Stage",
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
    "read_plan",
    "read_report",
]
