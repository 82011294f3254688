"""What do the parts of attnlens hand to each other? Frozen nouns: Site and QueryKey carry tensors, the rest is JSON."""

from attnlens.records.calls import Call
from attnlens.records.coverage import Coverage, Skipped
from attnlens.records.experiments import Bound, Curve, Experiment, Trajectory
from attnlens.records.measures import Head, HeadId, Measure, Null, Record
from attnlens.records.plans import KeyRank, Plan, PlanStep, Rise, read_plan
from attnlens.records.provenance import Conventions, File, ModelInfo, Settings, Text, Tool
from attnlens.records.report import (
    Environment,
    Report,
    SiteCheck,
    Standout,
    Summary,
    json_schema,
    read_report,
)
from attnlens.records.rotation import Rotation
from attnlens.records.selections import Pick, Selection, Sentence, Space
from attnlens.records.swaps import (
    CONVENTIONS,
    PARTS,
    PATHS,
    SWEEPS,
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
)
from attnlens.records.tensors import Part, QueryKey, Site, Source

__all__ = [
    "CONVENTIONS",
    "PARTS",
    "PATHS",
    "SWEEPS",
    "Bound",
    "Call",
    "Change",
    "Conventions",
    "Coverage",
    "Curve",
    "Effect",
    "Environment",
    "Experiment",
    "File",
    "Head",
    "HeadId",
    "Healing",
    "HealingStep",
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
    "Standout",
    "Summary",
    "Swap",
    "Task",
    "Text",
    "Tool",
    "Trajectory",
    "json_schema",
    "read_plan",
    "read_report",
]
