"""What do the parts of attnlens hand to each other? Frozen nouns: Site and QueryKey carry tensors, the rest is JSON."""

from attnlens.records.calls import Call
from attnlens.records.coverage import Coverage, Skipped
from attnlens.records.measures import Head, HeadId, Measure, Null, Record
from attnlens.records.report import (
    Conventions,
    Environment,
    File,
    ModelInfo,
    Report,
    Settings,
    SiteCheck,
    Standout,
    Summary,
    Text,
    Tool,
    json_schema,
    read_report,
)
from attnlens.records.swaps import Change, Effect, Healing, HealingStep, Outcome, Pair, SiteSwap, Stage, Swap, Task
from attnlens.records.tensors import Part, QueryKey, Site, Source

__all__ = [
    "Call",
    "Change",
    "Conventions",
    "Coverage",
    "Effect",
    "Environment",
    "File",
    "Head",
    "HeadId",
    "Healing",
    "HealingStep",
    "Measure",
    "ModelInfo",
    "Null",
    "Outcome",
    "Pair",
    "Part",
    "QueryKey",
    "Record",
    "Report",
    "Settings",
    "Site",
    "SiteCheck",
    "SiteSwap",
    "Skipped",
    "Source",
    "Stage",
    "Standout",
    "Summary",
    "Swap",
    "Task",
    "Text",
    "Tool",
    "json_schema",
    "read_report",
]
