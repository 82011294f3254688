"""Experiments that fit two networks' feature maps to a planted asymmetric, indefinite kernel on two domains."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from pydantic import JsonValue

from attnlens.lab.experiments.tokens import Figure, average_trials, columns, curve
from attnlens.maths.linalg.spectra import one_thread
from attnlens.records.studies import Experiment
from attnlens.runs.progress import Progress, silent

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

WIDTHS = (2, 4, 8, 16, 32)  # m, number of features: κ(x, y) ≈ ⟨φ_X(x), φ_Y(y)⟩ in R^m
HIDDEN = 48  # width of a network's two tanh hidden layers; the output layer has m features
LENGTH = 0.7  # length scale ℓ of the planted kernel
TURN = 60.0, 120.0  # range of the kernel's rotation in degrees: near 90° the symmetric part is least definite
uniform = partial(torch.rand, dtype=torch.float64)
GRID = 16  # The held-out points of each domain form a grid of GRID × GRID points in [−1, 1]²
LR = 1e-2
SOURCE = (
    "Wright & Gonzalez 2021, Theorems 1 and 2: two networks can approximate any continuous function on two compact "
    "domains. No rate is published, so only inequalities are judged. Best: smallest possible error with m features "
    "(Eckart–Young); floor: distance to positive semidefinite matrices (Higham 1988)"
)
TRIALS = 3  # draws of rotation, points and initial weights; trial i draws from seed + i
FULL = (8, 16, 32, 64, 128, 256), 1000  # numbers of points per domain, the last to compare widths; Adam steps
QUICK = (8, 16, 32, 64), 300


@dataclass(frozen=True)
class Fits:
    """Data for fitting and testing the networks of every trial and width."""

    initial: list[Tensor]  # initial weights of each layer of both networks, (trials, 2, widths, in, out)
    widths: tuple[int, ...]  # number of features m of each fit
    points: tuple[Float[Tensor, "trials n 2"], Float[Tensor, "trials n 2"]]  # points x and y; every pair is known
    known: Float[Tensor, "trials n n"]  # κ of the known pairs
    grid: Float[Tensor, "trials grid 2"]  # held-out points, the same for both domains
    truth: Float[Tensor, "trials grid grid"]  # K: κ of the held-out pairs, in float64

    def errors(self, steps: int, *, shared: bool) -> Float[Tensor, "trials widths"]:
        """Train for `steps` steps, and return the error ‖K̂ − K‖/‖K‖ of the learned kernel K̂ on the held-out pairs.

        Each domain has a network of its own, unless `shared`.
        """
        estimate = _kernel(_learn(self, steps, 1 if shared else 2), self.widths, self.grid, self.grid)
        distance, size = (part.square().sum((-2, -1)).sqrt() for part in (estimate - self.truth[:, None], self.truth))
        return distance / size[:, None]


@one_thread()
def binary_kernel(quick: bool = False, seed: int = 0, progress: Progress = silent) -> list[Experiment]:
    """Measure the held-out error of two networks, κ(x, y) ≈ ⟨φ_X(x), φ_Y(y)⟩, against width m and number of points.

    As a control at each width, a single network is trained for both domains.
    """
    samples, steps = QUICK if quick else FULL
    total = 1 + len(samples)
    by_samples = []
    for done, n in enumerate(samples, 1):
        fits = build_fits(TRIALS, n, WIDTHS if n == samples[-1] else WIDTHS[-1:], seed)
        pair = fits.errors(steps, shared=False)
        by_samples.append(pair[:, -1:])
        progress("binary kernel", done, total)
    single = fits.errors(steps, shared=True)
    progress("binary kernel", total, total)
    best, floor = best_errors(fits.truth, WIDTHS), definite_floor(fits.truth)
    at_least = partial(Figure, published=1.0, bound="at least")
    worst, lowest = float((pair[:, -1] / floor).max()), float((single / floor[:, None]).min())
    below_floor = Figure(worst, label="two networks / floor, maximum", published=1.0, bound="at most")
    settings: dict[str, JsonValue] = {
        "planted": f"exp(−‖x − Ry‖²/2ℓ²), ℓ = {LENGTH}, R a rotation by {TURN[0]:g}° to {TURN[1]:g}°",
        **{"seed": seed, "trials": TRIALS, "steps": steps, "hidden": HIDDEN, "lr": LR},
        "held_out_points": GRID**2,
    }
    by_width = build_experiment(
        ("m", WIDTHS),
        {"two": ("two networks", pair), "one": ("one network", single), "best": ("best rank", best)},
        floor,
        {
            "two_above_best": at_least(float((pair / best).min()), label="two networks / best rank, minimum"),
            "two_below_floor": below_floor,
            "one_above_floor": at_least(lowest, label="one network (control) / floor, minimum", origin="control"),
        },
        name="binary kernel by width",
        question="How closely do two networks of m features fit an indefinite kernel that one network can't learn?",
        settings=settings | {"points": samples[-1]},
        axis="features m",
    )
    by_count = build_experiment(
        ("n", samples),
        {"two": ("two networks", torch.cat(by_samples, 1))},
        floor,
        {"two_below_floor": below_floor},  # from the largest number of points
        name="binary kernel by samples",
        question="How closely do two networks fit the indefinite kernel from n points per domain and all n² pairs?",
        settings=settings | {"m": WIDTHS[-1]},
        axis="points of each domain",
    )
    return [by_width, by_count]


def build_experiment(
    swept: tuple[str, Sequence[int]],
    errors: Mapping[str, tuple[str, Float[Tensor, "trials values"]]],
    floor: Float[Tensor, " trials"],
    inequalities: Mapping[str, Figure],
    settings: dict[str, JsonValue],
    **words: str,
) -> Experiment:
    """Build an experiment from the errors at each value of `swept`, a (letter, values) pair.

    `floor` is the smallest possible error of one network, `inequalities` are the judged figures, and `words` are the
    experiment's name, question and axis.
    """
    letter, values = swept
    rows = {
        f"{name}_{letter}{value}": average_trials(each[:, at], f"{label}, {letter} = {value}")
        for name, (label, each) in errors.items()
        for at, value in enumerate(values)
    }
    rows["floor"] = average_trials(floor, "floor of one network")
    lines = {**errors, "floor": ("floor of one network", floor[:, None].expand(-1, len(values)))}
    curves = {name: curve(values, each.mT, "relative L2 error", label=label) for name, (label, each) in lines.items()}
    experiment = {"source": SOURCE, "settings": settings, "curves": curves, **words}
    return Experiment.model_validate(experiment | columns(rows | dict(inequalities))).judge()


def build_fits(trials: int, points: int, widths: Sequence[int], seed: int) -> Fits:
    """Draw each trial's rotation, weights and points, in this order, so that only the points depend on `points`."""
    generators = [torch.Generator().manual_seed(seed + trial) for trial in range(trials)]
    turns = torch.stack([_rotation(generator) for generator in generators])

    def kernels(x: Float[Tensor, "trials n 2"], y: Float[Tensor, "trials m 2"]) -> Float[Tensor, "trials n m"]:
        """Compute κ(x, y) = exp(−‖x − R y‖²/2ℓ²) for every pair of points, where R is the trial's rotation."""
        squares = (x[:, :, None] - (y @ turns.mT)[:, None]).square().sum(-1)
        return (-squares / (2 * LENGTH**2)).exp()

    chosen = [WIDTHS.index(m) for m in widths]
    initial = [
        torch.stack([torch.randn(2, len(WIDTHS), into, out, generator=each) for each in generators])[:, :, chosen]
        / math.sqrt(into)
        for into, out in pairwise((2, HIDDEN, HIDDEN, max(WIDTHS)))
    ]
    x, y = (torch.stack([2 * uniform(points, 2, generator=each) - 1 for each in generators]) for _ in range(2))
    axis = torch.linspace(-1, 1, GRID, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis).expand(trials, -1, -1)
    return Fits(initial, tuple(widths), (x, y), kernels(x, y), grid, kernels(grid, grid))


