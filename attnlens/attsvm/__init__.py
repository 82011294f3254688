"""Does attention select tokens as a support vector machine would? The problems of Att-SVM, solved and certified."""

from attnlens.attsvm.builders import causal, finite_part, prompt, selection, selection_sets
from attnlens.attsvm.certificates import certified
from attnlens.attsvm.descent import LOSSES, Descent, Instances, Linear, Loss, Normaliser, Relu, Scores, descend
from attnlens.attsvm.graph import next_token
from attnlens.attsvm.problem import Problem
from attnlens.attsvm.separable import Separability, separable
from attnlens.attsvm.solution import Solution, Status
from attnlens.attsvm.solvers.frobenius import solve
from attnlens.attsvm.solvers.nuclear import certified_nuclear, nuclear_rank, solve_nuclear
from attnlens.attsvm.solvers.soft import SoftMargin, soft_margin

__all__ = [
    "LOSSES",
    "Descent",
    "Instances",
    "Linear",
    "Loss",
    "Normaliser",
    "Problem",
    "Relu",
    "Scores",
    "Separability",
    "SoftMargin",
    "Solution",
    "Status",
    "causal",
    "certified",
    "certified_nuclear",
    "descend",
    "finite_part",
    "next_token",
    "nuclear_rank",
    "prompt",
    "selection",
    "selection_sets",
    "separable",
    "soft_margin",
    "solve",
    "solve_nuclear",
]
