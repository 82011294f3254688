"""A task of selection that needs more features than a polynomial kernel of small degree has, at any head size."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from attnlens.studies.tasks.planted.orders import drawn

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

    from attnlens.studies.tasks.classification import Labelled

SIZES = {"training": 16384, "validation": 512, "test": 512}
"""Cases of each part."""


def angles(directions: int = 16, steps: int = 8) -> Labelled:
    """Which sign the one step has that points where the last step points: directions on a circle, each step another.

    A step is (cos θ, sin θ, sign, 0), the last (cos φ, sin φ, 0, 1); the θ are `steps` of `directions` even ones turned
    by a random angle, φ one of them. In queries and keys linear in the step, with a constant or without, the score is
    of degree 1 in cos θ, sin θ, so that its power p is a trigonometric polynomial of degree p: 2p + 1 features, however
    wide the head, and `least_leak(directions, 2p + 1)` bounds from below what comes from other directions.
    exp(s cos(θ − φ)) leaks as little as it likes. Order and positions have nothing to do with the class. Layers above
    the first may find more features in what feed-forward parts make of a step.
    """

    def draw(count: int, draws: torch.Generator) -> tuple[Float[Tensor, "count steps 4"], Int[Tensor, " count"]]:
        slots = torch.rand(count, directions, generator=draws).argsort(1)[:, :steps]
        theta = 2 * math.pi * (slots / directions + torch.rand(count, 1, generator=draws))
        signs = 2.0 * torch.randint(2, (count, steps), generator=draws) - 1
        meant = torch.randint(steps, (count, 1), generator=draws)
        phi, zero = theta.gather(1, meant), torch.zeros(count, 1)
        held = torch.stack((theta.cos(), theta.sin(), signs, torch.zeros_like(signs)), -1)
        asked = torch.stack((phi.cos(), phi.sin(), zero, zero + 1), -1)
        return torch.cat((held, asked), 1), (signs.gather(1, meant)[:, 0] > 0).long()

    return drawn("planted angles", ("minus", "plus"), draw, SIZES, channels=4)


def least_leak(places: int, features: int) -> float:
    """√((V/r − 1)/(V − 1)), the least root mean square of k(q_a, k_b)/k(q_a, k_a), a ≠ b, of a kernel of r features.

    V queries each have a key of their own among V. With A_ab that ratio, V = tr A ≤ ‖A‖_* ≤ √r ‖A‖_F by the rank r of
    A, and ‖A‖_F² = V + Σ_{a≠b} A_ab². Zero where r ≥ V.
    """
    return math.sqrt(max(places / features - 1, 0.0) / (places - 1))
