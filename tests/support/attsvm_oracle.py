"""The norm of a max-margin direction as a general convex solver finds it."""

import cvxpy
import numpy as np

from attnlens.maths.attsvm import Problem


def dense(problem: Problem) -> np.ndarray:
    """Every constraint's u zᵀ, flattened."""
    return (problem.differences[:, :, None] * problem.paired_queries[:, None]).flatten(1).numpy()


def oracle(problem: Problem) -> float:
    """‖W‖_F by a general convex solver."""
    rows, bounds, equal = dense(problem), problem.margins.numpy(), problem.equal.numpy()
    W = cvxpy.Variable(rows.shape[1])
    limits = [rows[~equal] @ W >= bounds[~equal]] if (~equal).any() else []
    limits += [rows[equal] @ W == bounds[equal]] if equal.any() else []
    exact = {f"tol_{kind}": 1e-12 for kind in ("gap_abs", "gap_rel", "feas")}
    cvxpy.Problem(cvxpy.Minimize(cvxpy.sum_squares(W)), limits).solve(solver=cvxpy.CLARABEL, **exact)
    return float(np.linalg.norm(W.value))
