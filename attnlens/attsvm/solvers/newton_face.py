"""Newton's method for the nuclear solution on its face, once rank and support are known."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnlens.attsvm.problem import Problem

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

NEWTON_STEPS = 6
"""It converges quadratically once it is near: 1e-4, 1e-8, 1e-16; the first few steps may be needed to get there."""
ARRIVED = 1e-14
"""Relative length of a step that ends it."""
MOST_UNKNOWNS = 1000
"""Size up to which the system is solved: dense, about a second a step."""


def on_face(
    problem: Problem,
    multipliers: Float[Tensor, " constraints"],
    W: Float[Tensor, "d d_query"],
    tight: Bool[Tensor, " constraints"],
) -> tuple[Float[Tensor, " constraints"], Float[Tensor, "d d_query"]] | None:
    """(λ, W) near the given ones, with W = A Bᵀ of W's rank and u W z = b where `tight`, λ = 0 elsewhere.

    Solves the stationarity of ½‖A‖² + ½‖B‖², whose least value is ‖A Bᵀ‖_*: A = M B, B = Mᵀ A, M = Σλ u zᵀ. None where
    the system would be too large. Nothing says that the answer is better: certify it.
    """
    left, values, right = torch.linalg.svd(W, full_matrices=False)
    # Strict complementarity tells a zero of W from a small singular value: either σ(W) = 0 or σ(M) = 1.
    border = 1 - torch.linalg.svdvals(problem.form(multipliers))
    rank = int((values > border * values[:1]).sum())
    rows = tight.nonzero().flatten()
    if rank * sum(W.shape) + len(rows) > MOST_UNKNOWNS:
        return None
    A, B = left[:, :rank] * values[:rank].sqrt(), right[:rank].mT * values[:rank].sqrt()
    face, active = part(problem, rows), multipliers[rows]
    for _ in range(NEWTON_STEPS):
        before = A @ B.mT
        A, B, active = newton_step(face, A, B, active)
        if (A @ B.mT - before).norm() <= ARRIVED * before.norm():
            break
    return torch.zeros_like(multipliers).index_add(0, rows, active), A @ B.mT


def newton_step(
    face: Problem,
    A: Float[Tensor, "d rank"],
    B: Float[Tensor, "d_query rank"],
    multipliers: Float[Tensor, " constraints"],
) -> tuple[Float[Tensor, "d rank"], Float[Tensor, "d_query rank"], Float[Tensor, " constraints"]]:
    """One step towards A = M B, B = Mᵀ A, u A Bᵀ z = b; the shortest, as A and B may be turned together."""
    u, z, M, eye = face.differences, face.paired_queries, face.form(multipliers), torch.eye(A.shape[1]).double()
    by_a = (u[:, :, None] * (z @ B)[:, None, :]).flatten(1)
    by_b = (z[:, :, None] * (u @ A)[:, None, :]).flatten(1)
    rows = [
        torch.cat([torch.eye(A.numel()), -torch.kron(M, eye), -by_a.mT], 1),
        torch.cat([-torch.kron(M.mT.contiguous(), eye), torch.eye(B.numel()), -by_b.mT], 1),
        torch.cat([by_a, by_b, torch.zeros(len(u), len(u))], 1),
    ]
    missing = torch.cat([(M @ B - A).flatten(), (M.mT @ A - B).flatten(), face.margins - face.scores(A @ B.mT)])
    step = torch.linalg.lstsq(torch.cat(rows), missing[:, None], driver="gelsd").solution[:, 0]
    a, b, change = step.split([A.numel(), B.numel(), len(u)])
    return A + a.view_as(A), B + b.view_as(B), multipliers + change


def part(problem: Problem, chosen: Int[Tensor, " chosen"]) -> Problem:
    """The problem with these constraints only."""
    return Problem(
        differences=problem.differences[chosen],
        queries=problem.queries,
        query_of=problem.query_of[chosen],
        margins=problem.margins[chosen],
        equal=problem.equal[chosen],
    )
