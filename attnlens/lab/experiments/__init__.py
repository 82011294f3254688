"""The papers' synthetic experiments on token selection, and their experiments on one head and on small models.

`tokens`, `weights`: those on random instances, in EXPERIMENTS; `one_head`, `trained`, `binary_kernel`: those on a
model's head, on the demo model, and on a planted kernel. Inputs: `ExperimentSettings`, or a loaded head. Outputs:
`records.studies.Experiment`, judged against published values. Imported by `lab/reproduce.py` only.
"""

from attnlens.lab.experiments.settings import Study
from attnlens.lab.experiments.tokens import FEASIBILITY, GLOBAL_SELECTION, LOCAL_CONVERGENCE, RANK, golden
from attnlens.lab.experiments.weights import MULTI_TOKEN, NEXT_TOKEN

STUDIES = LOCAL_CONVERGENCE, GLOBAL_SELECTION, FEASIBILITY, RANK, MULTI_TOKEN, NEXT_TOKEN
EXPERIMENTS: dict[str, Study] = {study.name: study for study in STUDIES}  # name on the command line → experiment
