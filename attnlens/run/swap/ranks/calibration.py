"""Cuts calibration text into disjoint samples, and measures rises of a loss with intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from attnlens import texts
from attnlens.choices import Intervals, Unit
from attnlens.errors import TextError, UsageError
from attnlens.models import Loaded
from attnlens.records import Rise, Task, Text
from attnlens.run.outcomes.differences import Differences
from attnlens.run.outcomes.outputs import run, sequence_losses
from attnlens.statistics import Design, further, paired_difference
from attnlens.statistics.design import FEWEST_TEXTS
from attnlens.texts import MOST_SHARED, Batches, Content, Cut, shared_share
from attnlens.texts.targets import NOTHING, Fed

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

SEQUENCES = 192
"""Windows of calibration text that a budget asks for, over all texts and parts."""
PARTS = 3
"""Each window of a text in turn is fitted on, chosen by, and promised from."""
LEAST = 4
"""Windows of each text in a part, at least: what one or two rise by says little of a text."""


class Sample(NamedTuple):
    """A part of the calibration text."""

    batches: Batches
    """Its windows."""
    design: Design
    """Of which text each of them is, and over what intervals are."""

    @property
    def names(self) -> list[str]:
        """The texts, in the order of the design's numbers."""
        return list(dict.fromkeys(self.batches.parts))


def wanted(contents: Sequence[Content]) -> int:
    """How many windows a budget asks for: enough of each text for every part."""
    return max(SEQUENCES, PARTS * LEAST * len(contents))


def samples(
    loaded: Loaded,
    contents: Sequence[Content],
    cut: Cut,
    evaluated: Batches,
    intervals: Intervals | None,
    count: int = PARTS,
) -> tuple[Sample, ...]:
    """The first `count` of the parts: windows i, i + 3, i + 6 … of those chosen of each text; none is evaluated.

    Raises TextError where a text has too few windows beside those evaluated, or where one part says what another does;
    UsageError where intervals over texts are wanted of fewer than five.
    """
    found: list[Batches] = []
    for turn in range(count):
        if turn == 1:
            _check_enough(found[0], contents, evaluated)
            if intervals == "texts" and len(contents) < FEWEST_TEXTS:
                raise UsageError(
                    f"Intervals over texts need {FEWEST_TEXTS} texts, and a budget has {len(contents)} to choose by.",
                    "Give more --calibration, or leave out --intervals texts.",
                )
        skip = evaluated.sequences + turn * cut.sequences
        part = replace(cut, turn=(turn, PARTS))
        found.append(texts.batches(loaded, contents, part, apart_from=evaluated, skip_noise=skip))
    _check_repeated(loaded, found)
    return tuple(Sample(part, Design.of(part.parts, intervals)) for part in found)


def _check_enough(first: Batches, contents: Sequence[Content], evaluated: Batches) -> None:
    """Raise TextError for the first text that has too few windows for every part."""
    there = {text.name: (text.available or 0) - len(evaluated.taken.get(text.sha256, ())) for text in first.texts}
    what = "windows" if first.pack else "lines"
    for content in contents:
        if (free := there.get(content.name, 0)) < PARTS * LEAST:
            raise TextError(
                f"{content.name} has {free} {what} that are not evaluated; a budget needs {PARTS * LEAST} of each "
                f"text, {LEAST} to fit on, {LEAST} to choose ranks by and {LEAST} to promise from.",
                "Give a longer text, fewer --tokens or --sequences, or leave that text out.",
            )


def _check_repeated(loaded: Loaded, parts: Sequence[Batches]) -> None:
    """Raise TextError where a part repeats those before it: a promise from it would be none."""
    uses = ("what ranks are chosen by", "fitted on"), ("what the promise is made from", "fitted on or chosen by")
    for number, (part, (use, earlier)) in enumerate(zip(parts[1:], uses, strict=False), start=1):
        share = shared_share(loaded.tokenizer, part.passages, texts.passages(parts[:number]))
        if share > MOST_SHARED:
            raise TextError(
                f"The calibration text repeats itself: {100 * share:.0f} % of {use} is {earlier} too.",
                "Give a --calibration text that says things once.",
            )


def by_text(fed: Sequence[Fed], part: Sample) -> list[tuple[str, Fed]]:
    """The batches of a part, those cut in two or more that hold windows of several texts, each with its text's name."""
    found, start = [], 0
    for one in fed:
        names = part.batches.parts[start : start + texts.sequences_in(one.inputs)]
        start += len(names)
        edges = [0, *(at for at in range(1, len(names)) if names[at] != names[at - 1]), len(names)]
        found += [(names[low], one.rows(low, high)) for low, high in pairwise(edges)]
    return found


def joined(parts: Iterable[Batches]) -> list[Text]:
    """The texts of several parts, each with the windows of all of them."""
    every: dict[str, Text] = {}
    for text in (text for part in parts for text in part.texts):
        known = every.get(text.sha256)
        windows = sorted({*text.windows, *(known.windows if known else ())})
        every[text.sha256] = text.model_copy(update={"windows": windows})
    return list(every.values())


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
