"""Mathematics on plain tensors, usable without a model.

- `linalg`: spectra, ranks, symmetry and definiteness of factored matrices; shares of the variance of visible scores.
- `ksvd`: kernel singular value decomposition, dual and primal.
- `attsvm`: attention as a support vector machine: problems, solvers with certificates, gradient descent.
- `diagnosis`: hypotheses about the difference between two attention layers: permutations, quantisation, low rank.
- `statistics`: standard errors, intervals, p-values, null distributions, rank correlations.

Inputs are tensors, dataclasses of tensors or an attention site's `QueryKey`; outputs are tensors, numbers or
dataclasses. Computations are in float64 unless a docstring says otherwise. This package is imported by
`analyzers`, `kernels`, `models`, `runs` and `lab`.
"""

from attnlens.lazy import import_submodules

__getattr__ = import_submodules(__name__, ("attsvm", "diagnosis", "ksvd", "linalg", "statistics"))
