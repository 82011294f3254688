"""Code that trains or rebuilds models: healing, key ranks, Primal-Attention, the papers' experiments and tables.

Contents: `heal/` (train swapped heads), `ranks/` (rank of each key head within a loss budget), `primal` (insert
Primal-Attention, and its regulariser), `study/` (small models trained from scratch, for the papers' tables),
`experiments/` (on synthetic data and on small models), `reproduce` (run tables and experiments, `converge`), `lens` (a
model that is loaded once for several commands).
Inputs: a model and a request, or experiment settings. Outputs: a `Report`; `primal` changes a model in place.
Importers: `cli`, and `attnlens` itself for its public functions.
"""

from attnlens.lazy import import_submodules

__getattr__ = import_submodules(__name__, ("primal",))
