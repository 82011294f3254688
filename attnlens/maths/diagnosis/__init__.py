"""Name the cause of the difference between two attention layers: permutations, exchanges, factors, grids, low rank.

A hypothesis is a map T with few parameters, fitted in closed form. `diagnose` searches the hypotheses, alone and in
pairs, for those with T(A) = B up to rounding, where A is the first layer and B the second. layer.py: the tensors of a
layer by role, and predictions of hypotheses; rows.py, heads.py, matrices.py, norms.py: hypotheses on several tensors;
values.py: hypotheses on single tensors; rotations.py: differences between two RoPEs; search.py: the order of the
hypotheses, and the search. Imported by `runs.compare`.
"""

from attnlens.maths.diagnosis.layer import Layer
from attnlens.maths.diagnosis.search import Cause, Diagnosis, diagnose

__all__ = ["Cause", "Diagnosis", "Layer", "diagnose"]