def best_errors(matrix: Float[Tensor, "*batch n n"], ranks: Sequence[int]) -> Float[Tensor, "*batch ranks"]:
    """Compute the least error √(Σ_{l>m} σ_l²)/‖K‖ of rank-m approximations of K, for each m (Eckart & Young 1936)."""
    values = torch.linalg.svdvals(matrix)
    return torch.stack([values[..., m:].norm(dim=-1) / values.norm(dim=-1) for m in ranks], -1)


def definite_floor(matrix: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch"]:
    """Compute min ‖K − G‖/‖K‖ over symmetric G ⪰ 0: √(‖A‖² + Σ_{μ<0} μ²)/‖K‖ (Higham 1988, Theorem 2.1).

    A is the antisymmetric part of K = `matrix`, and μ are the eigenvalues of the symmetric part of K.
    """
    skew, symmetric = (matrix - matrix.mT) / 2, (matrix + matrix.mT) / 2
    negative = torch.linalg.eigvalsh(symmetric).clamp(max=0)
    squares = skew.square().sum((-2, -1)) + negative.square().sum(-1)
    relative: Tensor = squares.sqrt() / torch.linalg.matrix_norm(matrix)
    return relative


def _rotation(generator: torch.Generator) -> Float[Tensor, "2 2"]:
    """Draw a rotation matrix with an angle that is uniformly distributed in TURN."""
    low, high = (math.radians(degrees) for degrees in TURN)
    angle = low + (high - low) * uniform(1, generator=generator)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack((torch.cat((cos, -sin)), torch.cat((sin, cos))))


def _learn(fits: Fits, steps: int, networks: int) -> list[list[Tensor]]:
    """Run Adam on the mean squared error of the known pairs, in float32; return each network's weights and biases."""
    sides = []
    for side in range(networks):
        weights = [weight[:, side].clone() for weight in fits.initial]
        biases = [torch.zeros(*weight.shape[:2], 1, weight.shape[-1]) for weight in weights]
        sides.append([part.requires_grad_() for layer in zip(weights, biases, strict=True) for part in layer])
    x, y = (side.float() for side in fits.points)
    goal = fits.known[:, None].float()
    optimiser = torch.optim.Adam([weight for side in sides for weight in side], lr=LR)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimiser, LR, total_steps=steps)
    with torch.enable_grad():
        for _ in range(steps):
            optimiser.zero_grad()
            # Sum over fits, so that each fit gets the gradient of its own mean only.
            loss = (_kernel(sides, fits.widths, x, y) - goal).square().mean((-2, -1)).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            rate.step()
    return [[weight.detach().double() for weight in side] for side in sides]


def _kernel(
    sides: list[list[Tensor]], widths: Sequence[int], x: Float[Tensor, "trials n 2"], y: Float[Tensor, "trials m 2"]
) -> Float[Tensor, "trials widths n m"]:
    """Compute ⟨φ_X(x), φ_Y(y)⟩/√m from the first m features, for each width m; a single network gives φ_Y = φ_X."""
    shares = torch.stack([(torch.arange(max(WIDTHS)) < m) / math.sqrt(m) for m in widths])[:, None]
    return (_features(sides[0], x) * shares.to(x)) @ _features(sides[-1], y).mT


def _features(parameters: list[Tensor], x: Float[Tensor, "trials n 2"]) -> Float[Tensor, "trials widths n features"]:
    """Compute φ(x): two hidden layers with tanh, followed by a linear layer."""
    first, first_bias, second, second_bias, last, last_bias = parameters
    hidden = ((x[:, None] @ first + first_bias).tanh() @ second + second_bias).tanh()
    return hidden @ last + last_bias
