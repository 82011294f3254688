"""Frozen records that the parts of attnlens exchange; each module is imported when it is first used.

Contents: `report` (the JSON report of a command: a common part, and a body defined in `swaps`, `comparison`, `studies`
or `plans`), `findings` (answers to questions), `measures` (`Head` and `Measure`, the entries of a report per head),
`provenance` (model, settings; the converters of JSON files of version 1), `tensors` (`Call` and `QueryKey`, which are
never written to files), `architectures` (the table of supported model types).
Inputs: values, or JSON files of reports, plans and baselines. Outputs: records and their JSON. Importers: any package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnlens.lazy import import_submodules

if TYPE_CHECKING:
    from attnlens.records.comparison import *
    from attnlens.records.findings import *
    from attnlens.records.measures import *
    from attnlens.records.plans import *
    from attnlens.records.provenance import *
    from attnlens.records.report import *
    from attnlens.records.studies import *
    from attnlens.records.swaps import *
    from attnlens.records.tensors import *

_NAMES = {  # Names by module
    "comparison": "Baseline BaselineMeasure read_baseline Breach Check BlockChange Comparison HeadChange MeasureChange "
    "Relation Shift Spread",
    "findings": "Finding Severity",
    "measures": "AttentionRows Coverage Head HeadId Measure Null Pick Record Selection Sentence Skipped",
    "plans": "FormTried KeyRank Plan PlanStep Rise read_plan",
    "provenance": "AdapterInfo Conventions File FileInParts ModelInfo Settings Text Tool",
    "report": "BackendCheck Environment Extreme InspectionBody Kind MaskCheck Report Sight SiteCheck SiteError Summary "
    "SwapBody TextSummary Verdict Windows json_schema",
    "studies": "Bound Curve Experiment StudyCell StudyOrdering StudyPair StudyRun StudyTable StudyColumn Trajectory",
    "swaps": "PARTS Agreement BeyondWindow Change Control Effect Healing HealingControl HealingRate HealingStep "
    "HealingTraining Outcome Pair PositionChange Prediction Predictor SiteSwap Stage Swap Task TextChange TextCosine",
    "tensors": "Call QueryKey Rotation Site Source",
}

_HOMES = {name: file for file, names in _NAMES.items() for name in names.split()}
__getattr__ = import_submodules(__name__, (), _HOMES)
