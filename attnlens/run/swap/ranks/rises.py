"""Rise of a loss as a share of itself, with its interval over windows or texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from attnlens.choices import Unit
from attnlens.models import Loaded
from attnlens.records import Rise, Task
from attnlens.run.outcomes.differences import Differences
from attnlens.run.outcomes.outputs import run, sequence_losses
from attnlens.statistics import Design, further, paired_difference
from attnlens.texts.targets import NOTHING, Fed

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


UNITS: dict[Unit, Callable[[Tensor], Tensor]] = {"loss": torch.log, "ppl": lambda mean: mean}
"""Of what mean losses have the difference log(after / before), of loss or of perplexity."""


class Losses(NamedTuple):
    """Of the sequences that have anything to predict."""

    means: Float[Tensor, " some"]
    """Nats per prediction."""
    counts: Float[Tensor, " some"]
    """How many predictions each has."""
    design: Design
    """How they were sampled."""

    @property
    def mean(self) -> float:
        """Over all predictions."""
        return float((self.means * self.counts).sum() / self.counts.sum())


def losses(loaded: Loaded, batches: Sequence[Fed], task: Task, design: Design) -> Losses:
    """The loss of each sequence under the model as it is now; `design` is that of all the sequences."""
    found, there = [], []
    for fed in batches:
        logits = run(loaded.model, fed, task).logits
        assert logits is not None and fed.targets is not None  # noqa: S101, PT018  # check_task has seen to it
        found.append(sequence_losses(logits, fed.targets))
        there.append((fed.targets != NOTHING).any(1).cpu())
    means, counts = (torch.cat(part) for part in zip(*found, strict=True))
    return Losses(means, counts, design.select(torch.cat(there).nonzero()[:, 0].tolist()))


def rise_of(before: Losses, after: Tensor, names: Sequence[str], seed: int, unit: Unit = "loss") -> Rise | None:
    """after / before − 1 of the mean loss over tokens, or of perplexity, its exponential; None where it diverges.

    `after` is the mean loss of each sequence under the changed model. `names` are those of the design's texts, each of
    which has its own rise beside the common one where there are several.
    """
    if not bool(after.isfinite().all()):
        return None
    design = before.design
    share, interval = _share(before, after, seed, unit)
    alone = {}
    for number, name in enumerate(names if len(names) > 1 else ()):
        own = [at for at, text in enumerate(design.texts) if text == number]
        if own:
            part = Losses(before.means[own], before.counts[own], Design.plain(len(own)))
            alone[name] = _share(part, after[own], seed, unit)
    return Rise(
        share=share,
        ci95=interval,
        over=design.over,
        sequences=len(after),
        by_text={name: found for name, (found, _) in alone.items()},
        ci95_by_text={name: ends for name, (_, ends) in alone.items() if ends is not None},
        further=further([found for found, _ in alone.values()]) if len(alone) > 1 else None,
    )


def _share(before: Losses, after: Tensor, seed: int, unit: Unit) -> tuple[float, tuple[float, float] | None]:
    """The rise and its interval, None where there is no spread to judge by."""
    own, counts, design = before
    found = paired_difference(own, after, design, weights=counts, of=UNITS[unit], seed=seed)
    share, low, high = (math.expm1(end) for end in found)
    return share, None if math.isnan(low) else (low, high)


def rise_in(found: Differences, names: Sequence[str], seed: int, unit: Unit = "loss") -> Rise | None:
    """The same of a comparison on the evaluation text."""
    before, after, counts = (torch.cat(part) for part in (found.before, found.after, found.counts))
    return rise_of(Losses(before, counts, found.sampled), after, names, seed, unit)
