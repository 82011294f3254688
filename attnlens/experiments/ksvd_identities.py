"""Agreement of primal and dual kernel SVD on a real head and on random features, F = I and F = X'."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from attnlens import ksvd
from attnlens.experiments.figures import Figure, columns
from attnlens.experiments.settings import Progress, silent
from attnlens.experiments.trained import DEMO, TEXT, calls, demo, sample
from attnlens.records.experiments import Experiment

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

LAYER, HEAD, TOKENS = 1, 3, 128
"""Whose queries and keys, and on how much of the built-in text."""
SCORES, ROWS, RANDOM = 4, 10, 64
"""s, the sampled rows X', and the random features of a token."""
KERNELS = f"cosine and random features of head {LAYER}.{HEAD} of demo, Gaussian features"
NOISE = 0.1
"""Standard deviation of what H_e is perturbed by, for the control."""
CONTROL = "J_perturbed"
"""The figure that must not be 0."""
LIMIT, MOVED = 1e-10, 0.1
"""How large an identity's error may be, and how large the control's J must be."""
LABELS = {"primal_minus_dual": "primal − dual", "rank_s_error": "rank-s error"}
"""How an identity is written, where its name is not that."""
SOURCE = "Chen et al. 2023, Theorem 3.2 and Eq. 6: equalities, here to rounding; J is in K's unit"


class Case(NamedTuple):
    """One kernel K = Φ_q FᵀF Φ_kᵀ."""

    name: str
    queries: Float[Tensor, "n features"]
    """Φ_q."""
    keys: Float[Tensor, "m features"]
    """Φ_k."""
    projection: Float[Tensor, "sampled features"] | None
    """F; None is the identity."""

    @property
    def kernel(self) -> Float[Tensor, "n m"]:
        """K, written out: what the identities are held against."""
        if self.projection is None:
            return self.queries @ self.keys.mT
        return (self.queries @ self.projection.mT) @ (self.keys @ self.projection.mT).mT


def ksvd_identities(seed: int = 0, progress: Progress = silent) -> Experiment:
    """The largest error of each identity over the kernels, and the least |J| of the control, which must not be 0."""
    posed = list(cases(seed))
    found: dict[str, list[float]] = {}
    for done, case in enumerate(posed):
        for name, error in errors(case, seed).items():
            found.setdefault(name, []).append(error)
        progress("KSVD identities", done + 1, len(posed))
    rows = {
        name: Figure(max(values), label=LABELS.get(name), published=0.0, tolerance=LIMIT, bound="at most")
        for name, values in found.items()
    }
    rows[CONTROL] = Figure(min(found[CONTROL]), label="J perturbed, the control", published=MOVED, bound="at least")
    return Experiment(
        name="KSVD identities",
        question="Do primal and dual kernel SVD agree, and is J = 0 there (perturbed: the control, which must not be)?",
        model=DEMO,
        settings={"text": TEXT, "kernels": KERNELS, "F": "I and X'", "s": SCORES, "sampled_rows": ROWS, "seed": seed},
        source=SOURCE,
        **columns(rows),
    ).judged()


def cases(seed: int) -> Iterator[Case]:
    """A head's cosine features, its softmax random features, and Gaussian features of other counts, each with both F.

    X' are evenly spaced rows of Φ_k.
    """
    loaded = demo()
    _, query_key = calls(loaded.model, sample(loaded, TOKENS, 1))[LAYER]
    q, k = query_key.query[0, HEAD], query_key.paired_key[0, HEAD]
    generator = torch.Generator().manual_seed(seed)
    drawn = (torch.randn(rows, 6, generator=generator, dtype=torch.float64) for rows in (40, 30))
    head = f"head {LAYER}.{HEAD} of demo"
    posed = {
        f"{head}, cosine": (ksvd.cosine_features(q), ksvd.cosine_features(k)),
        f"{head}, random features": tuple(ksvd.random_features(x, query_key.scale, RANDOM, seed) for x in (q, k)),
        "Gaussian features": tuple(drawn),
    }
    for name, (queries, keys) in posed.items():
        yield Case(f"{name}, F = I", queries, keys, None)
        yield Case(f"{name}, F = X'", queries, keys, ksvd.sampled_rows(keys, ROWS))


def errors(case: Case, seed: int) -> dict[str, float]:
    """How far each identity of the s leading components is from holding, relative to K but for J; and the control."""
    sides = case.queries, case.keys, case.projection
    solution, kernel = ksvd.dual(case.queries, case.keys, SCORES, case.projection), case.kernel
    weights = ksvd.primal(solution, *sides)
    e, r = weights.e_scores(case.queries), weights.r_scores(case.keys)
    sigma, top = solution.values, float(solution.values[0])
    rest = torch.linalg.svdvals(kernel)[len(sigma) :].norm()
    return {
        "eigen_residual": float(ksvd.matrix_residual(solution, kernel)),
        "primal_minus_dual": _largest(e - solution.e, r - solution.r) / top,
        "Λe − h": _largest(weights.multipliers * e - solution.left, weights.multipliers * r - solution.right),
        "J": _objective(case, solution),
        "Σe² − σ²": _largest(e.square().sum(0) - sigma.square()) / top**2,
        "rank_s_error": float((torch.linalg.matrix_norm(kernel - e @ solution.right.mT) - rest).abs() / kernel.norm()),
        CONTROL: _objective(case, _perturbed(solution, seed)),
    }


def _perturbed(solution: ksvd.Dual, seed: int) -> ksvd.Dual:
    """The same with noise on H_e: no kernel SVD any more."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(solution.left.shape, generator=generator, dtype=torch.float64)
    return replace(solution, left=solution.left + NOISE * noise)


def _objective(case: Case, solution: ksvd.Dual) -> float:
    """|J| at the primal weights that a dual solution gives, in K's unit."""
    weights = ksvd.primal(solution, case.queries, case.keys, case.projection)
    e, r = weights.e_scores(case.queries), weights.r_scores(case.keys)
    return float(ksvd.objective(e, r, weights.query_weight, weights.key_weight, weights.multipliers).abs())


def _largest(*differences: Tensor) -> float:
    return max(float(difference.abs().amax()) for difference in differences)
