"""The papers' experiments on random instances (`tokens`, `weights`, `binary_kernel`) and small models (`trained`)."""

from attnlens.lab.experiments.tokens import Study, feasibility, global_selection, golden, local_convergence, rank
from attnlens.lab.experiments.weights import multi_token, next_token

STUDIES = local_convergence, global_selection, feasibility, rank, multi_token, next_token
EXPERIMENTS: dict[str, Study] = {study.name: study for study in STUDIES}  # name on the command line → experiment
