"""Built-in tasks for tests of training: of each theory says what a model without positions or features can reach."""

import math
from dataclasses import replace

import torch

from attnlens.lab.study.examples import HELD_OUT, Cases, StudyTask

SIZES = {"training": 4096, "validation": 256, "test": 256}
"""Cases of each part."""
SEEDS = {"training": 10**9 + 21, **HELD_OUT}


def before(tokens: int = 10, fillers: int = 4) -> StudyTask:
    """Whether token 0 stands before token 1 among fillers: half of the cases, and for every bag of tokens half.

    A classifier without positions gives all orders of a bag one answer (Tsai et al. 2019, Proposition 1), and the bag
    tells nothing of the class: its accuracy is 1/2 and its loss at least log 2, whatever its kernel. That holds for
    attention without a causal mask, and for pooling that does not pick a place; the first and the last token are
    always fillers, so that picking one of them helps nobody.
    """

    def draw(count, draws):
        rows = torch.randint(2, 2 + fillers, (count, tokens), generator=draws)
        places = 1 + torch.rand(count, tokens - 2, generator=draws).argsort(1)[:, :2]
        rows.scatter_(1, places, torch.tensor([0, 1]).expand(count, 2))
        return rows, (places[:, 0] < places[:, 1]).long()

    return drawn("planted order", draw, SIZES, vocabulary=2 + fillers)


def majority(tokens: int = 11) -> StudyTask:
    """Whether token 1 stands more often than token 0 (`tokens` is odd): the bag tells the class, so no position helps.

    Each class has half of the cases but for chance, and each count of token 1 is as likely as any other.
    """

    def draw(count, draws):
        ones = torch.randint(tokens + 1, (count, 1), generator=draws)
        rows = (torch.rand(count, tokens, generator=draws).argsort(1) < ones).long()
        return rows, (2 * ones[:, 0] > tokens).long()

    return drawn("planted majority", draw, SIZES, vocabulary=2)


def drawn(name: str, draw, sizes: dict[str, int], *, vocabulary: int = 0, channels: int = 0) -> StudyTask:
    """A task of cases drawn with fixed seeds: `draw` gives so many sequences and their classes."""
    cases = {}
    for part, count in sizes.items():
        rows, labels = draw(count, torch.Generator().manual_seed(SEEDS[part]))
        cases[part] = Cases(list(rows), labels)
    length = max(len(row) for of_part in cases.values() for row in of_part.inputs)
    sizes = {"length": length, "vocabulary": vocabulary, "classes": 2, "channels": channels}
    return StudyTask(name=name, form="classification", cases=cases, **sizes)


ANGLE_SIZES = {"training": 16384, "validation": 512, "test": 512}
"""Cases of each part."""


def angles(directions: int = 16, steps: int = 8) -> StudyTask:
    """Which sign the one step has that points where the last step points: directions on a circle, each step another.

    A step is (cos θ, sin θ, sign, 0), the last (cos φ, sin φ, 0, 1); the θ are `steps` of `directions` even ones turned
    by a random angle, φ one of them. In queries and keys linear in the step, with a constant or without, the score is
    of degree 1 in cos θ, sin θ, so that its power p is a trigonometric polynomial of degree p: 2p + 1 features, however
    wide the head, and `least_leak(directions, 2p + 1)` bounds from below what comes from other directions.
    exp(s cos(θ − φ)) leaks as little as it likes. Order and positions have nothing to do with the class. Layers above
    the first may find more features in what feed-forward parts make of a step.
    """

    def draw(count, draws):
        slots = torch.rand(count, directions, generator=draws).argsort(1)[:, :steps]
        theta = 2 * math.pi * (slots / directions + torch.rand(count, 1, generator=draws))
        signs = 2.0 * torch.randint(2, (count, steps), generator=draws) - 1
        meant = torch.randint(steps, (count, 1), generator=draws)
        phi, zero = theta.gather(1, meant), torch.zeros(count, 1)
        held = torch.stack((theta.cos(), theta.sin(), signs, torch.zeros_like(signs)), -1)
        asked = torch.stack((phi.cos(), phi.sin(), zero, zero + 1), -1)
        return torch.cat((held, asked), 1), (signs.gather(1, meant)[:, 0] > 0).long()

    return drawn("planted angles", draw, ANGLE_SIZES, channels=4)


def least_leak(places: int, features: int) -> float:
    """√((V/r − 1)/(V − 1)), the least root mean square of k(q_a, k_b)/k(q_a, k_a), a ≠ b, of a kernel of r features.

    V queries each have a key of their own among V. With A_ab that ratio, V = tr A ≤ ‖A‖_* ≤ √r ‖A‖_F by the rank r of
    A, and ‖A‖_F² = V + Σ_{a≠b} A_ab². Zero where r ≥ V.
    """
    return math.sqrt(max(places / features - 1, 0.0) / (places - 1))


def permuted(task: StudyTask, seed: int) -> StudyTask:
    """The same sequences with the labels of each part in a random order, so that no model can beat chance on them.

    Chance is the share of the commonest class, or less where a model names others.
    """
    draws = torch.Generator().manual_seed(seed)
    mixed = {
        part: each._replace(targets=each.targets[torch.randperm(len(each.targets), generator=draws)])
        for part, each in task.cases.items()
    }
    return replace(task, name=f"{task.name}, labels permuted", cases=mixed)
