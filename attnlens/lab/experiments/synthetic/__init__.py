"""Synthetic experiments on random instances, one `Study` each.

`tokens`: instances, and experiments in which every input selects one token; `weights`: those in which several tokens
can keep their weight. Inputs: `ExperimentSettings`. Outputs: `Experiment`. Imported by `lab/reproduce.py` only.
"""

from attnlens.lab.experiments.settings import Study
from attnlens.lab.experiments.synthetic.tokens import FEASIBILITY, GLOBAL_SELECTION, LOCAL_CONVERGENCE, RANK, golden
from attnlens.lab.experiments.synthetic.weights import MULTI_TOKEN, NEXT_TOKEN

STUDIES = LOCAL_CONVERGENCE, GLOBAL_SELECTION, FEASIBILITY, RANK, MULTI_TOKEN, NEXT_TOKEN
EXPERIMENTS: dict[str, Study] = {study.name: study for study in STUDIES}  # name on the command line → experiment
