"""The objective J, which is 0 at a solution of the kernel SVD, and the regulariser ΣJ² of training."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from attnlens.choices import Convention
from attnlens.errors import UsageError

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


def objective(
    e: Float[Tensor, "*batch n s"],
    r: Float[Tensor, "*batch m s"],
    query_weight: Float[Tensor, "*#batch sampled s"],
    key_weight: Float[Tensor, "*#batch sampled s"],
    multipliers: Float[Tensor, "*#batch s"],
    convention: Convention = "paper",
) -> Float[Tensor, "*batch"]:
    """paper: J = ½Σ_i e_iᵀΛe_i + ½Σ_j r_jᵀΛr_j − tr(W_eᵀW_r) (Eq. 6). code: ½mean_i‖Λe_i‖² + ½mean_j‖Λr_j‖² − tr(…).

    One J a head, of any sign, in the kernel's unit. paper: J = 0 at every stationary point, each half of the scores
    being ½Σσ; that is necessary and not sufficient (J is indefinite): look at the eigen-residual beside it. code: 0
    where Λ² is n/σ instead of Λ = 1/σ. Differentiable in every argument. Raises UsageError for another convention.
    """
    _check(convention)
    trace = (query_weight * key_weight).sum((-2, -1))
    weight = (multipliers if convention == "paper" else multipliers.square())[..., None, :]
    spread_e, spread_r = ((scores.square() * weight).sum(-1) for scores in (e, r))
    if convention == "paper":
        return (spread_e.sum(-1) + spread_r.sum(-1)) / 2 - trace
    return (spread_e.mean(-1) + spread_r.mean(-1)) / 2 - trace


def regulariser(
    objectives: Float[Tensor, "*batch layers heads"], convention: Convention = "paper"
) -> Float[Tensor, "*batch"]:
    """What η multiplies in the training loss, ≥ 0. paper: Σ_layers Σ_heads J². code: mean_layers (mean_heads J)².

    The paper has one J a layer and says nothing of heads; each head is a problem of its own here, so that no head's
    J < 0 hides another's J > 0, as it can in the code's mean. Raises UsageError for another convention.
    """
    _check(convention)
    if convention == "paper":
        return objectives.square().sum((-2, -1))
    return objectives.mean(-1).square().mean(-1)


def _check(convention: str) -> None:
    if convention not in get_args(Convention):
        raise UsageError(f"{convention!r} is no convention of the objective J.", 'Write "paper" or "code".')
