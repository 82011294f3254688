"""Compares two models on the same windows: which heads changed, by how much, and how sure that is."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Unpack

from attnlens import models, requests
from attnlens.arguments import public
from attnlens.errors import UsageError
from attnlens.records import Comparison, Report
from attnlens.requests import CompareRequest
from attnlens.run.compare.changes import Changes
from attnlens.run.compare.shifts import shifts
from attnlens.run.compare.sides import Pairing, Side, correspond, same_input
from attnlens.run.in_memory import held
from attnlens.run.inspect.pipeline import prepared
from attnlens.run.progress import Progress, silent
from attnlens.run.provenance import report_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SECOND = ("revision", "adapter")
"""Options that hold for the second model alone."""
OTHER_HEADS = "The models have other sites or heads, so that none corresponds to one: distributions alone."
OTHER_INPUT = (
    "The models read other numbers in the same windows (another tokenizer, or another size of image): distributions "
    "alone."
)


@public
def compare(
    first: str | PathLike[str] | models.Loaded | PreTrainedModel,
    second: str | PathLike[str] | models.Loaded | PreTrainedModel,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress = silent,
    **more: Unpack[CompareRequest],
) -> Report:
    """Each head's measures in two models on the same windows: second − first, with error, p and q.

    The report is the second model's, with `comparison` (records.Comparison). p is of no change beyond what the windows
    sampled and rounding of the weights explain; q is Benjamini and Hochberg's over heads × measures; named is q ≤
    `fdr`. `tokenizer` is that of models in memory. Both are loaded in float32, where `dtype` says nothing else;
    `revision` and `adapter` are of the second model. Raises what `inspect` raises, and UsageError where both are one
    model in memory.
    """
    start = time.perf_counter()
    given = requests.checked(CompareRequest, more)
    if first is second and not isinstance(first, str):
        raise UsageError("Both sides are the same model in memory.", "Load it twice, or name another one.")
    options = {name: value for name, value in more.items() if name != "fdr"}
    sides = _sides((first, second), tokenizer, progress, options)
    found = compared(*sides, given["fdr"], progress)
    timings = {"all": time.perf_counter() - start}
    second_report = sides[1].report
    return report_of(
        "compare",
        model=second_report.model,
        settings=second_report.settings,
        coverage=second_report.coverage,
        heads=second_report.heads,
        summary=second_report.summary,
        comparison=found,
        timings=timings,
    )


def _sides(
    subjects: Sequence[Any], tokenizer: PreTrainedTokenizerBase | None, progress: Progress, more: Mapping[str, Any]
) -> tuple[Side, Side]:
    """Both models inspected on the first one's texts."""
    sides: list[Side] = []
    for number, subject in enumerate(subjects):
        options = {name: value for name, value in more.items() if number or name not in SECOND}
        loaded = held(subject, tokenizer)
        if isinstance(loaded, models.Loaded):
            options.pop("dtype", None)
        else:
            options = {"dtype": "float32", **options}
        inspection, contents, cut = prepared(loaded, None, progress, options)
        if sides:
            contents = sides[0].contents
        sides.append(Side.of(inspection, contents, cut))
    return sides[0], sides[1]


def compared(first: Side, second: Side, fdr: float, progress: Progress) -> Comparison:
    """What two inspected models have to do with each other."""
    base = first.report.model
    problem = None if correspond(first, second) else OTHER_HEADS
    problem = problem or (None if same_input(first, second) else OTHER_INPUT)
    if problem is not None:
        told = shifts(first.report, second.report)
        return Comparison(base=base, paired=False, fdr=fdr, shifts=told, notes=[problem])
    return Changes(Pairing.of(first, second), fdr, progress).found(base)
