"""The papers' synthetic experiments on token selection, and their experiments on small models.

`tokens`, `weights`: experiments on random instances, listed in EXPERIMENTS; `trained`: experiments on the demo model
and models of its size; `binary_kernel`: fits to a planted kernel. Inputs: `ExperimentSettings`, or a seed. Outputs:
`records.studies.Experiment`, judged against published values. Imported only by `lab/reproduce.py`.
"""

from attnlens.lab.experiments.tokens import Study, feasibility, global_selection, golden, local_convergence, rank
from attnlens.lab.experiments.weights import multi_token, next_token

STUDIES = local_convergence, global_selection, feasibility, rank, multi_token, next_token
EXPERIMENTS: dict[str, Study] = {study.name: study for study in STUDIES}  # name on the command line → experiment
