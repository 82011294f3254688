"""Att-SVM, attention as a support vector machine over tokens: build, solve and certify its problems.

- `problem`: functions that build problems (`selection`, `prompt`, `causal`, `selection_sets`, `finite_part`,
  `next_token`), and `certify`, which computes a solution and its duality gap from multipliers.
- `frobenius`: `solve`, which minimises ‖W‖_F, `soft_margin`, which also allows violations, and `separable`, which
  decides whether any W meets the constraints.
- `nuclear`: `solve_nuclear`, which minimises the nuclear norm.
- `head`: the comparison of an attention head with its SVM.
- `descent`: gradient descent on one-layer attention, for many trials at once.

All functions take plain tensors and work in float64, without a model. A `Solution` contains a proof that it is optimal
or that the problem is infeasible, unless its status is `inaccurate`.

>>> import torch
>>> from attnlens.maths import attsvm
>>> tokens = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
>>> chosen = torch.tensor([0, 1, 0, 3, 2, 1])
>>> problem = attsvm.causal(tokens, chosen)
>>> solution = attsvm.solve(problem)
>>> solution.status, bool(solution.gap < 1e-9), bool((problem.scores(solution.W) > 1 - 1e-6).all())
('optimal', True, True)

If no W separates the tokens, for example because a selected token occurs twice, the soft margin minimises ‖W‖²/2 + C
times the total violation of the constraints.

>>> copied = tokens.clone()
>>> copied[4] = copied[1]
>>> hopeless = attsvm.causal(copied, chosen)
>>> attsvm.solve(hopeless).status, attsvm.separable(hopeless).verdict
('infeasible', False)
>>> soft = attsvm.soft_margin(hopeless, C=10.0)
>>> f"{soft.violated:.2f} of the constraints fall short by {soft.slack:.1f} in all"
'0.07 of the constraints fall short by 1.0 in all'
"""

from attnlens.maths.attsvm.descent import Descent, Instances, Linear, Loss, Normaliser, Relu, Scores, descend
from attnlens.maths.attsvm.frobenius import Separability, SoftMargin, separable, soft_margin, solve
from attnlens.maths.attsvm.nuclear import certify_nuclear, nuclear_rank, solve_nuclear
from attnlens.maths.attsvm.problem import (
    Problem,
    Solution,
    Status,
    causal,
    certify,
    finite_part,
    next_token,
    prompt,
    selection,
    selection_sets,
)
