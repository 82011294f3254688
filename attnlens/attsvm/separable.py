"""Decides whether any W separates, with a margin or Gordan's certificate as proof."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnlens.attsvm.solvers.frobenius import solve

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from attnlens.attsvm.problem import Problem


@dataclass(frozen=True)
class Separability:
    """Exactly one of the two exists: W with u W z ≥ b, or λ with Σλ u zᵀ = 0 < Σλb (Gordan 1873, Farkas 1902)."""

    verdict: bool | None
    """Whether a W exists; None where neither proof was found within the iteration limit."""
    distance: float | None
    """The least ‖Σλ u zᵀ‖ over Σλb = 1: the max-margin 1/‖W‖_F, or the certificate's residual ≈ 0; None: unknown."""
    multipliers: Float[Tensor, " constraints"]
    """λ of the proof; a certificate has Σλ = 1 over the inequalities."""


def separable(problem: Problem, limit: int = 200) -> Separability:
    """Whether any W meets the constraints, by the point of least norm in {Σλ u zᵀ : λ ≥ 0, Σλb = 1}.

    Raises what `solve` raises.
    """
    answer = solve(problem, limit=limit)
    if answer.status == "infeasible":
        return Separability(False, answer.residual, answer.multipliers)
    # A W that is feasible proves it, however far from the shortest: its gap is finite.
    if answer.gap is None or answer.norm is None or answer.gap == float("inf"):
        return Separability(None, None, answer.multipliers)
    return Separability(True, 1.0 / answer.norm if answer.norm > 0.0 else float("inf"), answer.multipliers)
