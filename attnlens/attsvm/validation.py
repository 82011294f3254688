"""Checks the arguments of the solvers before anything is computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnlens.errors import UsageError

if TYPE_CHECKING:
    from jaxtyping import Integer, Shaped
    from torch import Tensor

    from attnlens.attsvm.problem import Problem

LEAST, MOST = 1e-50, 1e50
"""Sizes between which λ ~ b/‖u zᵀ‖² and ‖W‖² ~ b²/‖u zᵀ‖² stay within float64."""


def real(name: str, given: object) -> Shaped[Tensor, "*shape"]:
    """A tensor of real numbers; raises UsageError for anything else."""
    if not isinstance(given, torch.Tensor):
        raise UsageError(
            f"The {name} are {type(given).__name__}, not a torch tensor.", "Wrap them: torch.as_tensor(…)."
        )
    if given.is_complex():
        raise UsageError(f"The {name} are complex numbers.", "Give real ones, for example their real parts.")
    return given


def indices(name: str, given: object) -> Integer[Tensor, "*shape"]:
    """A tensor of whole numbers; raises UsageError for anything else."""
    numbers = real(name, given)
    if numbers.is_floating_point() or numbers.dtype == torch.bool:
        raise UsageError(f"The {name} have dtype {numbers.dtype}, but are indices.", "Give integers, as .long() does.")
    return numbers


def bounded(tolerance: float, limit: int = 1) -> None:
    """Raises UsageError unless the tolerance is positive and the limit at least 1."""
    if not tolerance > 0.0:
        raise UsageError(f"The tolerance is {tolerance}, but must be positive.", "Give a relative gap such as 1e-9.")
    if limit < 1:
        raise UsageError(f"The limit is {limit}, but one step is the least.", "Give a limit of at least 1.")


def ordinary(problem: Problem) -> None:
    """Raises UsageError where squares and products of a problem's numbers would leave float64.

    Each difference, query and margin that isn't zero must have its largest |number| in [1e-50, 1e50].
    """
    every = {
        "difference of two tokens": problem.differences,
        "query": problem.queries,
        "margin": problem.margins[:, None],
    }
    for name, rows in every.items():
        if not rows.numel():
            continue
        sizes = rows.abs().amax(-1)
        odd = sizes[(sizes != 0.0) & ~((sizes >= LEAST) & (sizes <= MOST))]
        if len(odd):
            raise UsageError(
                f"A {name} has size {float(odd[0]):.0e}, whose powers leave float64.",
                f"Scale the tokens, queries and margins to between {LEAST:.0e} and {MOST:.0e}.",
            )
