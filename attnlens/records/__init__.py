"""Frozen records that the packages of attnlens exchange; each module is imported when it is first used.

`report` defines the JSON report of a command; its body is defined in `swaps`, `comparison`, `studies` or `plans`.
`tensors` defines records that are never written to files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnlens.lazy import import_submodules

if TYPE_CHECKING:
    from attnlens.records.comparison import *
    from attnlens.records.measures import *
    from attnlens.records.plans import *
    from attnlens.records.provenance import *
    from attnlens.records.report import *
    from attnlens.records.studies import *
    from attnlens.records.swaps import *
    from attnlens.records.tensors import *

_NAMES = {  # Names by module
    "comparison": "Baseline BaselineMeasure read_baseline Breach Check BlockChange Comparison ConfigChange "
    "DiagnosedCause HeadChange MeasureChange Relation Shift Spread TensorChanges",
    "measures": "AttentionRows Coverage Head HeadId Measure Null Pick Record Selection Sentence Skipped",
    "plans": "FormTried KeyRank Plan PlanStep Rise read_plan",
    "provenance": "AdapterInfo Conventions File FileInParts ModelInfo Settings Text Tool",
    "report": "BackendCheck Environment Extreme Finding InspectionBody Kind MaskCheck Report Severity Sight SiteCheck "
    "SiteError Summary SwapBody TextSummary Verdict Windows json_schema",
    "studies": "Bound Curve Experiment StudyCell StudyOrdering StudyPair StudyRun StudyTable StudyColumn Trajectory",
    "swaps": "Agreement BeyondWindow Change Control Effect Healing HealingControl HealingRate HealingStep "
    "HealingTraining Outcome Pair PositionChange Prediction PredictionChange Predictor SiteSwap Stage Swap Task "
    "TextChange TextCosine",
    "tensors": "Call QueryKey Rotation Site Source",
}

_HOMES = {name: file for file, names in _NAMES.items() for name in names.split()}
__getattr__ = import_submodules(__name__, (), _HOMES)
