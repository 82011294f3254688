"""What is attention as an asymmetric kernel machine? Its kernel SVD, dual and primal (Chen et al. 2023)."""

from attnlens.ksvd.dual import Dual, dual, matrix_dual, matrix_residual, residual
from attnlens.ksvd.features import cosine_features, random_features, sampled_rows
from attnlens.ksvd.nystrom import Nystrom, nystrom
from attnlens.ksvd.objective import Convention, objective, regulariser
from attnlens.ksvd.primal import Primal, primal
from attnlens.ksvd.spaces import mean_angle, principal_angles, share_inside
from attnlens.ksvd.truncated import Solver, truncated

__all__ = [
    "Convention",
    "Dual",
    "Nystrom",
    "Primal",
    "Solver",
    "cosine_features",
    "dual",
    "matrix_dual",
    "matrix_residual",
    "mean_angle",
    "nystrom",
    "objective",
    "primal",
    "principal_angles",
    "random_features",
    "regulariser",
    "residual",
    "sampled_rows",
    "share_inside",
    "truncated",
]
