"""The papers' synthetic experiments on token selection, and their experiments on one head and on small models.

`synthetic/`: experiments on random instances, listed in EXPERIMENTS; `one_head`, `trained`, `binary_kernel`: those on a
model's head, on the demo model, and on a planted kernel. Inputs: `ExperimentSettings`, or a loaded head. Outputs:
`records.studies.Experiment`, judged against published values. Imported by `lab/reproduce.py` only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attnlens.lab.experiments.settings import NAMES, Study
from attnlens.lab.experiments.synthetic.tokens import FEASIBILITY, GLOBAL_SELECTION, LOCAL_CONVERGENCE, RANK, golden
from attnlens.lab.experiments.synthetic.weights import MULTI_TOKEN, NEXT_TOKEN
from attnlens.maths.linalg.spectra import one_thread
from attnlens.records.studies import Experiment
from attnlens.runs.progress import Progress, silent

STUDIES = LOCAL_CONVERGENCE, GLOBAL_SELECTION, FEASIBILITY, RANK, MULTI_TOKEN, NEXT_TOKEN
EXPERIMENTS: dict[str, Study] = {study.name: study for study in STUDIES}
"""Name on the command line → experiment."""


def run_experiments(
    chosen: Iterable[str], *, quick: bool, overrides: Mapping[str, object], progress: Progress = silent
) -> list[Experiment]:
    """Run the chosen experiments and judge them against published values.

    `overrides` are options of requests.SyntheticRequest, including the seed. Each experiment applies and records the
    ones it uses. It is compared with nothing if one of them changes its question.
    """
    settings = {NAMES.get(option, option): value for option, value in overrides.items()}
    with one_thread():
        return [EXPERIMENTS[name].run(settings, quick, progress) for name in chosen]
