"""What do the parts of attnlens hand to each other? Frozen nouns: Site and QueryKey carry tensors, the rest is JSON."""

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
from attnlens.records.tensors import Part, QueryKey, Site, Source

__all__ = [
    "Conventions",
    "Coverage",
    "Environment",
    "File",
    "Head",
    "HeadId",
    "Measure",
    "ModelInfo",
    "Null",
    "Part",
    "QueryKey",
    "Record",
    "Report",
    "Settings",
    "Site",
    "SiteCheck",
    "Skipped",
    "Source",
    "Standout",
    "Summary",
    "Text",
    "Tool",
    "json_schema",
    "read_report",
]
