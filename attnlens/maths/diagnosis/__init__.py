"""Find causes of the difference between two attention layers, such as permutations, quantisation or low-rank updates.

A hypothesis is a map T with few parameters, fitted in closed form. `diagnose` searches for hypotheses, alone or in
pairs, with T(A) = B up to rounding, where A is the first layer and B the second.

- `layer`: the tensors of a layer, keyed by role, and predictions of hypotheses.
- `rows`, `heads`, `matrices`, `norms`: hypotheses on several tensors (structural hypotheses).
- `values`: hypotheses on single tensors.
- `rotations`: differences between two RoPEs.
- `search`: the order in which hypotheses are preferred, and the search.

Imported by `models` and `runs`.
"""

from attnlens.maths.diagnosis.layer import Layer
from attnlens.maths.diagnosis.search import Cause, Diagnosis, diagnose

__all__ = ["Cause", "Diagnosis", "Layer", "diagnose"]
