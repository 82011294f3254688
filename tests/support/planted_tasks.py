"""Tasks for tests of training; for each, theory limits a model that lacks positions or features."""

import math

import torch

from attnlens.lab.study.examples import HELD_OUT, Cases, StudyTask


def before(tokens: int = 10, fillers: int = 4) -> StudyTask:
    """Classify whether token 0 stands before token 1 among fillers.

    A classifier without positions gives all orders of the same tokens one answer (Tsai et al. 2019, Proposition 1), and
    the tokens are independent of the class: its accuracy is 1/2. The first and the last token are always fillers.
    """

    def draw(count, draws):
        rows = torch.randint(2, 2 + fillers, (count, tokens), generator=draws)
        places = 1 + torch.rand(count, tokens - 2, generator=draws).argsort(1)[:, :2]
        rows.scatter_(1, places, torch.tensor([0, 1]).expand(count, 2))
        return rows, (places[:, 0] < places[:, 1]).long()

    return drawn("planted order", draw, (4096, 256), vocabulary=2 + fillers)


def majority(tokens: int = 11) -> StudyTask:
    """Classify whether token 1 is more frequent than token 0 (`tokens` is odd), for which no position helps."""

    def draw(count, draws):
        ones = torch.randint(tokens + 1, (count, 1), generator=draws)
        rows = (torch.rand(count, tokens, generator=draws).argsort(1) < ones).long()
        return rows, (2 * ones[:, 0] > tokens).long()

    return drawn("planted majority", draw, (4096, 256), vocabulary=2)


def only_majority() -> list[StudyTask]:
    """Return the tasks of a study; a function that another process can import."""
    return [majority()]


def drawn(name: str, draw, counts: tuple[int, int], *, vocabulary: int = 0, channels: int = 0) -> StudyTask:
    """Build a task with these numbers of training and held-out cases, drawn with fixed seeds."""
    cases = {}
    for part, seed in {"training": 10**9 + 21, **HELD_OUT}.items():
        rows, labels = draw(counts[part != "training"], torch.Generator().manual_seed(seed))
        cases[part] = Cases(list(rows), labels)
    sizes = {"length": len(rows[0]), "vocabulary": vocabulary, "classes": 2, "channels": channels}
    return StudyTask(name=name, form="classification", cases=cases, **sizes)


def angles(directions: int = 16, steps: int = 8) -> StudyTask:
    """Classify the sign of the one step that points where the last step points.

    A step is (cos θ, sin θ, sign, 0), the last (cos φ, sin φ, 0, 1); the θ are `steps` of `directions` even ones turned
    by a random angle, φ one of them. A power p of scores linear in the step has only 2p + 1 features of θ, so it cannot
    select one of many directions; exp(s cos(θ − φ)) can.
    """

    def draw(count, draws):
        slots = torch.rand(count, directions, generator=draws).argsort(1)[:, :steps]
        theta = 2 * math.pi * (slots / directions + torch.rand(count, 1, generator=draws))
        signs = 2.0 * torch.randint(2, (count, steps), generator=draws) - 1
        meant = torch.randint(steps, (count, 1), generator=draws)
        phi, zero = theta.gather(1, meant), torch.zeros(count, 1)
        shown = torch.stack((theta.cos(), theta.sin(), signs, torch.zeros_like(signs)), -1)
        last = torch.stack((phi.cos(), phi.sin(), zero, zero + 1), -1)
        return torch.cat((shown, last), 1), (signs.gather(1, meant)[:, 0] > 0).long()

    return drawn("planted angles", draw, (16384, 512), channels=4)
