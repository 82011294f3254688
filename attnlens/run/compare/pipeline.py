"""Compares two models on the same windows: which heads changed, by how much, and how sure that is."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from attnlens import models, requests
from attnlens.arguments import public
from attnlens.errors import UsageError
from attnlens.records import Comparison, Report, Settings
from attnlens.requests import CompareRequest, Loading
from attnlens.run.compare.changes import Changes
from attnlens.run.compare.saved import OTHER_HEADS, apart, compared_reports, read
from attnlens.run.compare.sides import ComparedModel, Pairing, correspond, same_input
from attnlens.run.in_memory import at_rest, held
from attnlens.run.inspect.pipeline import inspect, prepared
from attnlens.run.provenance import report_of
from attnlens.run.swap.saved import restored
from attnlens.runs.progress import Progress, silent

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SECOND = ("revision", "adapter")
"""Options that hold for the second model alone."""
OTHER_INPUT = (
    "The models read other numbers in the same windows (another tokenizer, or none; other lengths of windows or sizes "
    "of images): what reads them is not compared."
)
RECORDED = (
    *("source", "analyzers", "select", "seed", "sequences", "tokens", "pack"),
    *("windows", "intervals", "layers", "heads"),
)
"""Options that a report says, so that a model beside it is read alike."""


@public
def compare(
    first: str | PathLike[str] | Report | models.Loaded | PreTrainedModel,
    second: str | PathLike[str] | Report | models.Loaded | PreTrainedModel,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: Progress = silent,
    **more: Unpack[CompareRequest],
) -> Report:
    """Each head's measures in two models on the same windows: second − first, with error, p and q.

    The report is the second model's, with `comparison` (records.Comparison). p is of no change beyond what the windows
    sampled and rounding of the weights explain; q is Benjamini and Hochberg's over heads × measures; named is q ≤
    `fdr`. Either side may be a report of `inspect`, or the path of one (`.json`): a model beside it is read with its
    settings. `tokenizer` is that of models in memory. Models are loaded in float32, where `dtype` says nothing else;
    `revision` and `adapter` are of the second. Raises what `inspect` raises, and UsageError where both sides are the
    same, or read other windows.
    """
    start = time.perf_counter()
    given = requests.checked(CompareRequest, more)
    options = {name: value for name, value in more.items() if name != "fdr"}
    subjects: list[Any] = [
        read(Path(side)) if isinstance(side, str | PathLike) and Path(side).suffix == ".json" else side
        for side in (first, second)
    ]
    named = isinstance(first, str | PathLike)
    twice = _same_path(first, second) and all(options.get(name) is None for name in SECOND)
    if twice or (first is second and not named):
        raise UsageError("Both sides are the same.", "Name another model, or another report.")
    if any(isinstance(side, Report) for side in subjects):
        _refuse_ignored(subjects, options)
        reports = _reports(subjects, tokenizer, progress, options)
        found, report = compared_reports(*reports, given["fdr"]), reports[1]
    else:
        sides = _sides(subjects, tokenizer, progress, options)
        with at_rest(sides[0].loaded.model), at_rest(sides[1].loaded.model):
            found, report = compared(*sides, given["fdr"], progress), sides[1].report
    own = {name: getattr(report, name) for name in ("model", "settings", "coverage", "heads", "summary")}
    return report_of("compare", **own, comparison=found, timings={"all": time.perf_counter() - start})


def _refuse_ignored(subjects: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Raise UsageError for options that no side of these takes: a report says itself how it was made."""
    known = requests.options(CompareRequest)
    given = [
        name
        for name, value in options.items()
        if value not in (known[name].default, [], (), None) and (name, value) != ("dtype", "float32")
    ]
    if all(isinstance(side, Report) for side in subjects):
        ignored = given
    else:
        ignored = [name for name in given if name in SECOND and isinstance(subjects[1], Report)]
    if ignored:
        raise UsageError(f"A report is read as it is, so that {', '.join(ignored)} would be ignored.", "Leave it out.")


def _same_path(first: Any, second: Any) -> bool:
    if not all(isinstance(side, str | PathLike) for side in (first, second)):
        return False
    here = [Path(side).expanduser() for side in (first, second)]
    return str(first) == str(second) or (all(path.exists() for path in here) and here[0].samefile(here[1]))


def _reports(
    subjects: Sequence[Any], tokenizer: PreTrainedTokenizerBase | None, progress: Progress, options: Mapping[str, Any]
) -> tuple[Report, Report]:
    """Both sides as reports, a model read with the settings of the report beside it."""
    settings = next(side.settings for side in subjects if isinstance(side, Report))
    first, second = (
        side
        if isinstance(side, Report)
        else inspect(held(side, tokenizer), progress=progress, **{**_like(settings), **_loading(side, options, number)})
        for number, side in enumerate(subjects)
    )
    return first, second


def _like(settings: Settings) -> Any:
    """The options by which a report was made, as far as it says them."""
    found = {name: getattr(settings, name) for name in RECORDED}
    found["sequences"] = settings.sequences_asked or settings.sequences
    return {name: value for name, value in found.items() if value is not None}


def _loading(subject: Any, options: Mapping[str, Any], number: int) -> Any:
    """The options of one side: how it is loaded, and what it is fed with where no report says so."""
    found = {name: value for name, value in options.items() if number or name not in SECOND}
    if isinstance(subject, str | PathLike):
        return {"dtype": "float32", **found}
    found.pop("dtype", None)
    return found


def _sides(
    subjects: Sequence[Any], tokenizer: PreTrainedTokenizerBase | None, progress: Progress, options: Mapping[str, Any]
) -> tuple[ComparedModel, ComparedModel]:
    """Both models inspected on the first one's texts."""
    sides: list[ComparedModel] = []
    for number, subject in enumerate(subjects):
        own = None if isinstance(subject, str | PathLike | models.Loaded) else tokenizer
        given = _loading(subject, options, number)
        swaps = None
        if isinstance(subject, str | PathLike) and (Path(subject).expanduser() / models.SWAPPED).is_file():
            loading = {name: value for name, value in given.items() if name in Loading.__annotations__}
            found = restored(Path(subject).expanduser(), **loading)
            subject, swaps = found.loaded, found.swaps
            given = {name: value for name, value in given.items() if name not in loading}
        inspection, contents, cut = prepared(subject, own, progress, given)
        if sides:
            contents = sides[0].contents
        sides.append(ComparedModel.of(inspection, contents, cut, swaps))
    return sides[0], sides[1]


def compared(first: ComparedModel, second: ComparedModel, fdr: float, progress: Progress) -> Comparison:
    """What two inspected models have to do with each other."""
    if not correspond(first, second):
        return apart(first.report, second.report, fdr, OTHER_HEADS)
    if same_input(first, second):
        return Changes(Pairing.of(first, second), fdr, progress).found(first.report.model)
    pairing = Pairing.of(first.without_text(), second.without_text())
    found = Changes(pairing, fdr, progress).found(first.report.model)
    return found.model_copy(update={"notes": [OTHER_INPUT, *found.notes]})
